"""The files in which people run Baton: valid, and saying what the code says.

Part of `make check`; a tool that is not installed is not asked.
"""

import importlib.resources
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from common.config import DecodeSettings, GatewaySettings, PrefillSettings, load
from common.nats_permissions import ROLES

REPOSITORY = Path(__file__).resolve().parents[2]
KUBERNETES = REPOSITORY / "deploy/kubernetes"
COMPOSE = (
    ("compose.yaml",),
    ("compose.yaml", "compose.gpu.yaml"),
    ("compose.yaml", "deploy/compose.offline.yaml"),
)
KINDS = {"gateway": GatewaySettings, "prefill": PrefillSettings, "decode": DecodeSettings}
_KUBERNETES_VERSION = "1.37"


# ---------------------------------------------------------------- compose


def compose_file(name: str) -> dict[str, Any]:
    """With all variables at their defaults."""
    text = (REPOSITORY / name).read_text()
    content = yaml.safe_load(re.sub(r"\$\{\w+(?::-([^}]*))?\}", r"\1", text))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("name", sorted({name for names in COMPOSE for name in names}))
def test_the_compose_specification_accepts(name: str) -> None:
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor"
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.validate(compose_file(name), schema)


@pytest.mark.parametrize("command", [("docker", "compose"), ("docker-compose",)])
@pytest.mark.parametrize("names", COMPOSE, ids=" ".join)
def test_compose_itself_accepts(names: tuple[str, ...], command: tuple[str, ...]) -> None:
    if (
        not shutil.which(command[0])
        or subprocess.run([*command, "version"], capture_output=True).returncode
    ):
        pytest.skip(f"there is no {' '.join(command)}")
    files = [part for name in names for part in ("-f", name)]
    done = subprocess.run(
        [*command, *files, "config", "-q"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_what_compose_publishes() -> None:
    """Nothing but the gateway and the pages, and only on loopback."""
    services = compose_file("compose.yaml")["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"gateway", "jaeger", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert services["grafana"]["profiles"] == ["observability"]
    assert compose_file("compose.yaml")["networks"]["backplane"] == {"internal": True}


@pytest.mark.parametrize("role", KINDS)
def test_compose_gives_settings_that_there_are(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose_file("compose.yaml")["services"][role]
    for name, value in service["environment"].items():
        if value is not None:
            monkeypatch.setenv(name, str(value))
    settings = load(KINDS[role], {}, REPOSITORY / "deploy/settings.yaml")
    assert settings.admin_port == 9400
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.model_dump()["drain_budget_s"] + 5
    assert {"init", "read_only", "cap_drop", "mem_limit", "cpus"} <= set(service)


# ---------------------------------------------------------------- Kubernetes


def documents(*paths: Path) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from yaml.safe_load_all(path.read_text())


def resources_of(folder: Path) -> list[Path]:
    """The files that a kustomization names, those of its bases included."""
    names: list[str] = yaml.safe_load((folder / "kustomization.yaml").read_text()).get(
        "resources", []
    )
    found = []
    for path in (folder / name for name in names):
        found += resources_of(path) if path.is_dir() else [path]
    return found


BASE = list(documents(*resources_of(KUBERNETES / "base")))
DEPLOYMENTS = {d["metadata"]["name"]: d for d in BASE if d["kind"] == "Deployment"}


@pytest.mark.parametrize("document", BASE, ids=lambda d: f"{d['kind']} {d['metadata']['name']}")
def test_kubernetes_accepts(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, _KUBERNETES_VERSION, strict=True)


def test_kubernetes_accepts_what_the_gpu_overlay_makes() -> None:
    overlay = yaml.safe_load((KUBERNETES / "overlays/gpu/kustomization.yaml").read_text())
    for patch in overlay["patches"]:
        operations = yaml.safe_load((KUBERNETES / "overlays/gpu" / patch["path"]).read_text())
        for name in patch["target"]["name"].split("|"):
            for operation in operations:
                apply(DEPLOYMENTS[name], operation)
    for name in ("prefill", "decode"):
        kubernetes_validate.validate(DEPLOYMENTS[name], _KUBERNETES_VERSION, strict=True)
        pod = DEPLOYMENTS[name]["spec"]["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        claims = [v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
        assert claims == ["model"]


def apply(document: Any, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch (RFC 6902); replaces only what is there."""
    *parents, last = operation["path"].strip("/").split("/")
    for part in parents:
        document = document[int(part) if isinstance(document, list) else part]
    key = int(last) if isinstance(document, list) else last
    if operation["op"] == "replace":
        assert document[key] is not None
    document[key] = operation["value"]


def test_what_the_manifests_name_is_there() -> None:
    """Secrets are those that `baton credentials` and its kustomization make, probes ask for
    services that there are, settings exist, and a drain ends before its grace does."""
    generated = yaml.safe_load((KUBERNETES / "secrets/kustomization.yaml").read_text())
    secrets = {secret["name"]: secret["files"] for secret in generated["secretGenerator"]}
    assert set(secrets) == {"nats", *ROLES}
    services = {
        "gateway": "InferenceService",
        "prefill": "KVTransferService",
        "decode": "DecodeService",
    }
    for name, service in services.items():
        pod = DEPLOYMENTS[name]["spec"]["template"]["spec"]
        container = pod["containers"][0]
        assert container["readinessProbe"]["grpc"]["service"] == f"baton.v1.{service}"
        assert [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v] == [name]
        assert f"{name}/token" in secrets[name] and f"{name}/nats.json" in secrets[name]
        settings = load(KINDS[name], {}, KUBERNETES / "base/settings.yaml").model_dump()
        assert pod["terminationGracePeriodSeconds"] > settings["drain_budget_s"] + 10
    for name in ("gateway", "prefill", "decode"):
        assert any(
            d["kind"] == "PodDisruptionBudget" and d["metadata"]["name"] == name for d in BASE
        )


def test_pools_are_scaled_by_metrics_that_there_are() -> None:
    documented = (REPOSITORY / "docs/metrics.md").read_text()
    objects = list(documents(KUBERNETES / "components/keda/scaled-objects.yaml"))
    assert {o["spec"]["scaleTargetRef"]["name"] for o in objects} == {"prefill", "decode"}
    queries = [t["metadata"]["query"] for o in objects for t in o["spec"]["triggers"]]
    for query in queries:
        name = re.search(r"\((baton_\w+|vllm:\w+)", query)
        assert name is not None and name[1] in documented, query
    assert 'baton_queue_tokens{pool="prefill"}' in queries[0]
