"""One bad row must not end its batch-mates: a `ModelRunner` around another.

1. A step that raises is computed again row by row, and only the rows that raise by themselves come
   back with ``error`` set. Computing a row twice is harmless: it writes the same KV and draws the
   same token (invariant I3).
2. Where no row raises alone, the fault is gone and nobody notices but the log.
3. At depth 1 the row before may have been sampled by a step that is not collected yet: row by row,
   such an ``IN_FLIGHT`` id is filled in from that step's own results.
4. An id outside of the vocabulary is an error of its row: the next step would read, or a sampler
   write, where another row's numbers are.

Guarded are launch, and at depth 0 collect too. At depth 1 the next step is under way when collect
raises, mostly because the device is broken: that still ends the engine.
"""

import logging
from dataclasses import replace

from common import failpoints
from common.types import SequenceId, TokenId
from engine.batch import IN_FLIGHT, Batch, BatchRow, RowResult
from engine.runner import ModelRunner, StepHandle

log = logging.getLogger(__name__)


class _Step:
    """A handle that may be collected twice: by the engine, and for a later step's ids."""

    def __init__(
        self, batch: Batch, handle: StepHandle | None, results: list[RowResult], vocab_size: int
    ) -> None:
        self.batch = batch
        self._handle = handle
        self._results = results
        self._vocab_size = vocab_size
        _check_ids(results, vocab_size)

    @property
    def is_alone(self) -> bool:
        """The runner does not know all of its tokens: they were not one step to it."""
        return self._handle is None

    def collect(self) -> list[RowResult]:
        if self._handle is not None and not self._results:
            self._results = self._handle.collect()
            _check_ids(self._results, self._vocab_size)
        return self._results

    def sampled(self) -> dict[SequenceId, TokenId]:
        rows = zip(self.batch.rows, self.collect(), strict=True)
        return {row.seq_id: result.token_ids[-1] for row, result in rows if result.token_ids}


def _check_ids(results: list[RowResult], vocab_size: int) -> None:
    for result in results:
        for token_id in result.token_ids:
            if not 0 <= token_id < vocab_size:
                result.error = "sampled an id that is not in the vocabulary"


class RowGuard:
    """``async_depth`` is the engine's."""

    def __init__(self, runner: ModelRunner, async_depth: int) -> None:
        self._runner = runner
        self._collects_at_once = async_depth == 0
        self._last: _Step | None = None

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)

    def launch(self, batch: Batch) -> StepHandle:
        if self._last is not None and self._last.is_alone:
            batch = self._filled_in(batch)
        try:
            step = self._step(batch)
        except Exception:
            log.exception("a step of %d rows failed; each is computed alone", len(batch.rows))
            batch = self._filled_in(batch)
            results = [self._alone(batch.step_id, row) for row in batch.rows]
            step = _Step(batch, None, results, self.vocab_size)
        self._last = step
        return step

    def _step(self, batch: Batch) -> _Step:
        failpoints.hit("engine.step")
        handle = self._runner.launch(batch)
        results = handle.collect() if self._collects_at_once else []
        return _Step(batch, handle, results, self.vocab_size)

    def _alone(self, step_id: int, row: BatchRow) -> RowResult:
        try:
            failpoints.hit("engine.row")
            (result,) = self._runner.launch(Batch(step_id, [row])).collect()
            return result
        except Exception as error:
            log.exception("sequence %d failed by itself", row.seq_id)
            return RowResult(error=f"raised {type(error).__name__}")

    def _filled_in(self, batch: Batch) -> Batch:
        """Without IN_FLIGHT. A row whose token never came to be keeps it, and will be refused."""
        if all(row.token_ids[0] != IN_FLIGHT for row in batch.rows) or self._last is None:
            return batch
        sampled = self._last.sampled()
        rows = [
            replace(row, token_ids=[sampled.get(row.seq_id, IN_FLIGHT), *row.token_ids[1:]])
            if row.token_ids[0] == IN_FLIGHT
            else row
            for row in batch.rows
        ]
        return Batch(batch.step_id, rows)
