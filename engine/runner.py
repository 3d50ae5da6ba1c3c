"""What the engine needs of a model.

Implementations: `OracleRunner` (engine/oracle.py), `NullRunner` (engine/null_runner.py) and
`TorchRunner` (engine/model_runner.py). All run on the engine thread and get the KV pool from
outside, a tensor ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]``. ::

    engine thread                           once a step, in this order
    -------------                           --------------------------
    runner.copy_block(source, target)       0..n times, before launch: copy-on-write at admission
    handle = runner.launch(batch)           starts the step; may return before it is done
    runner.launch(next_batch)               at most one more, when the engine runs at depth 1;
                                            its rows may name tokens of the first as IN_FLIGHT
    handle.collect()                        waits; once a handle, oldest handle first
"""

from typing import Protocol

from engine.batch import Batch, RowResult


class StepHandle(Protocol):
    """A step under way."""

    def collect(self) -> list[RowResult]:
        """Waits for the step; one result a batch row, in order."""
        ...


class ModelRunner(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def launch(self, batch: Batch) -> StepHandle:
        """Starts a step. A row that cannot be computed comes back with ``error`` set; an exception
        here or in collect is a broken runner and ends the engine."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block inside the pool, ordered after every launched step's writes."""
        ...
