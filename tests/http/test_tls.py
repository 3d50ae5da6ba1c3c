"""TLS and mutual TLS on both public ports, CORS, and which ports are open to whom."""

import ssl
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc import aio
from support.certificates import make_authority, make_tls_files
from support.cluster import Cluster, baton_up

from common.config import GatewaySettings, load
from common.errors import ConfigError
from common.tls import TlsFiles
from common.wire import inference, inference_grpc

FLAGS = ["--num-blocks", "64"]
BODY = {"prompt": [1, 2, 3], "max_tokens": 2}


async def ask_http(cluster: Cluster, tls: TlsFiles | None, client: TlsFiles | None = None) -> int:
    """Status of a completion, over TLS where an authority is given."""
    verify: ssl.SSLContext | bool = False
    if tls is not None:
        verify = ssl.create_default_context(cafile=str(tls.ca))
        if client is not None:
            verify.load_cert_chain(client.cert, client.key)
    scheme = "http" if tls is None else "https"
    async with httpx2.AsyncClient(verify=verify, trust_env=False, timeout=20) as http:
        response = await http.post(f"{scheme}://{cluster.http}/v1/completions", json=BODY)
    return int(response.status_code)


async def ask_grpc(cluster: Cluster, tls: TlsFiles, client: TlsFiles | None = None) -> int:
    """How many tokens came."""
    key, cert = (client.key.read_bytes(), client.cert.read_bytes()) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes(), key, cert)
    request = inference.GenerateRequest(token_ids=inference.TokenIds(ids=[1, 2, 3]))
    request.sampling.max_tokens = 2
    async with aio.secure_channel(cluster.grpc, credentials) as channel:
        call = inference_grpc.InferenceServiceStub(channel).Generate(request, timeout=5)
        return sum([len(response.chunk.token_ids) async for response in call])


def public(tls: TlsFiles) -> list[str]:
    return ["--public-tls-cert-file", str(tls.cert), "--public-tls-key-file", str(tls.key)]


async def test_tls(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path, "public", make_authority(tmp_path))
    async with baton_up(tmp_path, flags=[*FLAGS, *public(tls)]) as cluster:
        assert await ask_http(cluster, tls) == 200
        assert await ask_grpc(cluster, tls) == 2
        with pytest.raises(httpx2.TransportError):
            await ask_http(cluster, None)
        with pytest.raises(grpc.RpcError):
            await ask_grpc(cluster, make_tls_files(tmp_path, "x", make_authority(tmp_path, "y")))


@pytest.mark.full
async def test_mutual_tls(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path, "public", make_authority(tmp_path))
    of_clients = make_authority(tmp_path, "clients")
    client = make_tls_files(tmp_path, "client", of_clients)
    flags = [*FLAGS, *public(tls), "--public-tls-client-ca-file", str(of_clients[0])]
    async with baton_up(tmp_path, flags=flags) as cluster:
        assert await ask_http(cluster, tls, client) == 200
        assert await ask_grpc(cluster, tls, client) == 2
        for stranger in (None, tls):
            with pytest.raises(httpx2.TransportError):
                await ask_http(cluster, tls, stranger)
            with pytest.raises(grpc.RpcError):
                await ask_grpc(cluster, tls, stranger)


@pytest.mark.full
async def test_no_pages_of_others_unless_named(tmp_path: Path) -> None:
    origin, other = "https://app.example", "https://other.example"
    flags = [*FLAGS, "--cors-origin", origin]
    preflight = {"access-control-request-method": "POST"}
    async with (
        baton_up(tmp_path, flags=flags) as cluster,
        httpx2.AsyncClient(base_url=f"http://{cluster.http}", trust_env=False) as http,
    ):
        for asked, allowed in ((origin, origin), (other, None)):
            headers = {"origin": asked}
            response = await http.options("/v1/completions", headers=headers | preflight)
            assert response.headers.get("access-control-allow-origin") == allowed
            response = await http.get("/v1/models", headers=headers)
            assert response.headers.get("access-control-allow-origin") == allowed


async def test_no_pages_of_others_by_default(oracle: Cluster) -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with httpx2.AsyncClient(base_url=f"http://{oracle.http}", trust_env=False) as http:
        for response in (
            await http.options("/v1/completions", headers=headers),
            await http.get("/v1/models", headers=headers),
        ):
            assert "access-control-allow-origin" not in response.headers


def test_files_come_together(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path, "public", make_authority(tmp_path))
    for given in (
        {"public_tls_cert_file": str(tls.cert)},
        {"public_tls_key_file": str(tls.key)},
        {"public_tls_client_ca_file": str(tls.ca)},
    ):
        with pytest.raises(ConfigError, match="public_tls_key_file"):
            load(GatewaySettings, given)
    tls.key.chmod(0o644)
    files = load(
        GatewaySettings,
        {"public_tls_cert_file": str(tls.cert), "public_tls_key_file": str(tls.key)},
    ).public_tls
    assert files is not None
    with pytest.raises(ConfigError, match="readable by others"):
        files.server_context()
