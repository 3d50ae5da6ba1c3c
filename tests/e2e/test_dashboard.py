"""Every query of the Grafana dashboard gives data, as Prometheus itself evaluates it."""

import asyncio
import json
import math
import shutil
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.answers import answer_of
from support.cluster import REPOSITORY, Cluster, baton_up, until
from support.engines import prompt_of

from common.client import BatonClient, Sampling

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
DASHBOARD = REPOSITORY / "deploy/grafana/dashboards/baton.json"
CONFIG = REPOSITORY / "deploy/prometheus/prometheus.yml"
INTERVAL_S = 1
VARIABLES = {"model_name": "oracle", "__rate_interval": f"{4 * INTERVAL_S}s"}
# Repeated for each, or chosen by who looks.
CHOICES = {"role": ("prefill", "decode"), "ttft_target": ("2.5",), "itl_target": ("0.2",)}


def queries() -> list[tuple[str, str]]:
    """(title of the panel, query) of all panels, with every variable replaced."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            found += [(panel["title"], query) for query in _replaced(target["expr"], VARIABLES)]
    return found


def _replaced(query: str, values: dict[str, str]) -> Iterator[str]:
    for name, value in values.items():
        query = query.replace(f"${name}", value)
    name = next((name for name in CHOICES if f"${name}" in query), None)
    if name is None:
        assert "$" not in query, query
        yield query
        return
    for value in CHOICES[name]:
        yield from _replaced(query.replace(f"${name}", value), {})


def test_what_grafana_is_given() -> None:
    """Panels do not overlap, no id is used twice, and the provisioned names fit together."""
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    sources = yaml.safe_load(
        (REPOSITORY / "deploy/grafana/provisioning/datasources/baton.yaml").read_text()
    )
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    uid = variables["datasource"]["current"]["value"]
    assert uid in {source["uid"] for source in sources["datasources"]}
    assert set(CHOICES) | {"model_name"} == set(variables) - {"datasource"}
    assert len(queries()) > 50


@asynccontextmanager
async def prometheus(folder: Path, targets: Sequence[str]) -> AsyncIterator[str]:
    """Scrapes these; gives the address that answers queries."""
    assert PROMETHEUS is not None
    config = folder / "prometheus.yml"
    scrape = {"job_name": "baton", "static_configs": [{"targets": list(targets)}]}
    config.write_text(
        json.dumps({"global": {"scrape_interval": f"{INTERVAL_S}s"}, "scrape_configs": [scrape]})
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        *(PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--log.level=warn"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield address
    finally:
        process.terminate()
        await process.wait()


async def evaluate(address: str, query: str) -> list[float]:
    """The values of an instant query; none where nothing was found."""
    url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})

    def fetch() -> dict[str, Any]:
        with urllib.request.urlopen(url, timeout=10) as response:
            return dict(json.load(response))

    answer = await asyncio.to_thread(fetch)
    return [float(series["value"][1]) for series in answer["data"]["result"]]


@pytest.mark.full
@pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's package prometheus")
async def test_every_query_gives_data(tmp_path: Path) -> None:
    async with (
        baton_up(tmp_path, flags=["--local-prefill", "never", "--step-delay-ms", "2"]) as cluster,
        prometheus(tmp_path, [process.admin for process in cluster.processes]) as address,
    ):
        load = asyncio.create_task(_keep_asking(cluster))
        try:
            await until(lambda: _has_scraped(address), timeout_s=30)
            await asyncio.sleep(5 * INTERVAL_S)
            empty = {}
            for title, query in queries():
                values = await evaluate(address, query)
                if all(math.isnan(value) for value in values):
                    empty[title, query] = values
            assert not empty
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)


async def _has_scraped(address: str) -> bool:
    try:
        found = await evaluate(address, "rate(vllm:generation_tokens_total[4s]) > 0")
    except (urllib.error.URLError, ConnectionError):
        return False
    return bool(found)


async def _keep_asking(cluster: Cluster) -> None:
    """One request after the other, every second prompt the same."""
    sampling = Sampling(max_tokens=20, temperature=0.0, seed=0)
    async with BatonClient(cluster.grpc) as client:
        number = 0
        while True:
            number += 1
            await answer_of(client, prompt_of(number % 2 * number, 100), sampling)


@pytest.mark.full
@pytest.mark.skipif(PROMTOOL is None, reason="needs Debian's package prometheus")
async def test_the_shipped_configuration_is_valid() -> None:
    assert PROMTOOL is not None
    process = await asyncio.create_subprocess_exec(
        PROMTOOL, "check", "config", str(CONFIG), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
