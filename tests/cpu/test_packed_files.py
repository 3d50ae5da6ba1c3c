"""Weights packed on disk: the bytes that packing in memory gives, made once, whole or not there."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.tiny_models import make_random_llama, make_tiny_model

import engine.models.packed_files as packed_files
from cli.kernel_cache import pack_weights
from common.errors import ModelError
from engine.kernels.cpu.packing import FORMATS
from engine.models.config import ModelEntry, read_entry
from engine.models.packed import PackedModel, pack_model
from engine.models.packed_files import load_packed

DAMAGED = ("layers/down.panels", "layers/post_norm", "head.panels", "layers")
# What int4 and the compiled step can take.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture
def entry(tmp_path: Path) -> ModelEntry:
    return read_entry(make_random_llama(tmp_path / "m", **SHAPE))


def arrays_of(model: PackedModel) -> list[NDArray[np.generic] | None]:
    products = [product for layer in model.layers for product in layer.products]
    norms = [norm for layer in model.layers for norm in layer.norms]
    wide = [(p.panels, p.scales, p.bias) for p in (*products, model.embedding, model.head)]
    return [model.final_norm, *norms, *(array for three in wide for array in three)]


def assert_same(one: PackedModel, other: PackedModel) -> None:
    for a, b in zip(arrays_of(one), arrays_of(other), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype and np.array_equal(a, b)


def in_memory(entry: ModelEntry, quantization: str = "none") -> PackedModel:
    with packed_files._fp32(entry) as weights:
        return pack_model(weights, quantization)


def folders(entry: ModelEntry) -> list[str]:
    return sorted(path.name for path in entry.directory.glob("*packed-*"))


@pytest.mark.parametrize("quantization", FORMATS)
def test_every_format(entry: ModelEntry, quantization: str) -> None:
    check_round_trip(entry, quantization)


@pytest.mark.parametrize("family", ["llama-biases-mqa", "llama-tied-mha", "qwen3"])
def test_biases_norms_of_heads_and_a_tied_head(tmp_path: Path, family: str) -> None:
    check_round_trip(read_entry(make_tiny_model(family, tmp_path / "m").entry), "int8")


def check_round_trip(entry: ModelEntry, quantization: str) -> None:
    written = load_packed(entry, quantization)
    assert len(folders(entry)) == 1
    assert_same(written, in_memory(entry, quantization))
    for array in arrays_of(written):
        if array is not None:
            assert not array.flags.writeable, "not a view of the file"
            assert array.ctypes.data % 64 == 0 or array.nbytes % 64, "vectors would be split"


def test_the_second_one_maps(entry: ModelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_packed(entry, "none")
    monkeypatch.setattr(packed_files, "open_weights", None)
    assert_same(load_packed(entry, "none"), first)


def test_two_at_once_pack_once(entry: ModelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    write = packed_files._write
    monkeypatch.setattr(packed_files, "_write", lambda *args: (writes.append(1), write(*args)))
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: load_packed(entry, "int8"), range(4)))
    assert len(writes) == 1 and len(folders(entry)) == 1
    for model in models:
        assert_same(model, in_memory(entry, "int8"))


def test_other_weights_are_packed_anew_and_the_oldest_go(entry: ModelEntry) -> None:
    load_packed(entry, "int8")
    load_packed(entry, "none")
    before = folders(entry)
    other = make_random_llama(entry.directory.parent / "other", seed=1, **SHAPE)
    (weights,) = entry.weight_files
    os.replace(other / weights.name, weights)
    assert_same(load_packed(entry, "none"), in_memory(entry))
    assert len(set(folders(entry)) - set(before)) == 1
    weights.touch()
    load_packed(entry, "none")
    names = folders(entry)
    assert len([name for name in names if "none" in name]) == 2, "the oldest was not removed"
    assert len([name for name in names if "int8" in name]) == 1


@pytest.mark.parametrize(
    "path", ["layers/down.panels", "layers/post_norm", "head.panels", "layers"]
)
@pytest.mark.parametrize("damage", ["cut", "longer", "removed"])
def test_a_damaged_folder_is_made_again(entry: ModelEntry, path: str, damage: str) -> None:
    load_packed(entry, "int8")
    (folder,) = entry.directory.glob("packed-*")
    victim = folder / path
    if damage == "removed" or victim.is_dir():
        victim.rename(entry.directory / "gone")
    else:
        os.truncate(victim, victim.stat().st_size + {"cut": -1, "longer": 64}[damage])
    assert_same(load_packed(entry, "int8"), in_memory(entry, "int8"))
    assert victim.exists() and len(folders(entry)) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers/a": 1}', '{"final_norm": ["x", [3]]}'])
def test_an_index_that_is_none(entry: ModelEntry, text: str) -> None:
    load_packed(entry, "none")
    (folder,) = entry.directory.glob("packed-*")
    (folder / packed_files.INDEX).write_text(text)
    assert_same(load_packed(entry, "none"), in_memory(entry))


def test_a_killed_writer_leaves_nothing_for_ever(entry: ModelEntry) -> None:
    left = entry.directory / ".packed-none-0123456789ab.tmp" / "layers"
    left.mkdir(parents=True)
    load_packed(entry, "none")
    assert not left.exists()


def test_an_entry_that_takes_no_file_is_packed_in_memory(entry: ModelEntry) -> None:
    (entry.directory / ".packed.lock").mkdir()
    assert_same(load_packed(entry, "none"), in_memory(entry))
    assert not folders(entry)


def test_a_full_disk_leaves_nothing(
    entry: ModelEntry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_files.os, "fsync", full)
    assert_same(load_packed(entry, "none"), in_memory(entry))
    assert not folders(entry)
    packed_files.prepare(entry.directory, "none")
    assert "not packed: [Errno 28] No space" in capsys.readouterr().err


def test_preparing_packs_and_names_what_is_wrong(
    entry: ModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(entry.directory.parent)
    relative = Path(entry.directory.name)
    pack_weights(relative, "none")
    assert len(folders(entry)) == 1
    (weights,) = entry.weight_files
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"^model: .* is truncated or corrupt"):
        pack_weights(relative, "none")
    weights.unlink()
    with pytest.raises(ModelError, match=r"^model: cannot read .*safetensors: No such file"):
        pack_weights(relative, "none")
    with pytest.raises(ModelError, match=r"^model: cannot read .*safetensors: No such file"):
        load_packed(entry, "none")
