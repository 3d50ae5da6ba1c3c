"""Every compiled kernel against plain torch on the weights that the packed ones stand for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.config import DecodeSettings
from common.errors import ConfigError, ModelError
from engine.kernels import fallbacks
from engine.kernels.cpu.kernels import NumbaKernels, check_model
from engine.kernels.cpu.packing import FORMATS, dequantized, pack, quantize_int4
from engine.kernels.span import Span
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.models.choice import choose_kernels
from engine.models.compiled import CompiledModel
from engine.models.config import ModelConfig, RopeConfig
from engine.models.dequantized import dequantize_embedding, dequantize_layer
from engine.models.llama import LayerWeights, LlamaModel, ModelWeights, OpenWeights
from engine.models.model import Model
from engine.models.packed import pack_model
from gateway.model_entry import read_model_entry
from worker.model import model_facts

BLOCK_SIZE, NUM_BLOCKS = 16, 40
TOLERANCE = 1e-3

LLAMA = ModelConfig(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=32,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    tied_head=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig("default", 10000.0),
)
CONFIGS = {
    "llama": LLAMA,
    "biases": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, tied_head=False),
    "qk_norm": replace(LLAMA, qk_norm=True, num_kv_heads=6, head_size=16, vocab_size=64),
}


@dataclass(frozen=True)
class Both:
    """The same model twice, each with a pool of its own."""

    compiled: Model
    plain: Model
    compiled_cache: KVCache
    plain_cache: KVCache

    def logits(self, rows: Sequence[tuple[list[int], int, list[int]]]) -> tuple[Tensor, Tensor]:
        """Of every new token; a row is (token ids, start, block table)."""
        both = []
        for model, cache in (
            (self.compiled, self.compiled_cache),
            (self.plain, self.plain_cache),
        ):
            spans, ids, positions, slots = [], [], [], []
            for token_ids, start, blocks in rows:
                spans.append(Span(len(ids), len(token_ids), start, blocks))
                ids += token_ids
                positions += range(start, start + len(token_ids))
                slots += cache.slots(blocks, start, start + len(token_ids))
            with torch.inference_mode():
                hidden = model.forward(
                    torch.tensor(ids),
                    torch.tensor(positions),
                    torch.tensor(slots),
                    cache,
                    model.kernels.attention(cache, spans),
                )
                both.append(model.logits(hidden).clone())
        return both[0], both[1]


def make(config: ModelConfig, quantization: str) -> Both:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    def maybe(there: bool, size: int) -> Tensor | None:
        return random(size) if there else None

    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    hidden, inner, qkv = config.hidden_size, config.intermediate_size, heads + 2 * kv_heads
    layers = [
        LayerWeights(
            input_norm=1 + random(hidden),
            qkv=random(qkv * size, hidden),
            qkv_bias=maybe(config.qkv_bias, qkv * size),
            q_norm=maybe(config.qk_norm, size),
            k_norm=maybe(config.qk_norm, size),
            output=random(hidden, heads * size),
            output_bias=maybe(config.output_bias, hidden),
            post_norm=1 + random(hidden),
            gate_up=random(2 * inner, hidden),
            gate_up_bias=maybe(config.mlp_bias, 2 * inner),
            down=random(hidden, inner),
            down_bias=maybe(config.mlp_bias, hidden),
        )
        for _ in range(config.num_layers)
    ]
    norm, embedding = 1 + random(hidden), random(config.vocab_size, hidden, scale=1.0)
    head = None if config.tied_head else random(config.vocab_size, hidden)
    packed = pack_model(OpenWeights(embedding, iter(layers), norm, head), quantization)
    compiled = CompiledModel(config, packed, NumbaKernels())
    wide = dequantize_embedding(embedding, quantization)
    weights = ModelWeights(
        wide,
        tuple(dequantize_layer(layer, quantization) for layer in layers),
        norm,
        wide if head is None else dequantize_embedding(head, quantization),
    )
    plain = LlamaModel(config, weights, TorchKernels())
    shape = (NUM_BLOCKS, config.num_layers, 2, BLOCK_SIZE, kv_heads, size)
    # What was in memory before must not matter.
    pools = [KVCache(torch.full(shape, float("nan"))) for _ in range(2)]
    return Both(compiled, plain, *pools)


def ids(number: int, start: int = 0) -> list[int]:
    return [(7 * i + start) % 50 for i in range(number)]


def assert_close(one: Tensor, other: Tensor) -> None:
    assert one.isfinite().all()
    assert (one - other).abs().max() < TOLERANCE


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_equal_logits_for_prompts_chunks_drafts_and_decodes(name: str, quantization: str) -> None:
    both = make(CONFIGS[name], quantization)
    tables = [[1, 2, 3, 4, 5, 6, 7, 8], [12, 10, 9], [20, 15, 17], [30]]
    # A prompt of several blocks of products, short ones, and one of a token.
    assert_close(*both.logits([
        (ids(101), 0, tables[0]), (ids(3, 9), 0, tables[1]), (ids(17, 4), 0, tables[2]),
        ([8], 0, tables[3]),
    ]))  # fmt: skip
    # A chunk behind a prefix, a draft of four, and decodes.
    assert_close(*both.logits([
        (ids(20, 3), 101, tables[0]), (ids(4), 3, tables[1]), ([3], 17, tables[2]),
        ([5], 1, tables[3]),
    ]))  # fmt: skip
    # One row alone takes kernels of its own.
    assert_close(*both.logits([([9], 121, tables[0])]))


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_row_does_not_depend_on_its_mates(quantization: str) -> None:
    both = make(LLAMA, quantization)
    prompts = [ids(5 + 3 * i, i) for i in range(12)]
    tables = [[3 * i + 1, 3 * i + 2, 3 * i + 3] for i in range(12)]
    both.logits([(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)])
    decodes = [([4], len(p), table) for p, table in zip(prompts, tables, strict=True)]
    alone, _ = both.logits(decodes[:1])
    pair, _ = both.logits(decodes[:2])
    for count in (2, 3, 4, 5, 6, 7, 12):
        together, _ = both.logits(decodes[:count])
        assert_close(together[0], alone[0])
        assert_close(together[1], pair[1])


def test_weights_on_a_grid_are_kept_exactly() -> None:
    """As those of a Q4_1 file: fp16 scale and minimum, any of the 16 levels used or not."""
    generator = torch.Generator().manual_seed(2)
    levels = torch.randint(0, 16, (64, 8, 32), generator=generator)
    levels[0] %= 5  # no level above 4
    levels[1] = 3 * (levels[1] % 4)  # every third level
    levels[2] = 7  # one value only
    scale = (torch.rand(64, 8, 1, generator=generator) * 0.05).half().float()
    minimum = (-torch.rand(64, 8, 1, generator=generator)).half().float()
    weight = (levels * scale + minimum).view(64, 256)
    assert (dequantized(weight, "int4") - weight).abs().max() < 1e-6


def test_int4_goes_from_the_least_to_the_greatest_value() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    levels, scales, minima = quantize_int4(weight.numpy())
    groups = weight.view(16, 2, 32)
    assert levels.min() == 0 and levels.max() == 15
    assert torch.equal(torch.from_numpy(minima), groups.amin(2))
    wide = dequantized(weight, "int4").view(16, 2, 32)
    assert (wide - groups).abs().amax() <= torch.from_numpy(scales).max() / 2 + 1e-6


def test_packed_sizes() -> None:
    weight = torch.randn(96, 256)
    sizes = {}
    for name in FORMATS:
        packed = pack(weight, None, name)
        sizes[name] = sum(a.nbytes for a in (packed.panels, packed.scales) if a is not None)
    assert sizes == {
        "none": 96 * 256 * 4,
        "int8": 96 * 256 + 96 * 4,
        "int4": 96 * 256 // 2 + 96 * 256 // 32 * 8,
    }


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="float32"):
        check_model(LLAMA, torch.bfloat16, cpu)
    for name in ("hidden_size", "intermediate_size", "head_size"):
        with pytest.raises(ConfigError, match=name):
            check_model(replace(LLAMA, **{name: 24}), torch.float32, cpu)
    with pytest.raises(ModelError, match="int4 shares scales among 32 inputs, not 48"):
        pack(torch.zeros(16, 48), None, "int4")
    with pytest.raises(ModelError, match="int8 takes 4 inputs"):
        pack(torch.zeros(16, 18), None, "int8")


def test_quantised_weights_are_another_model(tmp_path: Path) -> None:
    """Workers and gateways agree on its fingerprint, and KV of the two is never mixed."""
    content = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "baton": {
            "name": "m",
            "fingerprint": "f" * 64,
            "weight_files": ["w"],
            "eos_token_ids": [],
            "default_sampling": {},
            "template_variables": {},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = set()
    for quantization in FORMATS:
        settings = DecodeSettings(model=str(tmp_path), quantization=quantization)
        facts = model_facts(settings)
        assert facts.layout.model_fingerprint == facts.description.fingerprint
        gateway = read_model_entry(tmp_path, quantization)
        assert gateway.fingerprint == facts.description.fingerprint
        found.add(gateway.fingerprint)
    assert len(found) == len(FORMATS) and "f" * 64 in found


def test_first_layers_are_those_of_the_whole_model() -> None:
    """What `self:N` drafts with: the same weights, the same pool, fewer layers."""
    both = make(LLAMA, "int8")
    first = Both(
        both.compiled.first_layers(1),
        both.plain.first_layers(1),
        both.compiled_cache,
        both.plain_cache,
    )
    prompt = [(ids(19), 0, [3, 5])]
    assert_close(*both.logits(prompt))
    one, other = first.logits([([4], 19, [3, 5])])
    assert_close(one, other)
    assert (one - both.logits([([4], 19, [3, 5])])[0]).abs().max() > 0.1


def test_a_fall_back_to_plain_torch_is_counted() -> None:
    odd, cache = replace(LLAMA, head_size=20), KVCache(torch.zeros(2, 2, 2, BLOCK_SIZE, 2, 20))
    before = fallbacks["numba"]
    assert choose_kernels("auto", odd, cache).name == "torch"
    assert fallbacks["numba"] == before + 1
    assert choose_kernels("torch", odd, cache).name == "torch"
    assert fallbacks["numba"] == before + 1
