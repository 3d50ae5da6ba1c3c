"""What a model takes, from its config.json alone: no weight is read, no tensor made."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.model_config import ARCHITECTURES, check_family
from common.errors import ConfigError, ModelError
from engine.models.config import ModelConfig, parse_config

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``dtype`` as the config names it, or None."""

    name: str
    config: ModelConfig
    dtype: str | None

    def num_parameters(self) -> int:
        """Weights and biases of a decoder of the Llama family, a tied head counted once."""
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
        layer += (queries + 2 * keys) * config.qkv_bias + hidden * config.output_bias
        layer += (2 * inner + hidden) * config.mlp_bias + 2 * config.head_size * config.qk_norm
        embeddings = config.vocab_size * hidden * (1 if config.tied_head else 2)
        return config.num_layers * layer + embeddings + hidden

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Keys and values of all layers: 2 x layers x KV heads x head size x bytes a value."""
        config = self.config
        values = 2 * config.num_layers * config.num_kv_heads * config.head_size
        return values * self.value_bytes(dtype)

    def value_bytes(self, dtype: str | None = None) -> int:
        """Raises ConfigError for a dtype that is not known, or that nobody names."""
        name = dtype or self.dtype
        if name not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ConfigError("dtype", f"{name or 'none is named'}; give one of these: {known}")
        return DTYPE_BYTES[name]


def read_shape(path: Path) -> ModelShape:
    """Of a prepared entry, a Hugging Face folder or a config.json. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError("model", f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError("model", f"{file} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelError("model", f"{file} holds no JSON object")
    name = _own_name(fields) or _file_name(file.absolute())
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    return ModelShape(
        name,
        parse_config(_normalised(fields)),
        str(dtype).removeprefix("torch.") if dtype else None,
    )


def _file_name(file: Path) -> str:
    return file.parent.name if file.name == "config.json" else file.stem


def _own_name(fields: dict[str, Any]) -> str:
    own = fields.get("baton")
    return str(own.get("name", "")) if isinstance(own, dict) else ""


def _normalised(fields: dict[str, Any]) -> dict[str, Any]:
    """A config of any transformers version, as far as memory goes: rotary embedding takes none."""
    check_family(fields)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        **fields,
        "architectures": [ARCHITECTURES[fields["model_type"]]],
        "rope_parameters": rope,
    }
