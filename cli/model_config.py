"""The normalised model config: which fields it keeps, and the tensors that it promises."""

from collections.abc import Mapping
from typing import Any

from common.errors import ModelError
from engine.models.config import ModelConfig, parse_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_KEPT = (
    "architectures", "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim",
    "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings",
    "use_sliding_window", "vocab_size",
)  # fmt: skip


def check_family(config: Mapping[str, Any]) -> None:
    """Raises ModelError unless the model is of the Llama family."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError("model", f"model_type {family!r} is not supported; these are: {known}")


def normalise(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that shape inference, sorted, whatever version of transformers wrote them.
    ``config`` is a transformers 5 config as a dict (``rope_parameters``, no ``rope_theta``).
    Raises ModelError naming the first field that the engine cannot serve."""
    check_family(config)
    kept = {key: config[key] for key in _KEPT if config.get(key) is not None}
    kept["architectures"] = [ARCHITECTURES[config["model_type"]]]
    # Fields that only models we refuse have; the engine's parser says so by their names.
    refused = {key: value for key, value in config.items() if key not in _KEPT and value}
    parsed = parse_config({**refused, **kept})
    kept["num_key_value_heads"] = parsed.num_kv_heads
    kept["head_dim"] = parsed.head_size
    return dict(sorted(kept.items()))


def check_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError naming the first tensor that is missing or has another shape."""
    for name, expected in _expected_shapes(parse_config(config)).items():
        actual = shapes.get(name)
        if actual is None:
            raise ModelError("model", f"the weights lack {name}")
        if actual != expected:
            raise ModelError(
                "model", f"{name} has shape {list(actual)}, config.json says {list(expected)}"
            )


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight matrix and norm; biases are left to the engine."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qk_norm:
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        layer |= dict.fromkeys(norms, (config.head_size,))
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
