"""What a worker finds out, and refuses, before it serves anything."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.config import DecodeSettings
from common.errors import ConfigError, ModelError
from common.types import Role
from worker.identity import new_identity
from worker.model import model_facts, num_pool_blocks
from worker.runtime import assemble


def settings(tmp_path: Path, **fields: object) -> DecodeSettings:
    base = {"model": "oracle", "pool_dir": tmp_path, "transport": "shm", "num_blocks": 8}
    return DecodeSettings(**{**base, **fields})  # type: ignore[arg-type]


def test_the_pool_is_the_blocks_asked_for_and_the_null_block(tmp_path: Path) -> None:
    made = settings(tmp_path)
    compute = assemble(made, new_identity(made, Role.DECODE))
    try:
        assert compute.num_blocks == 8
        assert compute.memory.num_blocks == 9
        assert compute.engine.statistics().blocks.free == 8
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        compute.memory.close()
    assert list(tmp_path.iterdir()) == []


def test_a_memory_size_is_divided_into_blocks(tmp_path: Path) -> None:
    made = settings(tmp_path, num_blocks=None, kv_cache_memory_bytes=1 << 16)
    model = model_facts(made)
    assert num_pool_blocks(made, model) == (1 << 16) // model.layout.block_bytes - 1


@pytest.mark.parametrize(
    ("fields", "setting", "says"),
    [
        ({"num_blocks": 1 << 40}, "num_blocks", "bytes"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(
    tmp_path: Path, fields: dict[str, object], setting: str, says: str
) -> None:
    made = settings(tmp_path, **fields)
    with pytest.raises(ConfigError, match=says) as raised:
        assemble(made, new_identity(made, Role.DECODE))
    assert raised.value.setting == setting
    assert list(tmp_path.iterdir()) == []


def test_a_memory_size_that_holds_no_two_blocks(tmp_path: Path) -> None:
    made = settings(tmp_path, num_blocks=None, kv_cache_memory_bytes=1 << 16)
    model = model_facts(made)
    layout = replace(model.layout, num_layers=30, num_kv_heads=3, head_size=64)
    with pytest.raises(ConfigError, match="are the least"):
        num_pool_blocks(made, replace(model, layout=layout))


def test_weights_count_against_the_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings(tmp_path, num_blocks=None, kv_cache_memory_bytes=1 << 16)
    monkeypatch.setattr("worker.model._weight_bytes", lambda model: 1 << 50)
    with pytest.raises(ConfigError, match="bytes of weights"):
        num_pool_blocks(made, model_facts(made))


def test_a_folder_that_is_no_entry(tmp_path: Path) -> None:
    made = settings(tmp_path, model=str(tmp_path / "none"))
    with pytest.raises(ModelError):
        assemble(made, new_identity(made, Role.DECODE))


def test_an_id_must_fit_into_a_subject(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="worker_id"):
        new_identity(settings(tmp_path, worker_id="a.b"), Role.DECODE)
    named = new_identity(settings(tmp_path), Role.PREFILL)
    assert named.worker_id.startswith("prefill-")
    assert named.epoch < new_identity(settings(tmp_path), Role.PREFILL).epoch
