"""Which processes `baton up` starts, with which arguments and threads."""

import os
from pathlib import Path
from typing import Any

import pytest

from cli.launch_plan import LaunchPlan, Pools, threads_per_engine
from common.config import DecodeSettings, GatewaySettings, PrefillSettings, load
from common.errors import ConfigError
from common.nats_server import NatsServer

TOKEN = Path("/run/token")
OTLP = "127.0.0.1:4317"


def plan(pools: Pools | None = None, grpc_port: int = 0, **settings: Any) -> LaunchPlan:
    return LaunchPlan(pools or Pools(1, 1, 0, 1), grpc_port, 0, None, settings)


def parsed(arguments: tuple[str, ...]) -> dict[str, str]:
    """Flags as the process' own parser sees them: the last of two wins."""
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name = rest.pop(0).removeprefix("--")
        takes_value = rest and not rest[0].startswith("--")
        flags[name.replace("-", "_")] = rest.pop(0) if takes_value else "true"
    return flags


@pytest.fixture
def nats(tmp_path: Path) -> NatsServer:
    return NatsServer(tmp_path, port=4222)


def test_pools_and_labels(nats: NatsServer) -> None:
    asked = plan(Pools(prefill=2, decode=1, colocated=1, gateways=2), grpc_port=7000)
    workers = asked.workers(nats, TOKEN, OTLP, "oracle")
    assert [w.label for w in workers] == ["prefill-0", "prefill-1", "decode-0", "both-0"]
    assert [w.role for w in workers] == ["prefill", "prefill", "decode", "decode"]
    assert "local_prefill" not in parsed(tuple(workers[2].arguments))
    assert parsed(tuple(workers[3].arguments))["local_prefill"] == "always"
    gateways = asked.gateways(nats, TOKEN, OTLP, "oracle")
    assert [parsed(tuple(g.arguments))["grpc_port"] for g in gateways] == ["7000", "7001"]


def test_free_ports_stay_free(nats: NatsServer) -> None:
    gateways = plan(Pools(1, 1, 0, 3)).gateways(nats, TOKEN, OTLP, "oracle")
    assert {parsed(tuple(g.arguments))["grpc_port"] for g in gateways} == {"0"}


def test_each_process_gets_the_settings_that_it_has(nats: NatsServer) -> None:
    asked = plan(num_blocks="64", lease_s="3", max_attempts="5", enable_prefix_caching=False)
    prefill, decode = asked.workers(nats, TOKEN, OTLP, "oracle")
    (gateway,) = asked.gateways(nats, TOKEN, OTLP, "oracle")
    for spec in (prefill, decode):
        flags = parsed(tuple(spec.arguments))
        assert flags["num_blocks"] == "64" and flags["lease_s"] == "3"
        assert "max_attempts" not in flags and "--no-enable-prefix-caching" in spec.arguments
    flags = parsed(tuple(gateway.arguments))
    assert flags["max_attempts"] == "5" and "num_blocks" not in flags
    assert load(GatewaySettings, flags).max_attempts == 5


def test_every_argument_is_a_setting_of_its_process(nats: NatsServer) -> None:
    kinds = {"prefill": PrefillSettings, "decode": DecodeSettings, "gateway": GatewaySettings}
    links = (nats, TOKEN, OTLP, "oracle")
    for spec in (*plan().workers(*links), *plan().gateways(*links)):
        settings = load(kinds[spec.role], parsed(tuple(spec.arguments)))
        assert settings.nats_url == nats.url and settings.token_file == TOKEN


def test_failpoints_are_for_the_first_start_only(nats: NatsServer) -> None:
    asked = plan(failpoints="prefill.chunk=kill@1", allow_failpoints=True)
    spec = asked.workers(nats, TOKEN, OTLP, "oracle")[0]
    assert spec.first_arguments == ["--failpoints", "prefill.chunk=kill@1"]
    assert "--failpoints" not in spec.arguments and "--allow-failpoints" in spec.arguments


@pytest.mark.fault("V25")
def test_no_secret_is_on_a_command_line(nats: NatsServer) -> None:
    links = (nats, TOKEN, OTLP, "oracle")
    for spec in (*plan().workers(*links), *plan().gateways(*links)):
        line = " ".join([*spec.arguments, *spec.environment.values()])
        assert "password" not in line and str(TOKEN) in line


@pytest.mark.parametrize("num_engines", [1, 2, 3, 8, 64])
def test_threads_never_outnumber_cores(num_engines: int) -> None:
    cores = len(os.sched_getaffinity(0))
    threads = threads_per_engine(num_engines)
    assert threads >= 1
    assert threads * num_engines <= max(cores, num_engines)


def test_threads_are_in_the_environment_of_every_child(nats: NatsServer) -> None:
    workers = plan(Pools(1, 1, 0, 1)).workers(nats, TOKEN, OTLP, "oracle")
    expected = {"OMP_NUM_THREADS": str(threads_per_engine(2))}
    assert all(spec.environment == expected for spec in workers)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (Pools(1, 0, 0, 1), "decode"),
        (Pools(0, 1, 0, 1), "prefill"),
    ],
)
def test_pools_that_can_serve_nothing_are_refused(pools: Pools, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(pools).check()


def test_colocated_workers_need_no_others() -> None:
    plan(Pools(0, 0, 1, 1)).check()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": "1"},
        {"lease_s": "-3"},
        {"block_size": "x"},
        {"failpoints": "prefill.chunk=kill@1"},
        {"transport": "carrier-pigeon"},
        {"transport": "cuda_ipc"},
        {"transport": "nccl"},
    ],
)
def test_bad_settings_are_refused_before_anything_starts(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plan(**settings).check()
