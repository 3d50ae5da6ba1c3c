"""`baton prepare`: what an entry holds, once and whole, and one clear line for what cannot be."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.model_files import gguf_file, hf_folder, hf_tensors, tokenizer
from tokenizers import Tokenizer

from cli.hf_source import HuggingFaceSource
from cli.model_cache import prepare_entry
from cli.prepare import find_source
from common.errors import ModelError
from engine.models.config import read_entry
from gateway.model_entry import read_model_entry


def prepare(model: Path, cache: Path) -> Path:
    return prepare_entry(find_source(str(model)), cache, lambda what, done, total: None)


def config_of(entry: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((entry / "config.json").read_text())
    return config


# ---------------------------------------------------------------- folders


def test_a_folder_becomes_an_entry_that_both_sides_read(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 5], "temperature": 0.6, "top_p": 0.9, "max_length": 9})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<|start|>"}})
    )
    entry = prepare(folder, tmp_path / "cache")
    gateway, engine = read_model_entry(entry), read_entry(entry)
    assert gateway.name == engine.description.name == "tiny"
    assert gateway.fingerprint == engine.description.fingerprint
    assert gateway.eos_token_ids == engine.description.eos_token_ids == (1, 5)
    assert gateway.default_sampling == {"temperature": 0.6, "top_p": 0.9}
    assert gateway.template_variables == {"bos_token": "<|start|>"}
    assert gateway.max_model_len == 256
    assert (entry / "chat_template.jinja").read_text() == "{{ bos_token }}"


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_linked_never_copied(tmp_path: Path, shards: int) -> None:
    folder = hf_folder(tmp_path / "tiny", shards)
    entry = prepare(folder, tmp_path / "cache")
    names = config_of(entry)["baton"]["weight_files"]
    assert len(names) == shards
    for name in names:
        assert (entry / name).is_symlink() and (entry / name).samefile(folder / name)


def test_both_rope_spellings_are_one(tmp_path: Path) -> None:
    hub = hf_folder(
        tmp_path / "hub", rope_theta=7000.0, rope_scaling={"type": "linear", "factor": 2.0}
    )
    new = hf_folder(
        tmp_path / "new",
        rope_theta=None,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7000.0},
    )
    ropes = [read_entry(prepare(f, tmp_path / "cache")).config.rope for f in (hub, new)]
    assert ropes[0] == ropes[1]
    assert (ropes[0].rope_type, ropes[0].theta, ropes[0].factor) == ("linear", 7000.0, 2.0)


# ---------------------------------------------------------------- GGUF


def test_a_gguf_gives_the_weights_of_its_folder(tmp_path: Path) -> None:
    entry = prepare(gguf_file(tmp_path / "tiny.gguf"), tmp_path / "cache")
    stored = load_file(entry / "model.safetensors")
    expected = hf_tensors()
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored[name], tensor, err_msg=name)
    assert (entry / "tiny.gguf").samefile(tmp_path / "tiny.gguf")
    config = read_entry(entry).config
    assert (config.num_kv_heads, config.head_size, config.tied_head) == (2, 16, True)
    assert config.rope.theta == 5000.0


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    model = gguf_file(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    stored = load_file(prepare(model, tmp_path / "cache") / "model.safetensors")
    for name, tensor in hf_tensors().items():
        assert stored[name].dtype == np.float32
        np.testing.assert_allclose(stored[name], tensor, atol=0.03, err_msg=name)


def test_digits_of_smollm_are_split_singly(tmp_path: Path) -> None:
    """GPT-2's splitting, which transformers falls back to, would find the token `11`."""
    entry = prepare(gguf_file(tmp_path / "a.gguf"), tmp_path / "cache")
    smollm = Tokenizer.from_file(str(entry / "tokenizer.json"))
    entry = prepare(gguf_file(tmp_path / "b.gguf", pre="gpt-2"), tmp_path / "cache")
    gpt2 = Tokenizer.from_file(str(entry / "tokenizer.json"))
    assert smollm.encode("a11").tokens == ["a", "1", "1"]
    assert gpt2.encode("a11").tokens == ["a", "11"]
    assert smollm.encode("<|end|>").ids == [1]


# ---------------------------------------------------------------- once, whole, by one


