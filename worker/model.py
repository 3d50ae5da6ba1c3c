"""What a worker serves: the facts of its model, found before any memory is taken."""

import math
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.block_keys import quantized_fingerprint
from common.config import WorkerSettings
from common.errors import ConfigError
from common.types import KVLayout, ModelDescription
from engine.flops import ModelCosts, costs_without_weights, model_costs
from engine.models.config import ModelEntry, read_entry
from engine.null_runner import VOCAB_SIZE as NULL_VOCAB_SIZE
from engine.null_runner import null_layout
from engine.oracle import oracle_layout
from kv_transfer.checksum import checksum_on
from kv_transfer.registry import pool_kind

ORACLE, NULL = "oracle", "null"
# Of the models without weights, which have no context of their own.
_UNBOUNDED_MODEL_LEN = 1 << 20
# What the smallest sequence needs: a block for its prompt and one to grow into.
_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``entry`` is None for the models without weights."""

    description: ModelDescription
    layout: KVLayout
    entry: ModelEntry | None = None

    @property
    def costs(self) -> ModelCosts:
        """Weights lie in memory in the type of the activations, which is the KV's."""
        if self.entry is None:
            return costs_without_weights(self.layout)
        return model_costs(self.entry.config, self.layout.itemsize, self.layout)


def model_facts(settings: WorkerSettings) -> ModelFacts:
    """Raises ModelError where the entry cannot be served."""
    if settings.model in (ORACLE, NULL):
        return _without_weights(settings)
    entry = read_entry(Path(settings.model))
    config, own = entry.config, entry.description
    max_model_len = min(own.max_model_len, settings.max_model_len or own.max_model_len)
    fingerprint = quantized_fingerprint(own.fingerprint, settings.quantization)
    description = ModelDescription(
        own.name, fingerprint, own.vocab_size, max_model_len, own.eos_token_ids
    )
    layout = KVLayout(
        num_layers=config.num_layers,
        block_size=settings.block_size,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=settings.dtype,
        model_fingerprint=fingerprint,
        checksum=checksum_on(settings.device),
    )
    return ModelFacts(description, layout, entry)


def _without_weights(settings: WorkerSettings) -> ModelFacts:
    is_oracle = settings.model == ORACLE
    layout = (oracle_layout if is_oracle else null_layout)(settings.block_size)
    description = ModelDescription(
        name=settings.model,
        fingerprint=layout.model_fingerprint,
        vocab_size=settings.oracle_vocab_size if is_oracle else NULL_VOCAB_SIZE,
        max_model_len=settings.max_model_len or _UNBOUNDED_MODEL_LEN,
    )
    return ModelFacts(description, layout)


def num_pool_blocks(settings: WorkerSettings, model: ModelFacts) -> int:
    """Blocks that sequences can use; the pool has one more, the null block.

    Raises ConfigError, with the arithmetic, where the pool is too small or memory too little.
    """
    layout = model.layout
    size = layout.block_bytes
    if settings.num_blocks is not None:
        name, num_blocks = "num_blocks", settings.num_blocks
    else:
        name = "kv_cache_memory_bytes"
        num_blocks = settings.kv_cache_memory_bytes // size - 1
    if num_blocks < _MIN_BLOCKS:
        wanted = (_MIN_BLOCKS + 1) * size
        raise ConfigError(
            name,
            f"a block of {layout.block_size} tokens takes {size} bytes; {_MIN_BLOCKS} blocks and "
            f"the null block are the least, {wanted} bytes",
        )
    pool, weights = (num_blocks + 1) * size, _weight_bytes(model)
    if pool > (free := _free_in_pool_dir(settings)):
        raise ConfigError(
            name,
            f"{num_blocks} blocks and the null block of {size} bytes are {pool} bytes, but the "
            f"pool's folder has {free} free",
        )
    if pool + weights > (available := int(psutil.virtual_memory().available)):
        raise ConfigError(
            name,
            f"{num_blocks} blocks and the null block of {size} bytes are {pool} bytes, with "
            f"{weights} bytes of weights {pool + weights}, but {available} are available",
        )
    return num_blocks


def _weight_bytes(model: ModelFacts) -> int:
    files = model.entry.weight_files if model.entry is not None else ()
    return sum(file.stat().st_size for file in files if file.exists())


def _free_in_pool_dir(settings: WorkerSettings) -> float:
    if pool_kind(settings.transport, settings.device) == "shm" and settings.pool_dir.is_dir():
        return psutil.disk_usage(str(settings.pool_dir)).free
    return math.inf
