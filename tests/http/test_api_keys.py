"""API keys: the file, and what is told to whom who has which, over HTTP and gRPC alike."""

import asyncio
from pathlib import Path

import grpc
import pytest
from support.cluster import Cluster, baton_up
from support.openai_http import COMPLETIONS, http_client

from common.errors import ConfigError, Unauthenticated
from common.rpc import make_public_channel
from common.wire import inference, inference_grpc
from gateway.api_keys import ApiKeys, TenantLimits, load_api_keys

ALICE, BOB, CAROL = "sk-alice-0123456789", "sk-bob-0123456789", "sk-carol-0123456789"
KEYS = f"""
- key: {ALICE}
  tenant: research
  max_concurrent_requests: 2
- key: {BOB}
  tenant: research
  max_concurrent_requests: 2
- {{"key": "{CAROL}"}}
"""


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_tenants_and_limits(tmp_path: Path) -> None:
    keys = load_api_keys(write(tmp_path / "keys", KEYS))
    assert keys.tenant(f"Bearer {ALICE}") == keys.tenant(f"bearer {BOB}") == "research"
    carol = keys.tenant(f"Bearer {CAROL}")
    assert carol.startswith("key-") and CAROL not in carol
    assert keys.limits == {"research": TenantLimits(2, None), carol: TenantLimits()}
    for given in (
        "",
        ALICE,
        f"Basic {ALICE}",
        "Bearer ",
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
    ):
        with pytest.raises(Unauthenticated):
            keys.tenant(given)


def test_plain_lines_are_keys_of_tenants_of_their_own(tmp_path: Path) -> None:
    keys = load_api_keys(write(tmp_path / "keys", f"{ALICE}\n{BOB}\n"))
    assert keys.tenant(f"Bearer {ALICE}") != keys.tenant(f"Bearer {BOB}")


def test_without_a_file_everybody_may_ask() -> None:
    keys = load_api_keys(None)
    assert not keys.required and keys.tenant("") == keys.tenant("Bearer whatever") == ""
    assert isinstance(keys, ApiKeys)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (KEYS, 0o644, "chmod 600"),
        ("", 0o600, "empty"),
        ("- key: short", 0o600, "0.key"),
        ("- key: [1]", 0o600, "0.key"),
        (f"- key: {ALICE}\n  tenat: x", 0o600, "0.tenat"),
        (f"- key: {ALICE}\n- key: {ALICE}", 0o600, "twice"),
        (f"- key: {ALICE}\n  max_concurrent_requests: 0", 0o600, "max_concurrent_requests"),
        (f"{KEYS}\n- key: {CAROL}x\n  tenant: research", 0o600, "two different limits"),
        ("a: b: c", 0o600, "YAML"),
        ("[]", 0o600, "at least 1"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, mode: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        load_api_keys(write(tmp_path / "keys", text, mode))
    assert error.value.setting == "api_key_file"
    assert ALICE not in error.value.message and "short" not in error.value.message


@pytest.mark.fault("V14", "V20")
async def test_a_cluster_with_keys(tmp_path: Path) -> None:
    key_file = write(tmp_path / "keys", KEYS)
    flags = ["--num-blocks", "64", "--step-delay-ms", "5", "--api-key-file", str(key_file)]
    async with baton_up(tmp_path, flags=flags) as cluster:
        await _http(cluster)
        await _grpc(cluster)
        await _prefixes_are_apart(cluster)
        await _limits(cluster)
        await cluster.until_clean()
        assert not any(_shows_a_key(Path(f"/proc/{p.pid}/cmdline")) for p in cluster.processes)
    assert not any(_shows_a_key(log) for log in _logs(tmp_path))


def _logs(folder: Path) -> list[Path]:
    found = list(folder.glob("*.log"))
    assert found
    return found


def _shows_a_key(path: Path) -> bool:
    text = path.read_text()
    return any(key in text for key in (ALICE, BOB, CAROL))


async def _http(cluster: Cluster) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    async with http_client(cluster.http) as client:
        for headers in ({}, bearer("sk-nobody-0123456789"), {"authorization": ALICE}):
            for method, path in (
                ("POST", COMPLETIONS), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
                ("POST", "/tokenize"), ("GET", "/metrics"), ("GET", "/nothing"),
            ):  # fmt: skip
                response = await client.request(method, path, json=body, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["type"] == "AuthenticationError"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/ping", "/version"):
            assert (await client.get(path)).status_code == 200
        for key in (ALICE, BOB, CAROL):
            response = await client.post(COMPLETIONS, json=body, headers=bearer(key))
            assert response.status_code == 200, response.text


async def _grpc(cluster: Cluster) -> None:
    request = inference.GenerateRequest(token_ids=inference.TokenIds(ids=[1, 2, 3]))
    request.sampling.max_tokens = 2
    async with make_public_channel(cluster.grpc) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        for metadata in ((), (("authorization", "Bearer sk-nobody-0123456789"),)):
            for call in (
                stub.GetModelInfo(inference.GetModelInfoRequest(), metadata=metadata),
                stub.ListWorkers(inference.ListWorkersRequest(), metadata=metadata),
                stub.Generate(request, metadata=metadata).read(),
            ):
                with pytest.raises(grpc.RpcError) as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {ALICE}"),)
        async for response in stub.Generate(request, metadata=metadata):
            assert response is not None
        await stub.ListWorkers(inference.ListWorkersRequest(), metadata=metadata)


async def _prefixes_are_apart(cluster: Cluster) -> None:
    """Keys of one tenant share cached prefixes, those of two do not."""
    body = {"prompt": list(range(1, 100)), "max_tokens": 1}
    cached = {}
    async with http_client(cluster.http) as client:
        for key in (ALICE, BOB, CAROL):
            response = await client.post(COMPLETIONS, json=body, headers=bearer(key))
            cached[key] = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached[ALICE] == 0 and cached[BOB] > 0 and cached[CAROL] == 0


async def _limits(cluster: Cluster) -> None:
    """Two at a time for both keys of a tenant together; others do not notice."""
    body = {"prompt": [1, 2, 3], "max_tokens": 60}

    async def ask(key: str) -> int:
        response = await client.post(COMPLETIONS, json=body, headers=bearer(key))
        if response.status_code == 429:
            assert float(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "RateLimitError"
        return int(response.status_code)

    async with http_client(cluster.http) as client:
        of_research = [ask(key) for key in (ALICE, BOB) for _ in range(3)]
        found = await asyncio.gather(*of_research, *(ask(CAROL) for _ in range(5)))
    assert sorted(found[:6]) == [200, 200, 429, 429, 429, 429]
    assert found[6:] == [200] * 5
