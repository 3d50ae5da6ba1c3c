"""Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864, section 3.2).

Halves of a head are paired (element i with i + head_size / 2), as Hugging Face checkpoints have
it. Scaling types: linear; llama3 (by wavelength, as in Meta's reference code for Llama 3.1); yarn
(Peng et al., "YaRN", arXiv 2309.00071, sections 3.2 to 3.4).
"""

import math

import torch
from torch import Tensor

from engine.models.config import RopeConfig


class RotaryEmbedding:
    """Turns positions into cosines and sines; ``dtype`` is that of the activations."""

    def __init__(
        self, config: RopeConfig, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._frequencies = inverse_frequencies(config, head_size).to(device)
        self._attention_factor = _attention_factor(config)
        self._dtype = dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[n]`` positions to cosines and sines ``[n, 1, head_size]``, to use for all layers."""
        half = positions.float()[:, None] * self._frequencies
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        cosines, sines = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cosines, sines = cosines * self._attention_factor, sines * self._attention_factor
        return cosines.to(self._dtype), sines.to(self._dtype)


def inverse_frequencies(config: RopeConfig, head_size: int) -> Tensor:
    """Radians a token, ``[head_size / 2]`` fp32, highest frequency first."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (config.theta**exponents)
    match config.rope_type:
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(frequencies, config)
        case "yarn":
            return _yarn(frequencies, config, head_size)
        case _:
            return frequencies


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(frequencies: Tensor, config: RopeConfig, head_size: int) -> Tensor:
    """NTK-by-parts: keep what turns often within the original context, stretch what does not."""

    def dimension(turns: float) -> float:
        """Which dimension makes this many turns within the original context."""
        span = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_size * math.log(span) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = (high - low) or 0.001
    stretched = (torch.arange(head_size // 2, dtype=torch.float32) - low) / width
    stretched = stretched.clamp(0, 1)
    return (1 - stretched) * frequencies + stretched * frequencies / config.factor


def _attention_factor(config: RopeConfig) -> float:
    """Yarn's temperature, which scales cosines and sines alike (arXiv 2309.00071, eq. 21)."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
