"""Sampling that leaves the ids on the device, for the next step to read there.

The life of a step's rows:

1. ``sample_on_device`` applies bias and min_tokens, turns each row's top-k, top-p and min-p into a
   floor and an edge, chooses an id a row (engine/kernels/sampling.py) and starts to read ids and
   faults back. No waiting.
2. ``collect`` waits for them. Rows with penalties, which are never in flight, are sampled on the
   host from their raw logits; log-probabilities are made there as well.

As engine/sampler.py: the same ids, but for ties that fp32 rounding of another order decides.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.types import SamplingParams
from engine.batch import SampleRequest
from engine.kernels.sampling import RowChoices, choose
from engine.logprobs import token_logprobs
from engine.penalties import has_penalties
from engine.readback import Readback, to_device
from engine.sampler import NOT_FINITE, WINDOW, Sampled, sample


class DeviceSampled:
    """See `engine.kernels.SampledRows`."""

    def __init__(
        self, logits: Tensor, requests: Sequence[SampleRequest], ids: Tensor, finite: Tensor
    ) -> None:
        self.ids = ids
        self._requests = requests
        self._result = Readback(torch.stack((ids, finite.to(torch.int64))))
        # A captured graph's next replay overwrites its logits before these are read.
        self._host_rows = [i for i, request in enumerate(requests) if _needs_host(request)]
        self._host_logits: Tensor | None = None
        if self._host_rows:
            rows = to_device(torch.tensor(self._host_rows), logits.device)
            self._host_logits = logits.index_select(0, rows)

    def collect(self) -> list[Sampled]:
        ids, finite = self._result.wait().tolist()
        sampled = [
            Sampled(token_id) if is_finite else Sampled(error=NOT_FINITE)
            for token_id, is_finite in zip(ids, finite, strict=True)
        ]
        if self._host_logits is not None:
            for i, row in zip(self._host_rows, self._host_logits.cpu(), strict=True):
                if finite[i]:
                    sampled[i] = _on_host(row, ids[i], self._requests[i])
        return sampled


def sample_on_device(logits: Tensor, requests: Sequence[SampleRequest]) -> DeviceSampled:
    """One token a row of fp32 ``logits`` ``[rows, vocab]``, row i by ``requests[i]``."""
    changed = _changed(logits, requests)
    finite = logits.sum(dim=1).isfinite() & changed.amax(dim=1).isfinite()
    ids = choose(changed, _choices(changed, requests))
    return DeviceSampled(logits, requests, ids, finite)


def _needs_host(request: SampleRequest) -> bool:
    return has_penalties(request.params) or request.params.logprobs is not None


def _changed(logits: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """With bias, then the min_tokens mask, as `engine.penalties.adjusted` has them."""
    vocab_size = logits.shape[1]
    biased: list[tuple[int, int, float]] = []
    masked: list[tuple[int, int]] = []
    for row, request in enumerate(requests):
        params = request.params
        biased += [(row, i, bias) for i, bias in params.logit_bias if 0 <= i < vocab_size]
        if request.num_output_tokens < params.min_tokens:
            masked += [(row, i) for i in params.stop_token_ids if 0 <= i < vocab_size]
    if not biased and not masked:
        return logits
    changed = logits.clone()
    if biased:
        at = to_device(
            torch.tensor([(row, i) for row, i, _ in biased]).t().contiguous(), logits.device
        )
        values = to_device(torch.tensor([bias for _, _, bias in biased]), logits.device)
        changed.index_put_((at[0], at[1]), values, accumulate=True)
    if masked:
        at = to_device(torch.tensor(masked).t().contiguous(), logits.device)
        changed[at[0], at[1]] = -math.inf
    return changed


def _on_host(row: Tensor, device_id: int, request: SampleRequest) -> Sampled:
    if has_penalties(request.params):
        return sample(row[None], [request])[0]
    num_top = request.params.logprobs
    assert num_top is not None
    # Of the id that the next step may have read already.
    return Sampled(device_id, token_logprobs(row.numpy(), device_id, num_top))


def _choices(logits: Tensor, requests: Sequence[SampleRequest]) -> RowChoices:
    device, vocab_size = logits.device, logits.shape[1]
    params = [request.params for request in requests]
    temperatures = [0.0 if p.greedy else p.temperature for p in params]
    # Below the window nothing can win; a greedy row needs no more than its largest.
    floors = [max(math.log(p.min_p) if p.min_p > 0 else -math.inf, -WINDOW) for p in params]
    integers = np.array(
        [
            np.array([p.seed for p in params], np.uint64).view(np.int64),
            [request.position for request in requests],
        ]
    )
    numbers = to_device(torch.tensor([temperatures, floors]), device)
    whole = to_device(torch.from_numpy(integers), device)
    edges = torch.full((len(requests),), vocab_size, dtype=torch.int32, device=device)
    choices = RowChoices(numbers[0], whole[0], whole[1], numbers[1], edges)
    for i, p in enumerate(params):
        if not p.greedy and (0 < p.top_k < vocab_size or p.top_p < 1):
            _truncate(logits[i], p, i, choices)
    return choices


def _truncate(logits: Tensor, params: SamplingParams, row: int, choices: RowChoices) -> None:
    """Raises a row's floor to where top-k, then top-p of what that and min-p leave, cut it."""
    # Divided as the kernel divides, to the last bit: scores are compared for equality there.
    scores = (logits - logits.max()) / choices.temperatures[row]
    order = torch.sort(scores, descending=True, stable=True)
    floor = torch.full_like(order.values[0], math.log(params.min_p) if params.min_p > 0 else -1e30)
    if 0 < params.top_k < len(logits):
        floor = torch.maximum(floor, order.values[params.top_k - 1])
    edge = choices.edges[row].clone()
    if params.top_p < 1:
        weights = order.values.double().exp().masked_fill(order.values < floor, 0.0)
        mass = weights.cumsum(0)
        # The first place where the mass is reached is the last that takes part.
        last = (mass < params.top_p * mass[-1]).sum().clamp(max=len(logits) - 1)
        edge = torch.where(order.values[last] >= floor, order.indices[last], edge)
        floor = torch.maximum(floor, order.values[last])
    choices.edges[row] = torch.where(floor >= -WINDOW, edge, choices.edges[row])
    choices.floors[row] = floor.clamp(min=-WINDOW)
