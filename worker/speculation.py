"""Makes a decode worker's speculator from its settings; what does not fit is refused at start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from common.config import DecodeSettings
from common.errors import ConfigError, ModelError
from common.types import KVLayout
from engine.block_pool import BlockPool
from engine.model_runner import RunnerConfig, TorchRunner, build_runner
from engine.models.config import ModelEntry, read_entry
from engine.runner import ModelRunner
from engine.speculation.draft_model import DraftProposer
from engine.speculation.lengths import DraftLengths
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.self_draft import SelfProposer
from engine.speculation.speculator import Speculator
from engine.speculation.step_times import StepTimes, measured_step_times
from worker.model import ModelFacts

_SELF = "self:"
# The smallest pool of a draft model: one block and one to grow into.
_MIN_BLOCKS = 2


def make_speculator(
    settings: DecodeSettings,
    model: ModelFacts,
    runner: ModelRunner,
    pool: BlockPool,
    clock: Callable[[], float],
) -> Speculator | None:
    """None where speculation is off. ``pool`` is still unused: steps are timed in its blocks.
    Raises ConfigError, ModelError."""
    if settings.speculation == "off":
        return None
    proposer = _proposer(settings, model, runner, clock)
    lengths = None
    if not settings.fixed_k:
        measured = None
        if isinstance(runner, TorchRunner):
            measured = measured_step_times(runner, pool.block_size, pool.num_total + 1)
        lengths = DraftLengths(StepTimes(measured))
    return Speculator(proposer, settings.num_speculative_tokens, runner.vocab_size, lengths, clock)


def _proposer(
    settings: DecodeSettings, model: ModelFacts, runner: ModelRunner, clock: Callable[[], float]
) -> Proposer:
    draft = settings.draft_model
    if draft is None:
        return NgramProposer(settings.prompt_lookup_min, settings.prompt_lookup_max)
    if model.entry is None or not isinstance(runner, TorchRunner):
        raise ConfigError("speculation", f"{settings.model} has no weights, so no model drafts it")
    if draft.startswith(_SELF):
        num_layers, limit = int(draft[len(_SELF) :]), model.entry.config.num_layers
        if num_layers >= limit:
            raise ConfigError(
                "speculation", f"self:{num_layers} must be fewer than the model's {limit} layers"
            )
        return SelfProposer(runner.first_layers(num_layers), num_layers)
    return _draft_proposer(settings, model.entry, Path(draft), clock)


def _draft_proposer(
    settings: DecodeSettings, target: ModelEntry, directory: Path, clock: Callable[[], float]
) -> DraftProposer:
    try:
        entry = read_entry(directory)
    except ModelError as error:
        raise ConfigError("speculation", f"draft model: {error}") from None
    _check_same_tokens(target, entry)
    config = entry.config
    layout = KVLayout(
        num_layers=config.num_layers,
        block_size=settings.block_size,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=settings.dtype,
        model_fingerprint=entry.description.fingerprint,
    )
    num_blocks = _num_blocks(settings, entry, layout)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    storage = torch.zeros(num_blocks + 1, *layout.block_shape, dtype=dtype)
    runner = build_runner(
        RunnerConfig(settings.dtype, settings.device, settings.kernels), directory, storage
    )
    pool = BlockPool(num_blocks + 1, settings.block_size, layout.model_fingerprint, clock=clock)
    return DraftProposer(runner, pool, entry.description.max_model_len)


def _check_same_tokens(target: ModelEntry, draft: ModelEntry) -> None:
    """A drafted id must mean what it means to the target."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "speculation",
            f"the draft model's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}",
        )
    if _tokens(target.directory) != _tokens(draft.directory):
        raise ConfigError("speculation", "the draft model's tokenizer is not the target's")


def _tokens(directory: Path) -> Any:
    """What of a tokenizer decides which id is which text; None where there is no tokenizer."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["model"], content.get("added_tokens")
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError("speculation", "a tokenizer.json cannot be read") from None


def _num_blocks(settings: DecodeSettings, entry: ModelEntry, layout: KVLayout) -> int:
    given, size = settings.draft_kv_cache_memory_bytes, layout.block_bytes
    num_blocks = given // size - 1
    if num_blocks < _MIN_BLOCKS:
        raise ConfigError(
            "draft_kv_cache_memory_bytes",
            f"a block of the draft model takes {size} bytes; {_MIN_BLOCKS} and the null block are "
            f"the least, {(_MIN_BLOCKS + 1) * size} bytes",
        )
    weights = sum(file.stat().st_size for file in entry.weight_files if file.exists())
    if given + weights > (available := int(psutil.virtual_memory().available)):
        raise ConfigError(
            "draft_kv_cache_memory_bytes",
            f"{given} bytes and {weights} of the draft model's weights are more than the "
            f"{available} available",
        )
    return num_blocks
