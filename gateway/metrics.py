"""The gateway's numbers as Prometheus text; vLLM's names where the meaning is the same."""

from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.gateway import Gateway


class _Snapshot(Collector):
    """Reads the statistics at scrape time; nothing is counted twice."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> list[Metric]:
        statistics = self._gateway.statistics()
        gauges = {
            "baton_gateway_requests_running": statistics.num_running,
            "baton_gateway_requests_waiting": statistics.num_waiting,
            "baton_gateway_tokens_waiting": statistics.num_waiting_tokens,
            "baton_gateway_jobs_unaccepted": statistics.num_unaccepted_jobs,
            "baton_gateway_decode_links": statistics.num_decode_links,
        }
        metrics: list[Metric] = [
            GaugeMetricFamily(name, name.replace("_", " "), value=float(value))
            for name, value in gauges.items()
        ]
        metrics.append(
            CounterMetricFamily(
                "baton_gateway_admission_refusals",
                "requests refused because a queue was full",
                value=float(statistics.num_admission_refusals),
            )
        )
        events = CounterMetricFamily(
            "baton_gateway_events", "what happened to requests and attempts", labels=["event"]
        )
        for name, value in asdict(statistics.counters).items():
            events.add_metric([name], float(value))
        metrics.append(events)
        return metrics


def exposition(gateway: Gateway) -> str:
    registry = CollectorRegistry()
    registry.register(_Snapshot(gateway))
    return generate_latest(registry).decode()
