"""Small random models of each family, made by transformers, and prepared entries of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cli.model_config import normalise

VOCAB_SIZE = 160

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    # Wide enough that logits differ by more than rounding.
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}

# name: (class prefix in transformers, what differs from the shape above)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biases-mqa": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 3}),
    "qwen3-head-128": ("Qwen3", {"head_dim": 128, "num_attention_heads": 2}),
    "rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "rope-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "rope-yarn": ("Llama", {"rope_parameters": _YARN, "head_dim": 32}),
    "rope-yarn-scaled": (
        "Llama",
        {
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
            "head_dim": 32,
        },
    ),
    "rope-yarn-factor": (
        "Qwen3",
        {
            "rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 24, "beta_slow": 2},
            "head_dim": 32,
        },
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A transformers model in eval mode and the entry that holds the same weights."""

    reference: Any
    entry: Path

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The reference's logits ``[n, vocab]`` at each position."""
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids])).logits[0].float()


def make_tiny_model(name: str, directory: Path, seed: int = 0) -> TinyModel:
    import transformers

    prefix, changes = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    write_entry(directory, config.to_dict(), model.state_dict())
    return TinyModel(model, directory)


def make_random_llama(directory: Path, seed: int = 0, **changes: int) -> Path:
    """A prepared entry of the first family, but for ``changes`` of its shape, without transformers,
    whose import takes seconds."""
    facts = {**_SHAPE, **changes}
    generator = torch.Generator().manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = {**facts, "model_type": "llama", "rope_parameters": rope}
    hidden, inner, vocab = facts["hidden_size"], facts["intermediate_size"], VOCAB_SIZE
    head_size = hidden // facts["num_attention_heads"]
    kv_size = facts["num_key_value_heads"] * head_size
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    norms = ["model.norm"]
    for layer in range(facts["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, size in (("q", hidden), ("k", kv_size), ("v", kv_size), ("o", hidden)):
            shapes[f"{prefix}.self_attn.{name}_proj"] = (size, hidden)
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj"] = (hidden, inner)
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=generator) * facts["initializer_range"]
        for name, shape in shapes.items()
    }
    for name in norms:
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    return write_entry(directory, config, tensors)


def write_entry(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A prepared entry, but for its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    if config.get("tie_word_embeddings"):
        tensors = {key: value for key, value in tensors.items() if key != "lm_head.weight"}
    save_file(
        {key: value.contiguous() for key, value in tensors.items()},
        directory / "model.safetensors",
    )
    own = {
        "fingerprint": "f" * 64,
        "name": "tiny",
        "eos_token_ids": [2],
        "default_sampling": {},
        "weight_files": ["model.safetensors"],
    }
    content = json.dumps({**normalise(config), "baton": own})
    (directory / "config.json").write_text(content, encoding="utf-8")
    return directory
