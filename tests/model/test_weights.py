"""Weights and configs that cannot be served: one clear line each, before anything runs."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import TinyModel

from common.errors import ModelError
from engine.kernels import kernel_set
from engine.models.config import parse_config, read_entry
from engine.models.llama import load_model

Tiny = Callable[[str], TinyModel]
Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(entry: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(read_entry(entry), dtype, CPU, kernel_set("torch"))


def refusal(entry: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(entry)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def entry(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a good entry, to be broken."""
    for file in tiny("llama").entry.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_tensors(entry: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(entry / "model.safetensors")
    change(tensors)
    save_file(tensors, entry / "model.safetensors")


def change_config(entry: Path, **changes: Any) -> None:
    path = entry / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_unbroken_entry_loads(entry: Path) -> None:
    load(entry)


def test_description_needs_no_weights(entry: Path) -> None:
    (entry / "model.safetensors").unlink()
    described = read_entry(entry)
    assert described.description.name == "tiny"
    assert described.description.eos_token_ids == (2,)
    assert described.description.max_model_len == 256
    assert (described.config.num_kv_heads, described.config.head_size) == (2, 8)


def test_missing_tensor(entry: Path) -> None:
    change_tensors(entry, lambda tensors: tensors.pop(DOWN))
    assert refusal(entry) == f"model: weights lack {DOWN}"


def test_leftover_tensors(entry: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48), "zz": torch.zeros(1)}
    change_tensors(entry, lambda tensors: tensors.update(extra))
    assert "q_proj.bias and 1 more, which the model has not" in refusal(entry)


def test_known_leftovers_are_ignored(entry: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(entry, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(entry)


def test_wrong_shape(entry: Path) -> None:
    change_tensors(entry, lambda tensors: tensors.update({DOWN: torch.zeros(80, 48)}))
    assert refusal(entry) == (f"model: {DOWN} has shape [80, 48], config.json says [48, 80]")


def test_wrong_dtype(entry: Path) -> None:
    change_tensors(entry, lambda tensors: tensors.update({DOWN: torch.zeros(48, 80).byte()}))
    assert "is U8, not F32, F16, BF16" in refusal(entry)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_truncated_file(entry: Path, keep: int) -> None:
    path = entry / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "is truncated or corrupt" in refusal(entry)


@pytest.mark.parametrize("length", [2**40, 3])
@pytest.mark.fault("V2")
def test_corrupt_header(entry: Path, length: int) -> None:
    path = entry / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert "is truncated or corrupt" in refusal(entry)


def test_missing_file(entry: Path) -> None:
    (entry / "model.safetensors").unlink()
    assert "cannot read" in refusal(entry)


def test_sharded_weights(entry: Path) -> None:
    tensors = load_file(entry / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, entry / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, entry / "b.safetensors")
    own = json.loads((entry / "config.json").read_text())["baton"]
    change_config(entry, baton={**own, "weight_files": ["a.safetensors", "b.safetensors"]})
    load(entry)


def test_weights_of_the_models_dtype_are_mapped_not_copied(entry: Path) -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert str(entry / "model.safetensors") not in mapped
    model = load(entry)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert str(entry / "model.safetensors") in mapped
    assert model is not None


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_theta"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "rope_parameters.factor",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "rope_parameters.partial_rotary_factor",
        ),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
    ids=str,
)
def test_refused_by_field_name(entry: Path, changes: dict[str, Any], field: str) -> None:
    change_config(entry, **changes)
    assert refusal(entry).startswith(f"{field}: ")


def test_a_window_that_nothing_outgrows_is_not_active(entry: Path) -> None:
    fields = json.loads((entry / "config.json").read_text())
    parse_config({**fields, "sliding_window": 256})
    parse_config({**fields, "sliding_window": 16, "use_sliding_window": False})


@pytest.mark.parametrize("content", ["", "[]", "{", '{"baton": 1}', "\x00"])
def test_not_an_entry(entry: Path, content: str) -> None:
    (entry / "config.json").write_text(content)
    assert refusal(entry).startswith("model: ")


def test_no_folder(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path / "none")
