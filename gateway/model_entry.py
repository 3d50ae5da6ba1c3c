"""What the gateway reads from a prepared model entry, a folder that `baton prepare` wrote."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.block_keys import quantized_fingerprint
from common.errors import ModelError
from common.types import TokenId


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """``default_sampling`` holds what the model's own generation_config.json recommends, under the
    names of SamplingParams; a request's own values win. ``template_variables`` are the texts of
    bos_token, eos_token and the like."""

    directory: Path
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[TokenId, ...]
    default_sampling: Mapping[str, float | int]
    template_variables: Mapping[str, str]


def read_model_entry(directory: Path, quantization: str = "none") -> ModelEntry:
    """As workers serve it that quantise it so. Raises ModelError when ``directory`` is no prepared
    entry."""
    try:
        config = json.loads((directory / "config.json").read_text())
        baton = config["baton"]
        return ModelEntry(
            directory=directory,
            name=str(baton["name"]),
            fingerprint=quantized_fingerprint(str(baton["fingerprint"]), quantization),
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(config["max_position_embeddings"]),
            eos_token_ids=tuple(baton["eos_token_ids"]),
            default_sampling=dict(baton["default_sampling"]),
            template_variables=dict(baton["template_variables"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            "model", f"{directory} is not a prepared model entry; make one with `baton prepare`"
        ) from None
