"""What test_netns.py runs on the first of two hosts; not a test by itself.

NATS, a gateway and a prefill worker are here, the decode worker is on the other host: jobs and
tickets, every stream and all KV cross the link, which is cut and restored.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.certificates import make_authority, make_tls_files
from support.cluster import REPOSITORY, START_S, Cluster, until
from support.oracle_requests import BLOCK_SIZE, Answer, ask, ask_all, make_cases

from cli.readiness import wait_until_ready
from common.client import BatonClient
from common.nats_server import find_nats_server
from engine.oracle import oracle_layout

ADDRESSES = ("10.91.77.1", "10.91.77.2")
LINK = "baton0"
HERE, THERE = ADDRESSES
NATS = f"""
listen: "{HERE}:4222"
max_payload: 8MB
jetstream {{ store_dir: "%(folder)s", max_mem: 256MB, max_file: 1MB }}
"""
NATS_TLS = """
tls { cert_file: "%(cert)s", key_file: "%(key)s", ca_file: "%(ca)s", verify: true
  handshake_first: true }
"""
LEASE_S = 3.0
WORKER = [
    *("--transport", "tcp", "--num-blocks", "128", "--lease-s", str(LEASE_S)),
    *("--step-delay-ms", "20", "--allow-failpoints"),
]
# Each block takes its time, so that the cut comes while KV is on its way.
SLOW_COPY = ("--failpoints", "decode.copy_block=sleep:0.02")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("hosts")
    folder.chmod(0o700)
    token, token_file = secrets.token_hex(16), folder / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    links, nats_config = _security(folder)
    shared = ["--nats-url", f"nats://{HERE}:4222", "--token-file", str(token_file), *links]
    shared += ["--model", "oracle"]
    insecure = [] if links else ["--insecure-transfer"]
    roles = {
        "prefill": [*shared, "--host", HERE, "--advertise-host", HERE, *WORKER, *insecure],
        "decode": [
            *(*shared, "--host", "0.0.0.0", "--advertise-host", THERE),
            *(*WORKER, *insecure, *SLOW_COPY, "--local-prefill", "never"),
        ],
        "gateway": [*shared, "--host", HERE, "--grpc-port", "0", "--http-port", "0"],
    }
    async with AsyncExitStack() as stack:
        nats = folder / "nats.conf"
        nats.write_text(NATS % {"folder": folder} + nats_config)
        await stack.enter_async_context(_running([find_nats_server(), "-c", str(nats)], folder))
        processes, ready = {}, {}
        for role, flags in roles.items():
            command = [sys.executable, "-m", "cli.main", role, *flags]
            if role == "decode":
                command = ["ip", "netns", "exec", os.environ["NETNS_OTHER_HOST"], *command]
            processes[role] = await stack.enter_async_context(_running(command, folder, role))
            ready[role] = await _ready(processes[role])
        state_file = folder / "state.json"
        state_file.write_text(json.dumps({"processes": list(ready.values())}))
        gateway = ready["gateway"]["grpc"]
        workers = {ready["prefill"]["id"], ready["decode"]["id"]}
        await wait_until_ready(ready["gateway"]["admin"], token, workers)
        yield Cluster(
            process=processes["gateway"],
            grpc=gateway,
            http=ready["gateway"]["http"],
            gateways=[gateway],
            state_file=state_file,
            pool_dir=folder,
            token=token,
            log=folder / "up.log",
        )
        for role in ("gateway", "decode", "prefill"):
            processes[role].terminate()
            async with asyncio.timeout(30):
                assert await processes[role].wait() == 0, role
    for log in folder.glob("*.log"):
        text = log.read_text()
        assert "Traceback" not in text, f"{log.name}: {text[-4000:]}"


def _security(folder: Path) -> tuple[list[str], str]:
    """Flags of every process, and what the configuration of NATS says about it."""
    if os.environ["NETNS_LINK"] != "tls":
        return [], ""
    alt_names = ",".join(f"IP:{address}" for address in (*ADDRESSES, "127.0.0.1"))
    tls = make_tls_files(folder, "run", make_authority(folder), alt_names)
    files = {"cert": tls.cert, "key": tls.key, "ca": tls.ca}
    return [f"--tls-{name}-file={path}" for name, path in files.items()], NATS_TLS % files


@asynccontextmanager
async def _running(
    command: Sequence[str], folder: Path, name: str = "nats"
) -> AsyncIterator[asyncio.subprocess.Process]:
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=REPOSITORY
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        line = await process.stdout.readline()
    assert line, "it did not start"
    ready: dict[str, Any] = json.loads(line)
    del ready["ready"]
    return ready


def _interface_bytes() -> int:
    """Received and sent by this host's end of the link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == LINK:
            fields = counts.split()
            return int(fields[0]) + int(fields[8])
    raise AssertionError("this host has no link")


@contextmanager
def _link_down() -> Iterator[None]:
    subprocess.run(["ip", "link", "set", LINK, "down"], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", LINK, "up"], check=True, timeout=10)


async def test_kv_crosses_the_link(cluster: Cluster) -> None:
    cases = make_cases(1, 12, prompt_tokens=(1, 200), max_tokens=(2, 20))
    num_blocks = sum(case.num_prompt_blocks for case in cases)
    num_bytes = num_blocks * oracle_layout(BLOCK_SIZE).block_bytes
    before = _interface_bytes()
    async with BatonClient(cluster.grpc) as client:
        for answer in await ask_all(client, cases):
            answer.assert_right()
            assert answer.attempts == 1
    (decode,) = cluster.of_role("decode")
    imports = (await cluster.debug(decode, "statistics"))["imports"]
    assert imports["num_bytes"] == {"tcp": num_bytes}
    assert _interface_bytes() - before > num_bytes
    await cluster.until_clean()


@pytest.mark.parametrize("phase", ["fetch", "decode"])
@pytest.mark.parametrize("cut_s", [1.5, 5.0])
async def test_the_link_is_cut_and_restored(cluster: Cluster, phase: str, cut_s: float) -> None:
    """The answers are right however long it takes; what cannot be reached is not waited for, and
    in the end nobody holds anything."""
    num_tokens = 0 if phase == "fetch" else 20
    cases = make_cases(int(cut_s * 10), 4, prompt_tokens=(500, 600), max_tokens=(120, 150))
    (decode,) = cluster.of_role("decode")
    begun: list[Answer] = []

    def is_begun(answer: Answer) -> None:
        if len(answer.token_ids) > num_tokens and answer not in begun:
            begun.append(answer)

    async def is_time() -> bool:
        if phase == "fetch":
            return bool((await cluster.debug(decode, "statistics"))["imports"]["fetching"])
        return len(begun) == len(cases)

    async with BatonClient(cluster.grpc) as client:
        asking = [asyncio.create_task(ask(client, case, is_begun)) for case in cases]
        await until(is_time, 20.0)
        with _link_down():
            await asyncio.sleep(cut_s)
        answers = await asyncio.gather(*asking)
    for answer in answers:
        answer.assert_right()
    print(phase, cut_s, [(a.attempts, round(a.longest_pause_s, 1)) for a in answers])
    await cluster.until_clean(LEASE_S + 10.0)
