"""What a process exports, as a scrape of Prometheus sees it."""

import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass
class Scrape:
    """One answer of ``/metrics``; ``families`` by name, counters without ``_total``."""

    text: str

    def __post_init__(self) -> None:
        self.families: dict[str, Metric] = {
            family.name: family for family in text_string_to_metric_families(self.text)
        }
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in self.families.values():
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def __call__(self, sample: str, **labels: str) -> float:
        """The sum of the sample's series that have these labels; there must be one."""
        found = [
            value
            for has, value in self.samples[sample]
            if all(has.get(label) == value for label, value in labels.items())
        ]
        assert found, f"{sample} has no series with {labels}"
        return sum(found)

    @property
    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {
            (name, tuple(sorted(labels.items())))
            for name, samples in self.samples.items()
            for labels, _ in samples
        }


def scrape(admin: str) -> Scrape:
    """Of the process with this admin address."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return Scrape(response.read().decode())


def total(scrapes: Iterable[Scrape], sample: str, **labels: str) -> float:
    return sum(one(sample, **labels) for one in scrapes)
