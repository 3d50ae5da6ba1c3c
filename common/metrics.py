"""A process' numbers as Prometheus text.

Nothing is counted here: components count, and a scrape asks them for their ``statistics()``. Every
series carries the same two labels, ``model_name`` (vLLM's) and ``role``, and beyond them only
labels whose values are ours (states, reasons, transports), never a client's: so there are as many
series after a million requests as after the first.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from common.histogram import Histogram

# Values of one label, or of several: {"ready": 1}, {("claim", "expired"): 2}.
Key = TypeVar("Key", bound=str | tuple[str, ...])


class Exposition(Collector):
    """Collects metrics for one scrape. Names bear no ``_total``: the text adds it to counters."""

    def __init__(self, model_name: str, role: str) -> None:
        self._labels = {"model_name": model_name, "role": role}
        self._metrics: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def gauge(self, name: str, text: str, value: float) -> None:
        self.gauges(name, text, (), {(): value})

    def counter(self, name: str, text: str, value: float) -> None:
        self.counters(name, text, (), {(): value})

    def gauges(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[Key, float]
    ) -> None:
        self._add(GaugeMetricFamily(name, text, labels=(*self._labels, *labels)), values)

    def counters(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[Key, float]
    ) -> None:
        self._add(CounterMetricFamily(name, text, labels=(*self._labels, *labels)), values)

    def histogram(self, name: str, text: str, values: Histogram) -> None:
        self.histograms(name, text, (), {(): values})

    def histograms(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Mapping[Key, Histogram],
    ) -> None:
        family = HistogramMetricFamily(name, text, labels=(*self._labels, *labels))
        for key, histogram in values.items():
            family.add_metric(self._values(key), _buckets(histogram), histogram.total)
        self._metrics.append(family)

    def text(self) -> str:
        """With the process' own CPU, memory and files."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        return generate_latest(registry).decode()

    def _add(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Key, float]
    ) -> None:
        for key, value in values.items():
            family.add_metric(self._values(key), value)
        self._metrics.append(family)

    def _values(self, key: str | tuple[str, ...]) -> list[str]:
        return [*self._labels.values(), *((key,) if isinstance(key, str) else key)]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts in each bucket all that is below its bound."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
    return buckets