def test_the_second_time_nothing_is_done(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny")
    entry = prepare(folder, tmp_path / "cache")
    before = (entry / "config.json").stat()
    assert prepare(folder, tmp_path / "cache") == entry
    assert (entry / "config.json").stat() == before


def test_a_changed_source_is_another_entry(tmp_path: Path) -> None:
    one = prepare(hf_folder(tmp_path / "tiny"), tmp_path / "cache")
    shutil.rmtree(tmp_path / "tiny")
    two = prepare(hf_folder(tmp_path / "tiny", seed=1), tmp_path / "cache")
    assert one != two
    assert config_of(one)["baton"]["fingerprint"] != config_of(two)["baton"]["fingerprint"]


def test_the_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny")
    entries = [prepare(folder, tmp_path / name) for name in ("cache", "other")]
    prints = {config_of(entry)["baton"]["fingerprint"] for entry in entries}
    assert len(prints) == 1


def test_many_at_once_make_one_entry(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny")
    source = HuggingFaceSource(folder)
    writes = []

    class Counting:
        name, files = source.name, source.files

        def write(self, directory: Path, progress: Callable[[str, int, int], None]) -> Any:
            writes.append(directory)
            return source.write(directory, progress)

    def once(_: int) -> Path:
        return prepare_entry(Counting(), tmp_path / "cache", lambda *args: None)

    with ThreadPoolExecutor(4) as pool:
        entries = set(pool.map(once, range(4)))
    assert len(entries) == len(writes) == 1
    assert read_entry(entries.pop())


def test_what_a_killed_one_left_behind_is_cleared(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny")
    entry = prepare(folder, tmp_path / "cache")
    shutil.rmtree(entry)
    left = entry.parent / f".{entry.name}.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert prepare(folder, tmp_path / "cache") == entry
    assert not left.exists() and read_entry(entry)


def test_an_entry_whose_weights_are_gone_is_made_again(tmp_path: Path) -> None:
    gguf_path = gguf_file(tmp_path / "tiny.gguf")
    entry = prepare(gguf_path, tmp_path / "cache")
    (entry / "model.safetensors").unlink()
    assert prepare(gguf_path, tmp_path / "cache") == entry
    assert (entry / "model.safetensors").exists()


# ---------------------------------------------------------------- refused


def truncate(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


def broken_folders() -> dict[str, tuple[Callable[[Path], object], str]]:
    def config(**changes: Any) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return change

    return {
        "no config": (lambda f: (f / "config.json").unlink(), "not a model"),
        "config no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
        "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        "bad tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        "truncated data": (lambda f: truncate(f / "model.safetensors", 0.9), "truncated"),
        "truncated header": (lambda f: truncate(f / "model.safetensors", 0.001), "truncated"),
        "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "corrupt"),
        "wrong shape": (config(intermediate_size=128), "mlp.gate_proj.weight has shape"),
        "missing tensor": (config(num_hidden_layers=3), "lack model.layers.2"),
        "other family": (config(model_type="gpt2"), "model_type 'gpt2'"),
        "quantised": (
            config(quantization_config={"quant_method": "gptq", "bits": 4}),
            "quantization_config",
        ),
        "rope": (config(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope"),
        "window": (config(model_type="mistral", sliding_window=64), "sliding_window"),
        "wrong type": (config(hidden_size="64"), "hidden_size"),
        "vocabulary": (config(vocab_size=100), "embed_tokens"),
    }


@pytest.mark.parametrize("case", broken_folders())
def test_a_broken_folder_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    damage, message = broken_folders()[case]
    folder = hf_folder(tmp_path / "tiny")
    damage(folder)
    with pytest.raises(ModelError, match=message):
        prepare(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("models/[!.]*"))
    assert not list((tmp_path / "cache").glob("models/.*.tmp"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: truncate(p, 0.9), "truncated"),
        (lambda p: truncate(p, 0.01), "truncated"),
        (lambda p: p.write_bytes(b"GGUF"), "truncated"),
        (lambda p: p.write_bytes(b"no model" * 99), "no GGUF"),
        (lambda p: p.write_bytes(b""), "truncated|no GGUF"),
    ],
)
def test_a_broken_gguf_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = gguf_file(tmp_path / "tiny.gguf")
    damage(path)
    with pytest.raises(ModelError, match=message):
        prepare(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"omit": "tokenizer"}, "tokenizer"),
        ({"omit": "model.norm.weight"}, "lack model.norm.weight"),
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre"),
        ({"arch": "mamba"}, "general.architecture"),
    ],
)
def test_a_gguf_that_we_cannot_serve_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        prepare(gguf_file(tmp_path / "tiny.gguf", **options), tmp_path / "cache")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32("nan").tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelError, match="not finite"):
        prepare(path, tmp_path / "cache")


@pytest.mark.parametrize("model", ["/nowhere", "", "org/some-model"])
def test_what_is_no_model_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match="neither"):
        find_source(model)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a model"):
        find_source(str(tmp_path))


# ---------------------------------------------------------------- the command


def baton(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, timeout=60
    )


def test_json_and_nothing_else(tmp_path: Path) -> None:
    model = gguf_file(tmp_path / "tiny.gguf")
    cache = str(tmp_path / "cache")
    result = baton("prepare", "--model", str(model), "--cache-dir", cache, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    entry = Path(json.loads(result.stdout)["model"])
    assert list(json.loads(result.stdout)) == ["model"]
    assert read_entry(entry)


def test_one_clear_line_and_status_2(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "tiny.gguf")
    truncate(path, 0.5)
    result = baton("prepare", "--model", str(path), "--cache-dir", str(tmp_path), "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: model: tiny.gguf is truncated")
    assert result.stderr.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = str(gguf_file(tmp_path / "tiny.gguf"))
    result = baton("prepare", "--model", model, "--cache-dir", str(tmp_path / "file"))
    assert result.returncode == 2 and "cache_dir" in result.stderr


def test_the_vocabulary_of_the_helper_is_the_models() -> None:
    assert tokenizer().get_vocab_size() == hf_tensors()["model.embed_tokens.weight"].shape[0]


def test_a_link_to_the_entry_follows_the_model(tmp_path: Path) -> None:
    """What containers are told to read: one path, whatever is served."""
    link = tmp_path / "served"
    for name in ("one", "two"):
        folder = hf_folder(tmp_path / name)
        command = [sys.executable, "-m", "cli.main", "prepare", "--model", str(folder)]
        options = ["--cache-dir", str(tmp_path / "cache"), "--link", str(link)]
        subprocess.run([*command, *options], check=True, capture_output=True)
        assert read_entry(link).description.name == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "one", "served", "two"]
