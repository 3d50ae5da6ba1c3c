"""A tiny Llama of random weights, without files: what the kernel sets are compared on."""

import random

import torch

from common.types import SamplingParams, SequenceId
from engine.batch import Batch, BatchRow, SampleRequest
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.model_runner import TorchRunner
from engine.models.config import ModelConfig, RopeConfig
from engine.models.llama import LayerWeights, LlamaModel, ModelWeights

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)
CONFIG = ModelConfig(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    tied_head=False,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    rope=RopeConfig("default", 10000.0),
)


def tiny_model(kernels: Kernels) -> LlamaModel:
    """The same weights each time."""
    generator = torch.Generator().manual_seed(3)

    def weights(*shape: int, scale: float = 0.3, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale + mean

    config = CONFIG
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layers = tuple(
        LayerWeights(
            input_norm=weights(config.hidden_size, mean=1.0),
            qkv=weights(q_size + 2 * kv_size, config.hidden_size),
            qkv_bias=weights(q_size + 2 * kv_size),
            q_norm=weights(config.head_size, mean=1.0),
            k_norm=weights(config.head_size, mean=1.0),
            output=weights(config.hidden_size, q_size),
            output_bias=None,
            post_norm=weights(config.hidden_size, mean=1.0),
            gate_up=weights(2 * config.intermediate_size, config.hidden_size),
            gate_up_bias=None,
            down=weights(config.hidden_size, config.intermediate_size),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    )
    embedding = weights(config.vocab_size, config.hidden_size, scale=1.0)
    head = weights(config.vocab_size, config.hidden_size)
    final_norm = weights(config.hidden_size, mean=1.0)
    return LlamaModel(config, ModelWeights(embedding, layers, final_norm, head), kernels)


def poisoned_cache(num_blocks: int = 24) -> KVCache:
    """Every value is NaN until it is written."""
    shape = (num_blocks, CONFIG.num_layers, 2, BLOCK_SIZE, CONFIG.num_kv_heads, CONFIG.head_size)
    return KVCache(torch.full(shape, float("nan")))


class Generation:
    """Sequences stepped together by hand: chunked prompts, then decodes, at depth 0."""

    def __init__(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        free = list(range(1, 24))
        random.Random(5).shuffle(free)
        self.token_ids = [list(prompt) for prompt in prompts]
        self._num_prompts = [len(prompt) for prompt in prompts]
        self._params = params
        self._blocks = [[free.pop() for _ in range(4)] for _ in prompts]
        self._computed = [0] * len(prompts)

    def rows(self, chunk: int) -> list[BatchRow]:
        rows = []
        for i, ids in enumerate(self.token_ids):
            start = self._computed[i]
            new = ids[start : start + chunk]
            end = start + len(new)
            request = SampleRequest(self._params[i], self._num_prompts[i], end, ids)
            sample = request if end == len(ids) else None
            rows.append(BatchRow(SequenceId(i), new, start, self._blocks[i], sample))
        return rows

    def run(self, runner: TorchRunner, num_tokens: int, chunk: int = 10**9) -> list[list[int]]:
        """Output ids of each sequence, that many at least of each."""
        while any(
            len(ids) < prompt + num_tokens
            for ids, prompt in zip(self.token_ids, self._num_prompts, strict=True)
        ):
            rows = self.rows(chunk)
            results = runner.launch(Batch(0, rows)).collect()
            for i, (row, result) in enumerate(zip(rows, results, strict=True)):
                assert result.error is None, result.error
                self._computed[i] = row.start + len(row.token_ids)
                self.token_ids[i] += result.token_ids
        return [
            ids[prompt : prompt + num_tokens]
            for ids, prompt in zip(self.token_ids, self._num_prompts, strict=True)
        ]
