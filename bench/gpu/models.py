"""Models of random weights, made on the device: the 8B shape, and a tiny one for interpreters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Kernels
from engine.models.config import ModelConfig, RopeConfig
from engine.models.llama import LayerWeights, LlamaModel, ModelWeights

# Llama 3.1 8B.
LARGE = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tied_head=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig("default", 500000.0),
)
TINY = ModelConfig(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_size=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    tied_head=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig("default", 10000.0),
)


@dataclass
class _Maker:
    generator: torch.Generator
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        """Scaled by the input size, so that activations stay near 1."""
        device = self.generator.device
        values = torch.empty(shape, dtype=self.dtype, device=device)
        return values.normal_(0.0, shape[-1] ** -0.5, generator=self.generator)

    def norm(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.generator.device)


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> LlamaModel:
    """The same weights in every process on the same kind of device."""
    make = _Maker(torch.Generator(device).manual_seed(1), dtype)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    layers = tuple(
        LayerWeights(
            input_norm=make.norm(hidden),
            qkv=make(q_size + 2 * kv_size, hidden),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=make(hidden, q_size),
            output_bias=None,
            post_norm=make.norm(hidden),
            gate_up=make(2 * inner, hidden),
            gate_up_bias=None,
            down=make(hidden, inner),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    )
    embedding = make(config.vocab_size, hidden) * hidden**0.5
    head = make(config.vocab_size, hidden) * 4
    return LlamaModel(config, ModelWeights(embedding, layers, make.norm(hidden), head), kernels)


def decode_weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """What a decode step reads of the weights: all but the embedding table."""
    hidden = config.hidden_size
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = heads * config.head_size * hidden + config.num_heads * config.head_size * hidden
    layer += 3 * config.intermediate_size * hidden
    return itemsize * (config.num_layers * layer + config.vocab_size * hidden)
