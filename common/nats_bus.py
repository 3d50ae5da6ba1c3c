"""The bus over a real nats-server: see common/bus.py for the contract.

What nats-py does by default and must not do here: give up after 60 reconnects, or at once when the
server says -ERR; leak a socket with each attempt that fails; run the callbacks of a subscription
one after the other; print its errors; hang in drain() while it reconnects; and leave a pull request
behind on the server when a fetch is cancelled (the next job would then go to a dead inbox until
its ack_wait is over). Therefore:

- a task here keeps the link: a client that is lost, however, is replaced by a new one with the same
  subscriptions, then the reconnect callbacks run;
- each message's handler runs in a task of its own, owned here, at most `_MAX_HANDLERS` at a time a
  subscription;
- a fetch runs in a task of its own that nobody cancels: a caller that goes away leaves it to the
  next caller, and close() waits for it and gives a late job back;
- a server that is frozen counts as lost after about 3 s (pings), and every call ends within 2 s.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Self

import nats
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from common.bus import (
    JOB_CONSUMER,
    JOB_STREAM,
    JOB_SUBJECT,
    BusError,
    BusTimeout,
    Handler,
    Job,
    Message,
)
from common.nats_calls import CALL_S, headers_of, mapped, need_size, read_credentials
from common.nats_client import NatsClient, dispose, flush, reason, within
from common.nats_permissions import inbox_prefix
from common.tls import TlsFiles

log = logging.getLogger(__name__)

# Jobs in the queue are those published and not yet accepted: a few a worker.
MAX_QUEUED_JOBS = 1024
_ACK_WAIT_S = 2.0
_FETCH_ROUND_S = 1.0
_RETRY_S = 0.05
_MAX_HANDLERS = 256
_PENDING_BYTES = 8 << 20
_RECONNECT_S = (0.2, 0.5)
_WATCH_S = 0.2
# For so long a queue that was seen whole is taken to be so. A stream whose consumer was lost or
# never made takes jobs that nobody can fetch, and no error says so.
_QUEUE_IS_KNOWN_S = 10.0
_STREAM_DIFFERS = 10058


class NatsBus:
    """One connection. Make it with `connect`; `close` it on the same loop."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._client = NatsClient()
        self._stream: JetStreamContext = self._client.jetstream()
        self._subscriptions: list[tuple[str, Callable[[Msg], Awaitable[None]]]] = []
        self._connected_since: float | None = None
        self._link_up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._puller: JetStreamContext.PullSubscription | None = None
        self._fetching: asyncio.Task[Msg | None] | None = None
        self._max_age_s: float | None = None
        self._queue_known_until_s = 0.0
        self._errors: Counter[str] = Counter()

    @classmethod
    async def connect(
        cls,
        url: str,
        credentials_file: Path | None,
        instance_id: str,
        tls: TlsFiles | None = None,
    ) -> Self:
        """Waits until a server is there. ``instance_id`` names the connection and its inboxes.
        With ``tls`` the handshake comes first (``handshake_first`` at the server): else whoever
        stands in between could say that none is wanted, and be told the password. Raises
        ConfigError for files that cannot be used."""
        user, password = read_credentials(credentials_file)
        bus = cls(
            {
                "servers": url,
                "name": instance_id,
                "user": user,
                "password": password,
                "tls": tls.client_context() if tls is not None else None,
                "tls_handshake_first": tls is not None,
                "inbox_prefix": inbox_prefix(user or "anyone", instance_id),
                "allow_reconnect": False,
                "connect_timeout": 2,
                "ping_interval": 1,
                "max_outstanding_pings": 2,
                "pending_size": _PENDING_BYTES,
            }
        )
        await bus._open()
        bus._keeper = asyncio.create_task(bus._keep_link(), name="NATS link")
        return bus

    @property
    def connected(self) -> bool:
        return self._connected_since is not None and bool(self._client.is_connected)

    @property
    def connected_for_s(self) -> float:
        if self._connected_since is None or not self.connected:
            return 0.0
        return asyncio.get_running_loop().time() - self._connected_since

    def statistics(self) -> dict[str, int]:
        """Number of the client's errors by type, since the start."""
        return dict(self._errors)

    # ------------------------------------------------------------ core messages

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self._need_link()
        need_size(data, headers)
        await mapped(self._client.publish(subject, data, headers=headers_of(headers)))

    async def request(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        self._need_link()
        need_size(data, headers)
        request = self._client.request(
            subject, data, timeout=timeout_s, headers=headers_of(headers)
        )
        answer: Msg = await mapped(request, timeout_s)
        return bytes(answer.data)

    async def subscribe(self, subject: str, handler: Handler) -> None:
        room = asyncio.Semaphore(_MAX_HANDLERS)

        async def handle(msg: Msg) -> None:
            try:
                await handler(self._message(msg))
            finally:
                room.release()

        async def receive(msg: Msg) -> None:
            await room.acquire()
            self._spawn(handle(msg), f"handler of {subject}")

        self._subscriptions.append((subject, receive))
        if self.connected:  # else the next client subscribes it
            try:
                await mapped(self._client.subscribe(subject, cb=receive))
                await mapped(flush(self._client))
            except BusError as error:
                # The link broke or stands still: it will be there with the next client, or once
                # the server has read what was sent to it.
                log.warning("subscription of %s is not confirmed: %s", subject, error)

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._reconnect_callbacks.append(callback)

    def _message(self, msg: Msg) -> Message:
        async def reply(data: bytes) -> None:
            # Whoever waits for it asks again: an answer that cannot go out is dropped.
            if msg.reply and self.connected:
                await self.publish(msg.reply, data)

        return Message(msg.subject, msg.data, msg.headers or {}, reply)

    # ------------------------------------------------------------ the job queue

    async def ensure_job_queue(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._need_link()
        await mapped(self._ensure_job_queue(max_age_s))

    async def publish_job(
        self, data: bytes, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._need_link()
        wanted = {**(headers or {}), api.Header.MSG_ID.value: message_id}
        need_size(data, wanted)
        await mapped(self._publish_job(data, wanted))

    async def fetch_job(self, timeout_s: float) -> Job | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self._closing and (left := deadline - loop.time()) > 0:
            if self._fetching is None:
                round_s = min(max(left, _RETRY_S), _FETCH_ROUND_S)
                self._fetching = asyncio.create_task(self._fetch(round_s))
            # Not awaited itself: when our caller is cancelled, the fetch goes on.
            await asyncio.wait({self._fetching})
            if self._fetching is None or not self._fetching.done():
                continue
            msg = self._fetching.result()
            self._fetching = None
            if msg is not None:
                return self._job(msg)
        return None

    async def _ensure_job_queue(self, max_age_s: float) -> None:
        """Goes on to its end, or the end of its time, without a caller that leaves: it would
        otherwise be cut in two, between the stream and its consumer."""
        task = asyncio.create_task(self._create_job_queue(max_age_s), name="job queue")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Where the caller has left, an error is nobody's.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _create_job_queue(self, max_age_s: float) -> None:
        self._queue_known_until_s = 0.0
        stream = api.StreamConfig(
            name=JOB_STREAM,
            subjects=[JOB_SUBJECT],
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.MEMORY,
            discard=api.DiscardPolicy.NEW,
            max_age=max_age_s,
            max_msgs=MAX_QUEUED_JOBS,
            duplicate_window=min(max_age_s, 120.0),
        )
        consumer = api.ConsumerConfig(
            durable_name=JOB_CONSUMER,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=_ACK_WAIT_S,
        )
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CALL_S):
            while True:
                try:
                    await self._create_stream(stream)
                    await self._stream.add_consumer(JOB_STREAM, consumer)
                    self._queue_known_until_s = loop.time() + _QUEUE_IS_KNOWN_S
                    return
                except (nats.js.errors.ServiceUnavailableError, nats.errors.NoRespondersError):
                    # JetStream of a server that has just started.
                    await asyncio.sleep(_RETRY_S)

    async def _create_stream(self, config: api.StreamConfig) -> None:
        try:
            await self._stream.add_stream(config)
        except nats.js.errors.BadRequestError as error:
            # Another gateway made it with another max_age: either will do.
            if error.err_code != _STREAM_DIFFERS:
                raise

    async def _publish_job(self, data: bytes, headers: dict[str, str]) -> None:
        known = asyncio.get_running_loop().time() < self._queue_known_until_s
        if self._max_age_s is not None and not known:
            await self._ensure_job_queue(self._max_age_s)
        try:
            await self._stream.publish(JOB_SUBJECT, data, timeout=CALL_S, headers=headers)
        except nats.js.errors.NoStreamResponseError:
            # The server has lost its memory and our reconnect callback has not run yet.
            if self._max_age_s is None:
                raise
            await self._ensure_job_queue(self._max_age_s)
            await self._stream.publish(JOB_SUBJECT, data, timeout=CALL_S, headers=headers)

    async def _fetch(self, timeout_s: float) -> Msg | None:
        """One pull request. Takes its time also when it fails, so that callers can loop."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._link_up.wait()
        except TimeoutError:
            return None
        try:
            if self._puller is None:
                self._puller = await self._stream.pull_subscribe_bind(JOB_CONSUMER, JOB_STREAM)
            return (await self._puller.fetch(1, timeout_s))[0]
        except TimeoutError:
            return None
        except nats.errors.Error as error:
            # No stream or consumer yet, or the link has just gone.
            self._errors[type(error).__name__] += 1
            await asyncio.sleep(min(timeout_s, _RETRY_S))
            return None

    def _job(self, msg: Msg) -> Job:
        async def ack() -> None:
            await mapped(msg.ack())

        async def nak() -> None:
            await mapped(msg.nak())

        return Job(msg.data, msg.headers or {}, msg.metadata.num_delivered, ack, nak)

    # ------------------------------------------------------------ the link

    def _need_link(self) -> None:
        if not self.connected:
            raise BusTimeout("the link to NATS is down")

    async def _open(self) -> None:
        """Connects a client and subscribes what was subscribed; tries for ever."""
        told = False
        while True:
            client = NatsClient()
            try:
                await client.connect(**self._options, error_cb=self._on_error)
                await self._subscribe_all(client)
            except (OSError, TimeoutError, nats.errors.Error) as error:
                if not told:
                    log.warning("cannot connect to NATS, trying on: %s", reason(error))
                    told = True
                await dispose(client)
                await asyncio.sleep(random.uniform(*_RECONNECT_S))
                continue
            except asyncio.CancelledError:
                await dispose(client)
                raise
            self._client, self._stream, self._puller = client, client.jetstream(), None
            self._queue_known_until_s = 0.0
            self._connected_since = asyncio.get_running_loop().time()
            self._link_up.set()
            return

    async def _subscribe_all(self, client: nats.NATS) -> None:
        num_done = 0
        while num_done < len(self._subscriptions):
            for subject, receive in self._subscriptions[num_done:]:
                await client.subscribe(subject, cb=receive)
                num_done += 1
            # In force once the server has answered; meanwhile others may have been added.
            await flush(client)

    async def _keep_link(self) -> None:
        # A cancellation that meets the end of a connect is lost in asyncio.wait_for.
        while not self._closing:
            # Its closed_cb will not do: it comes after a flush, which a frozen peer never ends.
            while not self._client.is_closed:  # noqa: ASYNC110
                await asyncio.sleep(_WATCH_S)
            self._connected_since = None
            self._link_up.clear()
            log.warning("the link to NATS is down")
            await dispose(self._client)
            await self._open()
            log.warning("the link to NATS is up again")
            for callback in self._reconnect_callbacks:
                self._spawn(_run(callback), "reconnect callback")

    async def _on_error(self, error: Exception) -> None:
        kind = type(error).__name__
        self._errors[kind] += 1
        if self._errors[kind] == 1:
            log.warning("NATS: %s (told once, counted from now on)", reason(error))

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Ends within about 4 s whatever the server does."""
        self._closing = True
        if self._fetching is not None:
            await self._give_back(self._fetching)
        tasks = [*self._tasks, *([self._keeper] if self._keeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.connected:
            await within(CALL_S / 2, self._client.flush())
        await dispose(self._client)

    async def _give_back(self, fetching: "asyncio.Task[Msg | None]") -> None:
        msg = await fetching
        if msg is not None and self.connected:
            await msg.nak()


async def _run(callback: Callable[[], Awaitable[None]]) -> None:
    await callback()
