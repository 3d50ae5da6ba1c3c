"""Which kernel set serves a model: ``auto`` is numba where it can, else what `kernel_set` says."""

import logging

import torch

from common.errors import ConfigError
from engine.kernels import Kernels, fallbacks, kernel_set
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig, ModelEntry
from engine.models.llama import load_model
from engine.models.model import Model

log = logging.getLogger(__name__)


def choose_kernels(name: str, config: ModelConfig, cache: KVCache) -> Kernels:
    """Raises ConfigError for a set that was asked for and cannot serve."""
    if name == "numba":
        return _numba(config, cache)
    if name == "auto" and cache.device.type == "cpu":
        try:
            return _numba(config, cache)
        except ConfigError as error:
            log.info("plain torch instead of compiled kernels: %s", error.message)
            fallbacks["numba"] += 1
    return kernel_set(name, cache)


def load(
    entry: ModelEntry, kernels: Kernels, dtype: torch.dtype, device: torch.device, quantization: str
) -> Model:
    """The model for a chosen set. Raises ModelError, ConfigError."""
    if kernels.name != "numba":
        return load_model(entry, dtype, device, kernels, quantization)
    from engine.models.compiled import load_compiled

    return load_compiled(entry, kernels, quantization)


def _numba(config: ModelConfig, cache: KVCache) -> Kernels:
    try:
        from engine.kernels.cpu.kernels import NumbaKernels, check_model
    except ModuleNotFoundError as error:
        raise ConfigError("kernels", f"numba needs {error.name}: pip install .[cpu]") from None
    check_model(config, cache.dtype, cache.device)
    return NumbaKernels()
