"""The decoder of the Llama family, from its config: pre-norm, rotary GQA attention, gated MLP.

Llama 2 and 3, Mistral, SmolLM2, Qwen2 (biases on q, k, v) and Qwen3 (q and k normed by head).
Shapes: n new tokens of all rows of a step, one after the other; no batch axis, no padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.kernels import Attention, Kernels
from engine.kernels.linear import head, linear
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig, ModelEntry
from engine.models.rope import RotaryEmbedding
from engine.models.weights import WeightFiles


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """q, k, v are merged along the output axis, as are gate and up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


class LlamaModel:
    """Computes hidden states and logits; keys and values go to the cache it is called with."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels) -> None:
        self.config = config
        self.kernels = kernels
        self._weights = weights
        embedding = weights.embedding
        self._rotary = RotaryEmbedding(
            config.rope, config.head_size, embedding.dtype, embedding.device
        )

    def first_layers(self, num_layers: int) -> "LlamaModel":
        """The model of these layers, norm and head; weights and KV are those of this one."""
        weights = replace(self._weights, layers=self._weights.layers[:num_layers])
        return LlamaModel(replace(self.config, num_layers=num_layers), weights, self.kernels)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        attention: Attention,
    ) -> Tensor:
        """Ids, positions and cache slots ``[n]`` to normed hidden states ``[n, hidden_size]``."""
        angles = self._rotary.at(positions)
        layers = self._weights.layers
        # Each half of a layer ends with the norm that the next one begins with.
        next_norms = [layer.input_norm for layer in layers[1:]] + [self._weights.final_norm]
        hidden = F.embedding(token_ids, self._weights.embedding)
        normed = self._norm(hidden, layers[0].input_norm)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            heads = self._project(layer, normed)
            queries = self.kernels.rotary_write(cache, index, slots, heads, angles)
            attended = linear(attention(index, queries), layer.output, layer.output_bias)
            hidden, normed = self._add_norm(hidden, attended, layer.post_norm)
            hidden, normed = self._add_norm(hidden, self._mlp(layer, normed), next_norm)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the given rows only: ``[m, hidden_size]`` to ``[m, vocab_size]``, fp32."""
        return head(hidden, self._weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.norm(x, weight, self.config.rms_norm_eps)

    def _add_norm(self, residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.add_norm(residual, x, weight, self.config.rms_norm_eps)

    def _project(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[n, num_heads, head_size]``, keys and values with num_kv_heads."""
        config = self.config
        heads = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_size)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        queries, keys, values = torch.split(heads, sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)
        return queries, keys, values

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate_up = linear(x, layer.gate_up, layer.gate_up_bias)
        return linear(self.kernels.silu_multiply(gate_up), layer.down, layer.down_bias)


@dataclass(frozen=True, slots=True)
class OpenWeights:
    """An entry's weights as fast as they are read: a layer when it is asked for. ``head`` None: it
    is the embedding."""

    embedding: Tensor
    layers: Iterator[LayerWeights]
    final_norm: Tensor
    head: Tensor | None


@contextmanager
def open_weights(
    entry: ModelEntry, dtype: torch.dtype, device: torch.device
) -> Iterator[OpenWeights]:
    """Raises ModelError where they are not what the config says, at the end also for left-overs."""
    config = entry.config
    files = WeightFiles(entry.weight_files, dtype, device)
    embedding = files.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = (_load_layer(files, config, index) for index in range(config.num_layers))
    final_norm = files.take("model.norm.weight", config.hidden_size)
    head_weight = None
    if config.tied_head:
        files.ignore("lm_head.weight")
    else:
        head_weight = files.take("lm_head.weight", config.vocab_size, config.hidden_size)
    yield OpenWeights(embedding, layers, final_norm, head_weight)
    files.finish()


def load_model(
    entry: ModelEntry,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    quantization: str = "none",
) -> LlamaModel:
    """Maps the entry's weights; quantised ones are the fp32 that they stand for. Raises ModelError,
    and ConfigError where quantising needs what is not installed."""
    with open_weights(entry, dtype, device) as weights:
        if quantization != "none":
            try:
                from engine.models.dequantized import dequantize
            except ModuleNotFoundError as error:
                raise ConfigError("quantization", f"needs {error.name}: see [cpu]") from None
            weights = dequantize(weights, quantization)
        head_weight = weights.embedding if weights.head is None else weights.head
        loaded = ModelWeights(
            weights.embedding, tuple(weights.layers), weights.final_norm, head_weight
        )
    return LlamaModel(entry.config, loaded, kernels)


def _load_layer(files: WeightFiles, config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    qkv = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    gate_up = (("gate_proj", inner), ("up_proj", inner))
    files.ignore(attention + "rotary_emb.inv_freq")  # in checkpoints of Llama 2's time

    def norm(name: str, size: int, there: bool = True) -> Tensor | None:
        return files.take(f"{name}.weight", size) if there else None

    def bias(name: str, size: int, there: bool) -> Tensor | None:
        return files.take(f"{name}.bias", size) if there else None

    def merged_bias(names: tuple[tuple[str, int], ...], where: str, there: bool) -> Tensor | None:
        if not there:
            return None
        return files.merge(*((f"{where}{name}.bias", (size,)) for name, size in names))

    return LayerWeights(
        input_norm=files.take(prefix + "input_layernorm.weight", hidden),
        qkv=files.merge(*((f"{attention}{name}.weight", (size, hidden)) for name, size in qkv)),
        qkv_bias=merged_bias(qkv, attention, config.qkv_bias),
        q_norm=norm(attention + "q_norm", config.head_size, config.qk_norm),
        k_norm=norm(attention + "k_norm", config.head_size, config.qk_norm),
        output=files.take(attention + "o_proj.weight", hidden, q_size),
        output_bias=bias(attention + "o_proj", hidden, config.output_bias),
        post_norm=files.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=files.merge(*((f"{mlp}{name}.weight", (size, hidden)) for name, size in gate_up)),
        gate_up_bias=merged_bias(gate_up, mlp, config.mlp_bias),
        down=files.take(mlp + "down_proj.weight", hidden, inner),
        down_bias=bias(mlp + "down_proj", hidden, config.mlp_bias),
    )
