"""The arg max of score + Gumbel noise on the device, with the noise of engine/philox.py.

Invariant I3 of docs/design.md: score = (logit - largest logit) / T, noise = Philox4x32-10 of (seed,
position, id). A row with temperature 0 gets no noise. An id takes part if its score is above the
row's *floor*, or equal to it and the id no greater than the row's *edge*: that is what top-k, top-p
and min-p come to (engine/kernels/device_sampler.py). Of equal sums the lowest id wins.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tuning import options

_GROUPS = 256
_IDS_PER_COUNTER = 4


@dataclass(frozen=True, slots=True)
class RowChoices:
    """How to choose, one element a row: fp32 temperatures and floors (a score), int64 seeds (the
    bits of the unsigned seed) and positions, int32 edges (an id)."""

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    floors: Tensor
    edges: Tensor


def choose(logits: Tensor, choices: RowChoices) -> Tensor:
    """Ids int64 ``[rows]`` of fp32 ``logits`` ``[rows, vocab]``, always within the vocabulary, also
    where logits are not finite."""
    num_rows, vocab_size = logits.shape
    greatest = logits.amax(dim=1)
    num_chunks = triton.cdiv(vocab_size, _GROUPS * _IDS_PER_COUNTER)
    sums = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _best_of_chunk[(num_rows, num_chunks)](
        logits, greatest, choices.temperatures, choices.seeds, choices.positions, choices.floors,
        choices.edges, sums, ids, logits.stride(0), vocab_size, num_chunks,
        GROUPS=_GROUPS, **options(4),
    )  # fmt: skip
    _best_of_row[(num_rows,)](
        sums, ids, chosen, num_chunks, vocab_size,
        BLOCK=triton.next_power_of_2(num_chunks), **options(1),
    )  # fmt: skip
    return chosen


@triton.jit
def _best_of_chunk(
    logits, greatests, temperatures, seeds, positions, floors, edges, sums, ids,
    stride, vocab_size, num_chunks, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    # Ids in order: four neighbours are the words of one counter.
    candidates = chunk * GROUPS * 4 + tl.arange(0, GROUPS * 4)
    inside = candidates < vocab_size
    logit = tl.load(logits + row * stride + candidates, mask=inside, other=float("-inf"))
    drawn = temperature > 0
    # Rounded to the nearest, as torch divides: a floor is one of these scores.
    score = tl.div_rn(logit - tl.load(greatests + row), tl.where(drawn, temperature, 1.0))
    floor = tl.load(floors + row)
    allowed = (score > floor) | ((score == floor) & (candidates <= tl.load(edges + row)))
    noise = _gumbel(
        tl.load(seeds + row), tl.load(positions + row), chunk * GROUPS + tl.arange(0, GROUPS)
    )
    total = score + tl.where(drawn, noise, 0.0)
    total = tl.where(inside & allowed, total, float("-inf"))
    best = tl.max(total, 0)
    winner = tl.min(tl.where(total == best, candidates, 2**31 - 1), 0)
    tl.store(sums + row * num_chunks + chunk, best)
    tl.store(ids + row * num_chunks + chunk, winner)


@triton.jit
def _gumbel(seed, position, groups):
    """Noise ``[4 * len(groups)]`` of the ids 4 g, 4 g + 1, 4 g + 2, 4 g + 3 of each group g."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    zero = tl.zeros_like(groups).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, groups.to(tl.uint32), zero + low, zero + high, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([groups.shape[0] * 4])
    # u = (bits + 1/2) / 2**23. The device's logarithm is not exact near 1, where -ln u = t + t^2/2
    # + ... of t = 1 - u, which fp32 holds exactly, is; the first seven terms, to 1e-8.
    bits = (words >> 9).to(tl.float32)
    u = (bits + 0.5) * 1.1920928955078125e-07
    t = (8388607.5 - bits) * 1.1920928955078125e-07
    series = t * (1 + t * (1 / 2 + t * (1 / 3 + t * (1 / 4 + t * (1 / 5 + t * (1 / 6 + t / 7))))))
    minus_log = tl.where(t < 0.0625, series, -tl.log(u))
    return -tl.log(minus_log)


@triton.jit
def _best_of_row(sums, ids, chosen, num_chunks, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    there = chunks < num_chunks
    total = tl.load(sums + row * num_chunks + chunks, mask=there, other=float("-inf"))
    candidates = tl.load(ids + row * num_chunks + chunks, mask=there, other=2**31 - 1)
    best = tl.max(total, 0)
    winner = tl.min(tl.where(total == best, candidates, 2**31 - 1), 0)
    # Where nothing is a number, nothing wins.
    tl.store(chosen + row, tl.minimum(winner, vocab_size - 1).to(tl.int64))
