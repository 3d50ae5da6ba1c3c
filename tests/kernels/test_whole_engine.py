"""The runner with Triton kernels, interpreted, against plain torch on the same tiny model."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.random_llama import CONFIG, GREEDY, Generation, poisoned_cache, tiny_model
from torch import Tensor

from common.types import SequenceId
from engine.batch import IN_FLIGHT, Batch, BatchRow, RowResult, SampleRequest
from engine.cuda_graphs import Captured, DecodeGraphs, DecodeInputs, padded_sizes
from engine.device_runner import DeviceRunner
from engine.kernels import kernel_set
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.model_runner import TorchRunner

PROMPTS = [[5, 17, 99, 3, 140, 8, 8, 61, 7, 23, 54, 11, 2, 90, 33, 71, 16], [1], [9] * 16]
NUM_TOKENS = 16
MAX_MODEL_LEN = 64


class RecordedBackend:
    """Computes again instead of replaying, into the same output: the control is that of CUDA."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []

    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        output = compute().clone()

        def replay() -> None:
            self.num_replays.append(len(output))
            output.copy_(compute())

        return Captured(replay, output)

    def reserved_bytes(self) -> int:
        return 0


def triton_runner(
    cache: KVCache, sizes: list[int] | None = None
) -> tuple[DeviceRunner, RecordedBackend]:
    model = tiny_model(kernel_set("triton", cache))
    backend = RecordedBackend()
    graphs = DecodeGraphs(model, cache, sizes, MAX_MODEL_LEN, backend) if sizes else None
    return DeviceRunner(model, cache, graphs), backend


@pytest.fixture(scope="module")
def greedy_truth() -> list[list[int]]:
    runner = TorchRunner(tiny_model(kernel_set("torch")), poisoned_cache())
    return Generation(PROMPTS, [GREEDY] * 3).run(runner, NUM_TOKENS, chunk=7)


@pytest.mark.parametrize(
    ("sizes", "num_tokens"), [(None, NUM_TOKENS), ([4], 4)], ids=["eager", "graphs"]
)
def test_greedy_ids_are_those_of_torch(
    greedy_truth: list[list[int]], sizes: list[int] | None, num_tokens: int
) -> None:
    """Chunked prompts, mixed steps, then decodes; the pool is NaN where nothing was written."""
    runner, backend = triton_runner(poisoned_cache(), sizes)
    ids = Generation(PROMPTS, [GREEDY] * 3).run(runner, num_tokens, chunk=7)
    assert ids == [truth[:num_tokens] for truth in greedy_truth]
    assert bool(backend.num_replays) == (sizes is not None)


def test_sampled_ids_are_those_of_torch() -> None:
    base = replace(GREEDY, temperature=0.9, seed=2**64 - 1)
    params = [base, replace(base, top_k=20, top_p=0.9), replace(base, repetition_penalty=1.3)]
    truth = TorchRunner(tiny_model(kernel_set("torch")), poisoned_cache())
    runner, _ = triton_runner(poisoned_cache())
    expected = Generation(PROMPTS, params).run(truth, 3)
    assert Generation(PROMPTS, params).run(runner, 3) == expected


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_each_padded_size_equals_eager_on_a_poisoned_pool(num_rows: int) -> None:
    """Inputs of an earlier, larger step must not show through."""
    cache = poisoned_cache()
    blocks = [[3, 7], [5], [11, 2]]
    contexts = [17, 1, 20]
    runner, backend = triton_runner(cache, [1, 2, 4])
    generator = torch.Generator().manual_seed(1)
    shape = (2, CONFIG.num_kv_heads, CONFIG.head_size)
    for table, context in zip(blocks, contexts, strict=True):
        slots = torch.tensor(cache.slots(table, 0, context))
        for layer in range(CONFIG.num_layers):
            values = torch.randn((context, *shape), generator=generator)
            cache.write(layer, slots, values[:, 0], values[:, 1])
    spans = [Span(i, 1, contexts[i] - 1, blocks[i]) for i in range(3)]
    graphs = runner._graphs
    assert graphs is not None
    graphs.run(decode_inputs(cache, spans))
    hidden = graphs.run(decode_inputs(cache, spans[:num_rows]))
    assert hidden is not None
    assert backend.num_replays == [4, {1: 1, 2: 2, 3: 4}[num_rows]]
    inputs = decode_inputs(cache, spans[:num_rows])
    attention = kernel_set("torch").attention(cache, inputs.spans)
    expected = tiny_model(kernel_set("torch")).forward(
        inputs.token_ids, inputs.positions, inputs.slots, cache, attention
    )
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    # Padding wrote nowhere: the null block is as poisoned as before.
    assert cache.layers[0].keys[0].isnan().all()


def decode_inputs(cache: KVCache, spans: list[Span]) -> DecodeInputs:
    slots = [cache.slots(span.block_ids, span.start, span.context)[0] for span in spans]
    return DecodeInputs(
        torch.tensor([40 + span.first for span in spans]),
        torch.tensor([span.start for span in spans]),
        torch.tensor(slots),
        spans,
    )


def test_too_many_rows_run_eagerly() -> None:
    cache = poisoned_cache()
    runner, backend = triton_runner(cache, [1])
    assert runner._graphs is not None
    spans = [Span(i, 1, 0, [i + 1]) for i in range(2)]
    assert runner._graphs.run(decode_inputs(cache, spans)) is None
    assert backend.num_replays == []


def test_padded_sizes() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(6) == [1, 2, 4, 6]
    assert padded_sizes(8) == [1, 2, 4, 8]
    assert padded_sizes(30) == [1, 2, 4, 8, 16, 24, 30]


def test_a_step_is_launched_before_the_one_before_is_collected() -> None:
    """Depth 1: the id in flight is read where the launch before left it."""
    cache = poisoned_cache()
    runner, _ = triton_runner(cache)

    def launch(ids: list[int], start: int) -> Callable[[], list[RowResult]]:
        end = start + len(ids)
        request = SampleRequest(GREEDY, 2, end, [])
        row = BatchRow(SequenceId(1), ids, start, [4], request)
        return runner.launch(Batch(0, [row])).collect

    first = launch([5, 17], 0)
    second = launch([IN_FLIGHT], 2)
    third = launch([IN_FLIGHT], 3)
    ids = [collect()[0].token_ids[0] for collect in (first, second, third)]
    truth = TorchRunner(tiny_model(kernel_set("torch")), poisoned_cache())
    assert [ids] == Generation([[5, 17]], [GREEDY]).run(truth, 3)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_that_fails_fails_alone() -> None:
    """NaN in what one row reads; a foreign id; an id in flight that never came to be."""
    cache = poisoned_cache()
    runner, _ = triton_runner(cache)
    rows = [
        BatchRow(SequenceId(1), [5], 3, [4], SampleRequest(GREEDY, 2, 4, [])),  # reads NaN
        BatchRow(SequenceId(2), [5], 0, [6], SampleRequest(GREEDY, 1, 1, [])),
        BatchRow(SequenceId(3), [CONFIG.vocab_size], 0, [7]),
        BatchRow(SequenceId(4), [IN_FLIGHT], 1, [8], SampleRequest(GREEDY, 1, 2, [])),
        BatchRow(SequenceId(5), [5, 6], 2, [9]),  # a chunk in mid-prompt, reads NaN
    ]
    results = runner.launch(Batch(0, rows)).collect()
    assert [result.error is None for result in results] == [False, True, False, False, False]
    truth = TorchRunner(tiny_model(kernel_set("torch")), poisoned_cache())
    assert [list(results[1].token_ids)] == Generation([[5]], [GREEDY]).run(truth, 1)
