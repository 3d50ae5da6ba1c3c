"""Compiles every kernel of the set ``numba`` by a model of one layer, for numba's cache."""

import torch

from engine.kernels.cpu.kernels import NumbaKernels
from engine.kernels.cpu.packing import quantize_int4
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.models.compiled import CompiledModel
from engine.models.config import ModelConfig, RopeConfig
from engine.models.llama import LayerWeights, OpenWeights
from engine.models.packed import pack_model

_SIZE = 16


def compile_kernels() -> None:
    """Their types are the same for every model, so one step is enough."""
    config = ModelConfig(
        vocab_size=_SIZE,
        hidden_size=_SIZE,
        intermediate_size=_SIZE,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=_SIZE,
        rms_norm_eps=1e-5,
        max_position_embeddings=_SIZE,
        tied_head=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeConfig("default", 10000.0),
    )
    norm = torch.ones(_SIZE)
    layer = LayerWeights(
        input_norm=norm,
        qkv=torch.zeros(3 * _SIZE, _SIZE),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=torch.zeros(_SIZE, _SIZE),
        output_bias=None,
        post_norm=norm,
        gate_up=torch.zeros(2 * _SIZE, _SIZE),
        gate_up_bias=None,
        down=torch.zeros(_SIZE, _SIZE),
        down_bias=None,
    )
    kernels = NumbaKernels()
    weights = OpenWeights(torch.zeros(_SIZE, _SIZE), iter([layer]), norm, None)
    model = CompiledModel(config, pack_model(weights, "none"), kernels)
    cache = KVCache(torch.zeros(2, 1, 2, _SIZE, 1, _SIZE))
    ids = torch.zeros(1, dtype=torch.int64)
    plan = kernels.attention(cache, [Span(0, 1, 0, [1])])
    model.logits(model.forward(ids, ids, ids, cache, plan))
    quantize_int4(torch.zeros(1, 32).numpy())
