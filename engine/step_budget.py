"""How many tokens a step may compute on this machine so that running streams hardly notice it.

A step with a chunk of a prompt holds up every stream that decodes beside it, for as long as the
step takes. So the budget of a step is a time: the largest power of two whose step stays under
`STEP_S`, found by computing chunks of a made-up prompt before anything is served.
"""

import time
from collections.abc import Callable

from common.types import SequenceId
from engine.batch import Batch, BatchRow
from engine.runner import ModelRunner

STEP_S = 0.25
_MIN_TOKENS, _MAX_TOKENS = 32, 2048


def measured_step_budget(
    runner: ModelRunner,
    block_size: int,
    num_blocks: int,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Tokens, 32 to 2,048. Writes into the pool's blocks, the null block not among them: nothing in
    them may be of use yet. ``num_blocks`` counts the null block."""
    best = num_tokens = _MIN_TOKENS
    _compute(runner, block_size, min(num_tokens, (num_blocks - 1) * block_size))
    while num_tokens <= min(_MAX_TOKENS, (num_blocks - 1) * block_size):
        start_s = clock()
        _compute(runner, block_size, num_tokens)
        elapsed_s = clock() - start_s
        if elapsed_s < STEP_S:
            best = num_tokens
        # More than twice as many tokens take more than twice as long.
        if elapsed_s >= STEP_S / 2:
            break
        num_tokens *= 2
    return best


def _compute(runner: ModelRunner, block_size: int, num_tokens: int) -> None:
    block_ids = range(1, -(-num_tokens // block_size) + 1)
    row = BatchRow(SequenceId(0), token_ids=[0] * num_tokens, start=0, block_ids=block_ids)
    runner.launch(Batch(step_id=0, rows=[row])).collect()
