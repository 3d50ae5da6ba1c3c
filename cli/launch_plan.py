"""Which processes `baton up` starts, and with which arguments and environment."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.child import ChildSpec
from cli.kernel_cache import kernel_cache
from common.config import (
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    ProcessSettings,
    WorkerSettings,
    load,
)
from common.errors import ConfigError
from common.nats_server import NatsServer
from common.tls import TlsFiles
from common.types import LocalPrefill

MAX_POOL = 64
# Pool of the colocated workers.
_BOTH = "both"
# Settings that `up` chooses, for each process its own.
CHOSEN = (
    "nats_url", "nats_credentials_file", "token_file", "host", "advertise_host", "admin_port",
    "gateway_id", "worker_id", "port", "model", "grpc_port", "http_port", "otlp_endpoint",
    "otlp_token_file",
)  # fmt: skip
# Given at a process' first start only: a failpoint would kill every successor too.
_ONCE = ("failpoints",)
_KINDS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}


@dataclass(frozen=True, slots=True)
class Pools:
    """Processes to start. ``colocated``: decode workers that compute all prompts themselves."""

    prefill: int
    decode: int
    colocated: int
    gateways: int

    @property
    def num_engines(self) -> int:
        return self.prefill + self.decode + self.colocated

    def check(self) -> None:
        """Raises ConfigError for pools that could answer no request."""
        if self.decode + self.colocated == 0:
            raise ConfigError("decode", "at least one decode or colocated worker is needed")
        if self.prefill + self.colocated == 0:
            raise ConfigError("prefill", "at least one prefill or colocated worker is needed")


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What was asked for. ``settings`` are the flags passed on to every process that has them."""

    pools: Pools
    grpc_port: int
    http_port: int
    config: Path | None
    settings: Mapping[str, Any]

    def check(self) -> float:
        """Raises ConfigError for what no process would take, before any is started. Returns the
        longest drain budget."""
        self.pools.check()
        loaded = [load(kind, self._of(role), self.config) for role, kind in _KINDS.items()]
        return max(float(getattr(settings, "drain_budget_s", 0.0)) for settings in loaded)

    @property
    def tls(self) -> TlsFiles | None:
        """What all internal links of the run use."""
        return load(GatewaySettings, self._of("gateway"), self.config).tls

    @property
    def has_public_tls(self) -> bool:
        return load(GatewaySettings, self._of("gateway"), self.config).public_tls is not None

    def workers(self, nats: NatsServer, token_file: Path, otlp: str, model: str) -> list[ChildSpec]:
        pools = self.pools
        sizes = {"prefill": pools.prefill, "decode": pools.decode, _BOTH: pools.colocated}
        num_threads = threads_per_engine(pools.num_engines)
        return [
            self.worker(pool, i, num_threads, nats, token_file, otlp, model)
            for pool, size in sizes.items()
            for i in range(size)
        ]

    def worker(
        self,
        pool: str,
        index: int,
        num_threads: int,
        nats: NatsServer,
        token_file: Path,
        otlp: str,
        model: str,
    ) -> ChildSpec:
        role = "decode" if pool == _BOTH else pool
        own = ["--model", model, *_links(nats, role, token_file, otlp)]
        if pool == _BOTH:
            own += ["--local-prefill", LocalPrefill.ALWAYS.value]
        own += self._gpu_share(role)
        environment = {"OMP_NUM_THREADS": str(num_threads), **kernel_cache()}
        return self._spec(role, f"{pool}-{index}", own, environment)

    def _gpu_share(self, role: str) -> list[str]:
        """All workers of a run are on one GPU and divide what one alone would take."""
        settings = load(_KINDS[role], self._of(role), self.config)
        if not isinstance(settings, WorkerSettings) or settings.device == "cpu":
            return []
        share = settings.gpu_memory_utilization / self.pools.num_engines
        return ["--gpu-memory-utilization", f"{share:.4f}"]

    def gateways(
        self, nats: NatsServer, token_file: Path, otlp: str, model: str
    ) -> list[ChildSpec]:
        shared = ["--model", model, *_links(nats, "gateway", token_file, otlp)]
        environment = {"OMP_NUM_THREADS": "1"}
        return [
            self._spec("gateway", f"gateway-{i}", [*shared, *self._ports(i)], environment)
            for i in range(self.pools.gateways)
        ]

    def _ports(self, index: int) -> list[str]:
        """Those of the first gateway, counted on; free ones stay free."""
        grpc, http = (port and port + index for port in (self.grpc_port, self.http_port))
        return ["--grpc-port", str(grpc), "--http-port", str(http)]

    def _spec(
        self, role: str, label: str, own: Sequence[str], environment: Mapping[str, str]
    ) -> ChildSpec:
        given = self._of(role)
        once = {name: given.pop(name) for name in _ONCE if name in given}
        config = [] if self.config is None else ["--config", str(self.config)]
        # The last of two equal flags wins: what `up` chooses stands behind what it passes on.
        return ChildSpec(
            role=role,
            label=label,
            arguments=(*config, *_flags(given), *own),
            environment=environment,
            first_arguments=_flags(once),
        )

    def _of(self, role: str) -> dict[str, Any]:
        fields = _KINDS[role].model_fields
        return {k: v for k, v in self.settings.items() if v is not None and k in fields}


def threads_per_engine(num_engines: int) -> int:
    """Cores divided by engines: two engines of two threads each on two cores run 100 times slower
    than of one (docs/design.md, section 5)."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_engines))


def _links(nats: NatsServer, nats_role: str, token_file: Path, otlp: str) -> list[str]:
    return [
        "--nats-url", nats.url,
        "--nats-credentials-file", str(nats.credentials_file(nats_role)),
        "--token-file", str(token_file),
        "--otlp-endpoint", otlp,
        "--otlp-token-file", str(token_file),
        "--host", "127.0.0.1",
    ]  # fmt: skip


def _flags(settings: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments
