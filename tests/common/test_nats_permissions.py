"""What each role may publish and subscribe to, asked of a real nats-server."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import nats
import nats.errors
import pytest

from common.bus import Message
from common.nats_bus import NatsBus
from common.nats_permissions import ROLES, inbox_prefix
from common.nats_server import NatsServer, find_nats_server

# All that is ever said, and some that never should be.
SUBJECTS = (
    "baton.prefill.any",
    "baton.prefill.w.p1",
    "baton.prefill.w.p1.cancel",
    "baton.gw.g1.accept",
    "baton.gw.g1.ticket",
    "baton.worker.w1",
    "baton.discover",
    "baton.kv.w1",
    "baton.kv.w1.snapshot",
    "baton.else",
    "anything",
    "_INBOX_gateway.g1.x",
    "_INBOX_prefill.p1.x",
    "_INBOX_decode.d1.x",
    "_INBOX.x",
    "$JS.API.INFO",
    "$JS.API.STREAM.CREATE.BATON_PREFILL",
    "$JS.API.STREAM.CREATE.OTHER",
    "$JS.API.STREAM.DELETE.BATON_PREFILL",
    "$JS.API.STREAM.PURGE.BATON_PREFILL",
    "$JS.API.STREAM.MSG.GET.BATON_PREFILL",
    "$JS.API.CONSUMER.DURABLE.CREATE.BATON_PREFILL.any",
    "$JS.API.CONSUMER.DELETE.BATON_PREFILL.any",
    "$JS.API.CONSUMER.MSG.NEXT.BATON_PREFILL.any",
    "$JS.API.CONSUMER.MSG.NEXT.BATON_PREFILL.other",
    "$JS.ACK.BATON_PREFILL.any.1.1.1.1.0",
    "$SYS.REQ.SERVER.PING",
)
WILDCARDS = (
    ">",
    "*",
    "baton.>",
    "baton.*.*",
    "baton.prefill.>",
    "baton.gw.>",
    "_INBOX_prefill.*.*",
)
MAY_PUBLISH = {
    "gateway": {
        "baton.prefill.any",
        "baton.prefill.w.p1",
        "baton.prefill.w.p1.cancel",
        "baton.discover",
        "baton.kv.w1.snapshot",
        "$JS.API.STREAM.CREATE.BATON_PREFILL",
        "$JS.API.CONSUMER.DURABLE.CREATE.BATON_PREFILL.any",
    },
    "prefill": {
        "baton.gw.g1.accept",
        "baton.gw.g1.ticket",
        "baton.worker.w1",
        "baton.kv.w1",
        "$JS.API.CONSUMER.MSG.NEXT.BATON_PREFILL.any",
        "$JS.ACK.BATON_PREFILL.any.1.1.1.1.0",
    },
    "decode": {"baton.worker.w1", "baton.kv.w1"},
}
MAY_SUBSCRIBE = {
    "gateway": {
        "baton.worker.w1",
        "baton.gw.g1.accept",
        "baton.gw.g1.ticket",
        "baton.kv.w1",
        "_INBOX_gateway.g1.x",
    },
    "prefill": {
        "baton.prefill.w.p1",
        "baton.prefill.w.p1.cancel",
        "baton.discover",
        "baton.kv.w1.snapshot",
        "_INBOX_prefill.p1.x",
        "_INBOX_prefill.*.*",
    },
    "decode": {"baton.discover", "baton.kv.w1.snapshot"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats") / "run") as running:
        yield running


@asynccontextmanager
async def raw_client(server: NatsServer, role: str) -> AsyncIterator[tuple[nats.NATS, list[str]]]:
    """nats-py itself, and what the server has refused it."""
    refused: list[str] = []

    async def keep(error: Exception) -> None:
        refused.append(str(error))

    credentials = json.loads(server.credentials_file(role).read_text())
    client = await nats.connect(
        server.url,
        user=credentials["user"],
        password=credentials["password"],
        error_cb=keep,
        allow_reconnect=False,
    )
    try:
        yield client, refused
    finally:
        await client.close()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.fault("V3")
async def test_what_a_role_may_publish(server: NatsServer, role: str) -> None:
    async with raw_client(server, role) as (client, refused):
        for subject in SUBJECTS:
            await client.publish(subject, b"")
        await _settled(client)
        assert _subjects("publish", refused) == _lower(set(SUBJECTS) - MAY_PUBLISH[role])


@pytest.mark.parametrize("role", ROLES)
async def test_what_a_role_may_subscribe_to(server: NatsServer, role: str) -> None:
    asked = (*SUBJECTS, *WILDCARDS)
    async with raw_client(server, role) as (client, refused):
        for subject in asked:
            await client.subscribe(subject)
        await _settled(client)
        assert _subjects("subscription", refused) == _lower(set(asked) - MAY_SUBSCRIBE[role])


async def _settled(client: nats.NATS) -> None:
    """All that was sent is answered. A first flush may take the answer to an earlier ping for its
    own."""
    await client.flush()
    await client.flush()


def _lower(subjects: set[str]) -> set[str]:
    """As nats-py repeats them in its errors."""
    return {subject.lower() for subject in subjects}


def _subjects(what: str, refused: list[str]) -> set[str]:
    pattern = re.compile(rf'permissions violation for {what} to "(.*?)"')
    return {match.group(1) for text in refused if (match := pattern.search(text))}


async def test_all_that_the_roles_say_to_each_other(server: NatsServer) -> None:
    """Jobs, accepts, tickets, reports, cache events, answers: through NatsBus and its inboxes."""
    buses = {
        role: await NatsBus.connect(server.url, server.credentials_file(role), f"{role}-1")
        for role in ROLES
    }
    gateway, prefill, decode = buses["gateway"], buses["prefill"], buses["decode"]
    heard: list[tuple[str, bytes]] = []
    all_heard = asyncio.Event()

    async def answer(message: Message) -> None:
        heard.append((message.subject, message.data))
        if len(heard) == 10:
            all_heard.set()
        await message.reply(b"answer")

    for subject in ("baton.worker.*", "baton.kv.*", "baton.gw.g.accept", "baton.gw.g.ticket"):
        await gateway.subscribe(subject, answer)
    for subject in ("baton.prefill.w.p", "baton.prefill.w.p.cancel", "baton.discover"):
        await prefill.subscribe(subject, answer)
    await decode.subscribe("baton.discover", answer)
    await decode.subscribe("baton.kv.d.snapshot", answer)

    await gateway.ensure_job_queue(60)
    await gateway.publish_job(b"job", "r:1")
    job = await prefill.fetch_job(2)
    assert job is not None and job.data == b"job"
    await job.nak()
    job = await prefill.fetch_job(2)
    assert job is not None and job.num_delivered == 2
    await job.ack()
    for bus, subject in (
        (prefill, "baton.gw.g.accept"),
        (prefill, "baton.gw.g.ticket"),
        (gateway, "baton.prefill.w.p"),
        (gateway, "baton.kv.d.snapshot"),
    ):
        assert await bus.request(subject, b"?", 1.0) == b"answer"
    await gateway.publish("baton.prefill.w.p.cancel", b"")
    await gateway.publish("baton.discover", b"")
    await decode.publish("baton.worker.d", b"d")
    await decode.publish("baton.kv.d", b"d")
    await prefill.publish("baton.worker.p", b"p")
    async with asyncio.timeout(5):
        await all_heard.wait()
    assert not any(bus.statistics() for bus in buses.values())
    for bus in buses.values():
        await bus.close()


async def test_nobody_gets_in_without_credentials(server: NatsServer) -> None:
    for user, password in ((None, None), ("gateway", "wrong"), ("decode", ""), ("admin", "admin")):
        client = nats.NATS()
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await client.connect(
                server.url, user=user, password=password, allow_reconnect=False, error_cb=_ignore
            )
        await client.close()


async def _ignore(error: Exception) -> None: ...


def test_inboxes_differ_by_role() -> None:
    assert len({inbox_prefix(role, "x").partition(".")[0] for role in ROLES}) == len(ROLES)


@pytest.mark.fault("V25")
def test_the_server_is_one_with_the_published_fixes() -> None:
    """nats-io/advisories of 2026-06-29."""
    text = subprocess.run([find_nats_server(), "-v"], check=True, capture_output=True, text=True)
    version = tuple(map(int, text.stdout.strip().rpartition("v")[2].split(".")[:3]))
    assert version >= (2, 14, 3) or (2, 12, 12) <= version < (2, 13)


@pytest.mark.fault("V25")
def test_the_configuration_opens_nothing_else(server: NatsServer) -> None:
    config = server.credentials_file("gateway").with_name("nats-server.conf").read_text()
    for service in (
        "websocket", "mqtt", "leafnodes", "leaf", "gateway {", "cluster", "http", "monitor",
        "no_auth_user", "system_account", "0.0.0.0", "profile",
    ):  # fmt: skip
        assert service not in config
    assert 'listen: "127.0.0.1:' in config
