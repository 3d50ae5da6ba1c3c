"""Quantised weights as fp32: the reference of the kernels that read them packed."""

from dataclasses import replace

from torch import Tensor

from engine.kernels.cpu.packing import dequantized
from engine.models.llama import LayerWeights, OpenWeights


def dequantize(weights: OpenWeights, quantization: str) -> OpenWeights:
    """Layer by layer, as they are read."""
    return replace(
        weights,
        embedding=dequantize_embedding(weights.embedding, quantization),
        layers=(dequantize_layer(layer, quantization) for layer in weights.layers),
        head=None if weights.head is None else dequantize_embedding(weights.head, quantization),
    )


def dequantize_layer(layer: LayerWeights, quantization: str) -> LayerWeights:
    return replace(
        layer,
        qkv=dequantized(layer.qkv, quantization),
        output=dequantized(layer.output, quantization),
        gate_up=dequantized(layer.gate_up, quantization),
        down=dequantized(layer.down, quantization),
    )


def dequantize_embedding(weight: Tensor, quantization: str) -> Tensor:
    return dequantized(weight, quantization, is_head=True)
