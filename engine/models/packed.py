"""A model's weights as the compiled kernels read them, and as named arrays (packed_files.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.packing import Packed, interleaved, pack
from engine.models.llama import LayerWeights, OpenWeights

_PRODUCTS = ("qkv", "output", "gate_up", "down")
_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")
# Arrays by name, "qkv.panels" for one.
Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """``products`` in the order of step.py's QKV, OUTPUT, GATE_UP, DOWN; ``norms`` of INPUT_NORM,
    POST_NORM, Q_NORM, K_NORM, None where there is none."""

    products: tuple[Packed, ...]
    norms: tuple[NDArray[np.generic] | None, ...]


@dataclass(frozen=True, slots=True)
class PackedModel:
    layers: tuple[PackedLayer, ...]
    final_norm: NDArray[np.generic]
    embedding: Packed
    head: Packed


def pack_model(weights: OpenWeights, quantization: str) -> PackedModel:
    """In this process's memory."""
    layers = [layer_arrays(layer, quantization) for layer in weights.layers]
    return model_of(other_arrays(weights, quantization), layers)


def layer_arrays(layer: LayerWeights, quantization: str) -> Arrays:
    """Of one layer."""
    gate_up_bias = layer.gate_up_bias
    if gate_up_bias is not None:
        gate_up_bias = interleaved(*gate_up_bias.chunk(2))
    products = (
        (layer.qkv, layer.qkv_bias),
        (layer.output, layer.output_bias),
        (interleaved(*layer.gate_up.chunk(2)), gate_up_bias),
        (layer.down, layer.down_bias),
    )
    arrays: Arrays = {}
    for name, (weight, bias) in zip(_PRODUCTS, products, strict=True):
        arrays |= _named(name, pack(weight, bias, quantization))
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    for name, norm in zip(_NORMS, norms, strict=True):
        if norm is not None:
            arrays[name] = _copied(norm)
    return arrays


def other_arrays(weights: OpenWeights, quantization: str) -> Arrays:
    """The embedding's, the last norm, and the head's unless it is the embedding."""
    arrays = _named("embedding", pack(weights.embedding, None, quantization, is_head=True))
    arrays["final_norm"] = _copied(weights.final_norm)
    if weights.head is not None:
        arrays |= _named("head", pack(weights.head, None, quantization, is_head=True))
    return arrays


def _named(name: str, packed: Packed) -> Arrays:
    parts = {"panels": packed.panels, "scales": packed.scales, "bias": packed.bias}
    return {f"{name}.{part}": array for part, array in parts.items() if array is not None}


def model_of(arrays: Mapping[str, NDArray[np.generic]], layers: Sequence[Arrays]) -> PackedModel:
    """``arrays`` of `other_arrays`, ``layers`` of `layer_arrays`."""
    embedding = _packed(arrays, "embedding")
    return PackedModel(
        layers=tuple(
            PackedLayer(
                tuple(_packed(layer, name) for name in _PRODUCTS),
                tuple(layer.get(name) for name in _NORMS),
            )
            for layer in layers
        ),
        final_norm=arrays["final_norm"],
        embedding=embedding,
        head=_packed(arrays, "head") if "head.panels" in arrays else embedding,
    )


def _packed(arrays: Mapping[str, NDArray[np.generic]], name: str) -> Packed:
    return Packed(
        arrays[f"{name}.panels"], arrays.get(f"{name}.scales"), arrays.get(f"{name}.bias")
    )


def _copied(tensor: Tensor) -> NDArray[np.generic]:
    """Not a view of the file that it was read from."""
    copy: NDArray[np.generic] = tensor.clone().numpy()
    return copy
