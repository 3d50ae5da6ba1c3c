"""A GGUF file as a model: metadata to config and tokenizer, weights dequantised to fp32."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from cli import gguf_tokenizer
from cli.model_config import ARCHITECTURES, check_tensors, normalise
from cli.model_source import EntryFacts, Progress
from cli.safetensors_file import write_float32
from common.errors import ModelError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.stem

    @property
    def files(self) -> list[Path]:
        return [self.path]

    def write(self, directory: Path, progress: Progress) -> EntryFacts:
        progress("reading", 0, 1)
        reader = _open(self.path)
        metadata = _metadata(reader)
        tensors = {_hf_name(t.name): t for t in reader.tensors}
        config = _config(metadata, tensors.keys())
        shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
        check_tensors(config, shapes)
        tokenizer = gguf_tokenizer.build(metadata)
        tokenizer.save(str(directory / "tokenizer.json"))
        if template := metadata.get("tokenizer.chat_template"):
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        total = sum(4 * int(np.prod(shape)) for shape in shapes.values())
        done = 0
        converted = _convert(tensors, shapes, config, metadata["general.architecture"])
        for size in write_float32(directory / "model.safetensors", shapes, converted):
            done += size
            progress("converting", done, total)
        (directory / self.path.name).symlink_to(self.path.resolve())
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        return EntryFacts(
            config=config,
            weight_files=("model.safetensors",),
            eos_token_ids=() if eos is None else (int(eos),),
            template_variables=gguf_tokenizer.template_variables(metadata),
        )


def _open(path: Path) -> gguf.GGUFReader:
    try:
        reader = gguf.GGUFReader(path)
        size = path.stat().st_size
        end = max((t.data_offset + int(t.n_bytes) for t in reader.tensors), default=0)
    except (OSError, ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ModelError("model", f"{path.name} is truncated or no GGUF file: {error}") from None
    if not reader.tensors or end > size:
        raise ModelError("model", f"{path.name} is truncated: {size} of {end} bytes")
    return reader


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    try:
        return {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError) as error:
        raise ModelError("model", f"the file's metadata is corrupt: {error}") from None


def _hf_name(name: str) -> str:
    """Name of a tensor in the Hugging Face layout of the Llama family."""
    if match := _LAYER_NAME.fullmatch(name):
        index, part, kind = match.groups()
        if part in _LAYER:
            return f"model.layers.{index}.{_LAYER[part]}.{kind}"
    base, _, kind = name.rpartition(".")
    if base in _TOP:
        return f"{_TOP[base]}.{kind}"
    if base == "rope_freqs":
        raise ModelError(
            "model", "rope_freqs: scaled rope in a GGUF is not supported; use the model's folder"
        )
    raise ModelError("model", f"tensor {name} is of no supported architecture")


def _config(metadata: Mapping[str, Any], names: Any) -> dict[str, Any]:
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError("model", f"general.architecture {arch!r} is not one of {known}")
    try:
        config: dict[str, Any] = {
            "model_type": arch,
            "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
            "hidden_size": metadata[f"{arch}.embedding_length"],
            "intermediate_size": metadata[f"{arch}.feed_forward_length"],
            "num_hidden_layers": metadata[f"{arch}.block_count"],
            "num_attention_heads": metadata[f"{arch}.attention.head_count"],
            "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv"),
            "head_dim": metadata.get(f"{arch}.attention.key_length"),
            "rms_norm_eps": metadata[f"{arch}.attention.layer_norm_rms_epsilon"],
            "max_position_embeddings": metadata[f"{arch}.context_length"],
            "rope_parameters": _rope(metadata, arch),
        }
    except KeyError as error:
        raise ModelError("model", f"the file lacks {error.args[0]}") from None
    config |= {
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if metadata.get(f"{arch}.expert_count"):
        config["num_experts"] = metadata[f"{arch}.expert_count"]
    return normalise(config)


def _rope(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    rope: dict[str, Any] = {
        "rope_type": "default" if scaling == "none" else scaling,
        "rope_theta": metadata.get(f"{arch}.rope.freq_base", 10000.0),
    }
    if scaling in ("linear", "yarn"):
        rope["factor"] = metadata[f"{arch}.rope.scaling.factor"]
    if scaling == "yarn":
        length = metadata[f"{arch}.rope.scaling.original_context_length"]
        rope["original_max_position_embeddings"] = length
    return rope


def _convert(
    tensors: Mapping[str, gguf.ReaderTensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    arch: str,
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError):
            kind = tensor.tensor_type.name
            raise ModelError("model", f"tensor {name}: type {kind} is not supported") from None
        values = values.astype(np.float32, copy=False).reshape(shapes[name])
        if not np.isfinite(values).all():
            raise ModelError("model", f"tensor {name} holds values that are not finite")
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            values = _unpermute(values, heads[projection])
        yield name, values


def _unpermute(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp stores the two halves that rope rotates interleaved; back to halves."""
    half = values.shape[0] // num_heads // 2
    split = values.reshape(num_heads, half, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)
