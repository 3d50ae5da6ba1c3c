"""Settings: where they come from, and what is said of those that cannot be used."""

from pathlib import Path
from typing import Any

import pytest

from common.config import DecodeSettings, GatewaySettings, load
from common.config_check import has_nvidia_driver
from common.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "baton.yaml"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("num_bloks: 5", "num_bloks: is no setting; did you mean num_blocks?"),
        ("zzz: 5", "zzz: is no setting"),
        ("block_size: 1\nport: [1\n", "config: {path}: line 3: "),
        ("- 1", "config: {path} must hold a mapping"),
        ("lease_s: soon", "lease_s: must be a number, not 'soon'"),
    ],
)
def test_yaml_that_cannot_be_used(yaml_file: Path, content: str, message: str) -> None:
    yaml_file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(DecodeSettings, {}, yaml_file)
    assert caught.value.message.startswith(message.format(path=yaml_file))


def test_one_yaml_file_serves_all_processes(yaml_file: Path) -> None:
    yaml_file.write_text("num_blocks: 5\ngrpc_port: 7\nkv_cache_memory_bytes: 1GiB\n")
    assert load(GatewaySettings, {}, yaml_file).grpc_port == 7
    decode = load(DecodeSettings, {}, yaml_file)
    assert decode.num_blocks == 5 and decode.kv_cache_memory_bytes == 1 << 30


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(DecodeSettings, {}, tmp_path / "none")
    assert caught.value.message == f"config: cannot read {tmp_path}/none: No such file or directory"


def test_misspelt_variables_are_refused_and_those_of_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "BATON_CACHE": "/tmp",
        "BATON_ADDRESS": "a:1",
        "BATON_GRPC_PORT": "7",
        "BATON_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "BATON_GATEWAY_PORT": "tcp://10.0.0.1:1",
        "BATON_GATEWAY_PORT_1_TCP_PROTO": "tcp",
    }.items():
        monkeypatch.setenv(name, value)
    load(DecodeSettings, {})
    monkeypatch.setenv("BATON_NUM_BLOKS", "5")
    with pytest.raises(ConfigError, match=r"BATON_NUM_BLOKS: .* did you mean BATON_NUM_BLOCKS"):
        load(GatewaySettings, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_blocks": "x"}, "num_blocks: must be a whole number, not 'x'"),
        ({"block_size": "0"}, "block_size: must be at least 1, not '0'"),
        ({"kernels": "cublas"}, "kernels: must be 'auto', 'torch', 'numba' or 'triton', not"),
        ({"device": "cpu", "kernels": "triton"}, "kernels: triton needs device cuda"),
        ({"device": "tpu"}, "device: must be 'cpu' or 'cuda', not 'tpu'"),
        ({"gpu_memory_utilization": "1.5"}, "gpu_memory_utilization: must be at most 1"),
        ({"local_prefill": "maybe"}, "local_prefill: must be 'never', "),
        ({"reflection": "perhaps"}, "reflection: must be true or false, not 'perhaps'"),
        ({"failpoints": "a=kill"}, "failpoints: need allow_failpoints"),
        ({"kv_cache_memory_bytes": "1 furlong"}, "kv_cache_memory_bytes: '1 furlong' is not a"),
        ({"kv_cache_memory_bytes": "1K"}, "kv_cache_memory_bytes: must be at least 65536"),
    ],
)
def test_what_is_wrong_is_said_plainly(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(DecodeSettings, flags)
    assert caught.value.message.startswith(message)


@pytest.mark.skipif(has_nvidia_driver(), reason="there is one here")
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="device: cuda needs an NVIDIA driver"):
        load(DecodeSettings, {"device": "cuda"})
