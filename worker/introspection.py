"""A worker's statistics as JSON and as Prometheus text: both are views of the same snapshot."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.types import Role
from engine.statistics import EngineStatistics

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def to_json(value: object) -> Json:
    """Dataclasses, mappings and sequences, nested; a compound key becomes ``a.b``."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_name(key): to_json(entry) for key, entry in value.items()}
    assert isinstance(value, list | tuple), type(value)
    return [to_json(entry) for entry in value]


def exposition(role: Role, engine: EngineStatistics, statistics: object) -> str:
    """Prometheus text: vLLM's gauges where the meaning is the same, and every number of
    ``statistics`` as ``baton_<role>_<name>``."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(role, engine, to_json(statistics)))
    return generate_latest(registry).decode()


class _Snapshot(Collector):
    def __init__(self, role: Role, engine: EngineStatistics, statistics: Json) -> None:
        self._role = role
        self._engine = engine
        self._statistics = statistics

    def collect(self) -> list[Metric]:
        blocks = self._engine.blocks
        used = blocks.in_use + blocks.leased + blocks.importing
        known = {
            "vllm:num_requests_running": self._engine.num_running,
            "vllm:num_requests_waiting": self._engine.num_waiting,
            "vllm:kv_cache_usage_perc": used / blocks.total,
        }
        own = dict(_numbers(f"baton_{self._role.value}", self._statistics))
        return [
            GaugeMetricFamily(name, name.replace("_", " "), value=float(value))
            for name, value in (known | own).items()
        ]


def _numbers(name: str, value: Json) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _numbers(f"{name}_{key}".replace(".", "_"), entry)
    elif isinstance(value, int | float):
        yield name, value


def _name(key: object) -> str:
    if isinstance(key, tuple):
        return ".".join(_name(part) for part in key)
    return str(key.value) if isinstance(key, Enum) else str(key)
