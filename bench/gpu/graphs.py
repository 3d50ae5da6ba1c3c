"""CUDA graphs against eager steps, and how long a decode step of the 8B shape takes."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.models import LARGE, TINY, decode_weight_bytes, random_model
from bench.gpu.rates import COPY, rate
from bench.gpu.report import Figure, Machine, Outcome
from bench.gpu.timing import median_s, profile
from engine.cuda_graphs import Captured, CudaBackend, DecodeGraphs, DecodeInputs, GraphBackend
from engine.kernels import kernel_set
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.llama import LlamaModel

BLOCK_SIZE = 16


class _ComputesAgain:
    """What a graph does, without a GPU: the control around it is the same."""

    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        output = compute().clone()
        return Captured(lambda: output.copy_(compute()), output)

    def reserved_bytes(self) -> int:
        return 0


def check_graph_control(machine: Machine) -> Outcome:
    """Each padded size on a pool whose other blocks are NaN, against eager steps; on a GPU with
    real graphs. A larger step before must not show through."""
    config = TINY
    sizes = [1, 2, 4, 8] if machine.has_gpu else [1, 2]
    dtype = torch.float32
    cache = _poisoned_cache(machine, config, dtype, num_blocks=2 * sizes[-1] + 1)
    model = random_model(config, dtype, machine.device, kernel_set("triton", cache))
    backend: GraphBackend = CudaBackend() if machine.has_gpu else _ComputesAgain()
    graphs = DecodeGraphs(model, cache, sizes, 2 * BLOCK_SIZE, backend)
    worst = 0.0
    for num_rows in (sizes[-1], *range(1, sizes[-1] + 1)):
        inputs = _first_tokens(machine, cache, num_rows)
        replayed = graphs.run(inputs)
        assert replayed is not None
        eager = _eager(model, cache, inputs)
        # As NaN would be, a difference of NaN is the worst.
        worst = max(worst, float((replayed - eager).abs().max().nan_to_num(nan=float("inf"))))
    return Outcome([Figure("graph against eager: largest difference", worst, "1", 1e-5)])


def check_decode_steps(machine: Machine) -> Outcome:
    """8B shape, bf16, greedy, context 1,024, at batch 1 and 64."""
    copy, context = rate(machine, COPY), 1024
    config, dtype, batches = LARGE, torch.bfloat16, (1, 64)
    width = context // BLOCK_SIZE + 1
    shape = (64 * width + 1, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, 128)
    cache = KVCache(torch.zeros(shape, dtype=dtype, device=machine.device))
    kernels = kernel_set("triton", cache)
    model = random_model(config, dtype, machine.device, kernels)
    graphs = DecodeGraphs(model, cache, batches, context + BLOCK_SIZE, CudaBackend())
    outcome = Outcome([Figure("memory of the graphs", graphs.memory_bytes / 2**20, "MiB", 1024.0)])
    for batch in batches:
        spans = [
            Span(i, 1, context, range(1 + i * width, 1 + (i + 1) * width)) for i in range(batch)
        ]
        inputs = _inputs(machine, cache, spans)

        def step(inputs: DecodeInputs = inputs) -> Tensor:
            hidden = graphs.run(inputs)
            assert hidden is not None
            return model.logits(hidden).argmax(dim=1)

        with torch.inference_mode():
            seconds = median_s(step, repeats=20, sweeps=False)
            kv_bytes = batch * (context + 1) * cache.block_bytes // BLOCK_SIZE
            least_s = (decode_weight_bytes(config, 2) + kv_bytes) / copy
            label = f"step at batch {batch} / time to read weights and KV"
            figure = Figure(label, seconds / least_s, "1", 1.4, 1.25)
            outcome.figures += [figure, Figure(f"step at batch {batch}", seconds * 1e3, "ms")]
            if figure.misses_aim:
                outcome.profile += profile(step)
    return outcome


def _poisoned_cache(
    machine: Machine, config: ModelConfig, dtype: torch.dtype, num_blocks: int
) -> KVCache:
    shape = (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_size)
    return KVCache(torch.full(shape, float("nan"), dtype=dtype, device=machine.device))


def _first_tokens(machine: Machine, cache: KVCache, num_rows: int) -> DecodeInputs:
    """Of sequences of one token, each in a block of its own."""
    return _inputs(machine, cache, [Span(i, 1, 0, [2 * i + 1]) for i in range(num_rows)])


def _inputs(machine: Machine, cache: KVCache, spans: list[Span]) -> DecodeInputs:
    slots = [cache.slots(span.block_ids, span.start, span.context)[0] for span in spans]
    packed = torch.tensor(
        [[7 + span.first for span in spans], [span.start for span in spans], slots],
        device=machine.device,
    )
    return DecodeInputs(packed[0], packed[1], packed[2], spans)


def _eager(model: LlamaModel, cache: KVCache, inputs: DecodeInputs) -> Tensor:
    attention = model.kernels.attention(cache, inputs.spans)
    with torch.inference_mode():
        return model.forward(inputs.token_ids, inputs.positions, inputs.slots, cache, attention)
