"""A prepared model entry's ``config.json`` as a type that cannot be wrong.

The entry's config is the Hugging Face config, normalised by `baton prepare` (one rope spelling,
head_dim explicit), plus our own part under ``"baton"``. Whatever this engine does not compute
exactly is refused here, by the name of the field.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.types import ModelDescription

# Architecture: (q, k and v have biases whatever the config says, q and k are normed by head)
_ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: ``rope_type`` default | linear | llama3 | yarn and that type's numbers."""

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: Llama 2 and 3, Mistral, SmolLM2, Qwen2, Qwen3."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A prepared model on disk, described without reading its weights."""

    directory: Path
    config: ModelConfig
    description: ModelDescription
    weight_files: tuple[Path, ...]


def read_entry(directory: Path) -> ModelEntry:
    """Raises ModelError naming the first field that is missing, wrong or not supported."""
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError("model", f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError("model", f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("baton"), dict):
        raise ModelError("model", f"{directory} is not a prepared entry: run `baton prepare` on it")
    own = fields["baton"]
    config = parse_config(fields)
    for name in ("fingerprint", "name", "weight_files"):
        if not own.get(name):
            raise ModelError("model", f"baton.{name} is missing from {path}")
    description = ModelDescription(
        name=str(own["name"]),
        fingerprint=str(own["fingerprint"]),
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=tuple(own.get("eos_token_ids", ())),
    )
    files = tuple(directory / str(name) for name in own["weight_files"])
    return ModelEntry(directory, config, description, files)


def parse_config(fields: Mapping[str, Any]) -> ModelConfig:
    """The model's shape from a normalised Hugging Face config. Raises ModelError."""
    qkv_bias, qk_norm = _architecture(fields)
    _refuse_unsupported(fields)
    num_heads = _positive(fields, "num_attention_heads")
    hidden_size = _positive(fields, "hidden_size")
    attention_bias = bool(fields.get("attention_bias", False))
    config = ModelConfig(
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_positive(fields, "num_key_value_heads", default=num_heads),
        head_size=_positive(fields, "head_dim", default=hidden_size // num_heads),
        rms_norm_eps=_number(fields, "rms_norm_eps"),
        max_position_embeddings=_positive(fields, "max_position_embeddings"),
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias and not qkv_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=qk_norm,
        rope=_rope(fields),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            "num_key_value_heads",
            f"{config.num_kv_heads} does not divide {config.num_heads} attention heads",
        )
    if config.head_size % 2:
        raise ModelError("head_dim", f"{config.head_size} is odd; rotary embedding pairs it")
    return config


def _architecture(fields: Mapping[str, Any]) -> tuple[bool, bool]:
    names = fields.get("architectures") or ["none"]
    if names[0] not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelError("architectures", f"{names[0]} is not supported; these are: {supported}")
    return _ARCHITECTURES[names[0]]


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("quantization_config"):
        raise ModelError("quantization_config", "quantised checkpoints are not supported")
    for name in _EXPERT_FIELDS:
        if fields.get(name):
            raise ModelError(name, "models with experts are not supported")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError("hidden_act", f"{activation} is not supported; only silu is")
    window = fields.get("sliding_window")
    in_use = fields.get("use_sliding_window", True)
    if window and in_use and window < _positive(fields, "max_position_embeddings"):
        raise ModelError("sliding_window", f"a window of {window} tokens is not supported")


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    given = fields.get("rope_parameters")
    if not isinstance(given, dict):
        raise ModelError("rope_parameters", "missing; run `baton prepare` on the model again")
    rope_type = given.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise ModelError(
            "rope_parameters.rope_type",
            f"{rope_type!r} is not supported; these are: {', '.join(_ROPE_TYPES)}",
        )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("rope_parameters.partial_rotary_factor", "only 1.0 is supported")
    theta = _number(given, "rope_theta", "rope_parameters.")
    if rope_type == "default":
        return RopeConfig("default", theta)
    factor = _number(given, "factor", "rope_parameters.")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    original = _positive(given, "original_max_position_embeddings", "rope_parameters.")
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor,
            original,
            low_freq_factor=_number(given, "low_freq_factor", "rope_parameters."),
            high_freq_factor=_number(given, "high_freq_factor", "rope_parameters."),
        )
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )


def _positive(
    fields: Mapping[str, Any], name: str, prefix: str = "", default: int | None = None
) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(prefix + name, f"{value!r} is not a positive whole number")
    return value


def _number(fields: Mapping[str, Any], name: str, prefix: str = "") -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(prefix + name, f"{value!r} is not a positive number")
    return float(value)
