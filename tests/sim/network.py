"""A seeded network: messages late, lost, doubled and out of order; streams that break.

`SimBus` imitates common/bus.py over one `Network`; `Network.stream` is a gRPC stream (ordered,
lossless until it breaks); `Network.call` is a unary call of which request or answer may be lost.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from common import bus as names
from common.bus import BusTimeout, Handler, Job, Message, NoResponders
from common.errors import PeerLost, Unavailable

T = TypeVar("T")
ACK_WAIT_S = 2.0


@dataclass(frozen=True)
class Faults:
    """Probabilities, per message."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    # A delayed message comes up to so much later; others within 2 ms.
    delay_s: float = 3.0


@dataclass
class Host:
    """One process: when it is killed, nothing that it says or is told happens any more."""

    name: str
    alive: bool = True
    # In the order in which they began: they are cancelled in that order, every time.
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task


class Network:
    """All links between all hosts, and the broker."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.rng = rng
        self.faults = faults
        self.subscriptions: dict[str, list[tuple[Host, Handler]]] = {}
        self.jobs: deque[_StoredJob] = deque()
        self.fetchers: deque[tuple[Host, asyncio.Future[_StoredJob]]] = deque()
        self.streams: list[_Stream[Any, Any]] = []
        self.num_jobs_published = 0

    def latency_s(self) -> float:
        if self.rng.random() < self.faults.delay:
            return self.rng.uniform(0.0, self.faults.delay_s)
        return self.rng.uniform(0.0001, 0.002)

    def copies(self) -> int:
        """How often a message arrives: 0, 1 or 2 times."""
        draw = self.rng.random()
        if draw < self.faults.lose:
            return 0
        return 2 if draw < self.faults.lose + self.faults.double else 1

    async def call(self, server: Host, work: Callable[[], T], timeout_s: float = 2.0) -> T:
        """A unary call; lost requests and lost answers look the same to the caller."""
        if self.copies() == 0:
            await asyncio.sleep(timeout_s)
            raise PeerLost("no answer")
        await asyncio.sleep(self.latency_s())
        if not server.alive:
            raise PeerLost("connection refused")
        answer = work()
        if self.copies() == 0:
            await asyncio.sleep(timeout_s)
            raise PeerLost("no answer")
        await asyncio.sleep(self.latency_s())
        return answer

    # ------------------------------------------------------------ core messages

    def deliver(
        self, sender: Host, message: Message, pattern_hit: list[tuple[Host, Handler]]
    ) -> None:
        for host, handler in pattern_hit:
            for _ in range(self.copies()):
                asyncio.get_running_loop().call_later(
                    self.latency_s(), self._hand_over, sender, host, handler, message
                )

    def _hand_over(self, sender: Host, host: Host, handler: Handler, message: Message) -> None:
        if host.alive:
            host.spawn(handler(message))

    def matching(self, subject: str) -> list[tuple[Host, Handler]]:
        found = []
        for pattern, receivers in self.subscriptions.items():
            stem = pattern.removesuffix("*")
            wild = pattern != stem and subject.startswith(stem) and "." not in subject[len(stem) :]
            if pattern == subject or wild:
                found += [(host, handler) for host, handler in receivers if host.alive]
        return found

    # ------------------------------------------------------------ the job queue

    def store(self, data: bytes, headers: Mapping[str, str]) -> None:
        self.num_jobs_published += 1
        self.jobs.append(_StoredJob(data, headers))
        self.feed()

    def feed(self) -> None:
        while self.jobs and self.fetchers:
            host, waiter = self.fetchers.popleft()
            if waiter.done() or not host.alive:
                continue
            job = self.jobs.popleft()
            job.num_delivered += 1
            job.redelivery = asyncio.get_running_loop().call_later(ACK_WAIT_S, self.again, job)
            waiter.set_result(job)

    def again(self, job: "_StoredJob") -> None:
        """Not acked in time, or given back."""
        if job.redelivery is not None:
            job.redelivery.cancel()
            job.redelivery = None
        if not job.acked and job not in self.jobs:
            self.jobs.appendleft(job)
            self.feed()

    # ------------------------------------------------------------ streams

    def stream(
        self,
        client: Host,
        server: Host,
        serve: Callable[[AsyncIterator[Any]], AsyncIterator[Any]],
    ) -> Callable[[AsyncIterator[Any]], AsyncIterator[Any]]:
        """A dialler: what a gRPC stub's stream method would be."""

        async def dial(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            await asyncio.sleep(self.latency_s())
            if not server.alive:
                raise Unavailable("connection refused")
            stream = _Stream[Any, Any](self, client, server)
            self.streams.append(stream)
            try:
                async for message in stream.run(requests, serve):
                    yield message
            finally:
                self.streams.remove(stream)

        return dial

    def break_streams(self, host: Host) -> None:
        for stream in list(self.streams):
            if host in (stream.client, stream.server):
                stream.break_off()

    async def kill(self, host: Host) -> None:
        """kill -9: from now on the host says nothing, even while its tasks are unwound."""
        host.alive = False
        self.break_streams(host)
        tasks = list(host.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class _StoredJob:
    data: bytes
    headers: Mapping[str, str]
    num_delivered: int = 0
    acked: bool = False
    redelivery: asyncio.TimerHandle | None = None


Req = TypeVar("Req")
Res = TypeVar("Res")


class _Stream(Generic[Req, Res]):
    """Ordered both ways; each message takes its time. Breaking it ends both sides, and what is
    under way is lost."""

    def __init__(self, network: Network, client: Host, server: Host) -> None:
        self.network = network
        self.client = client
        self.server = server
        self._up: asyncio.Queue[Req | None] = asyncio.Queue()
        self._down: asyncio.Queue[Res | None] = asyncio.Queue()
        self._broken = False

    def break_off(self) -> None:
        self._broken = True
        self._down.put_nowait(None)

    async def run(
        self,
        requests: AsyncIterator[Req],
        serve: Callable[[AsyncIterator[Req]], AsyncIterator[Res]],
    ) -> AsyncIterator[Res]:
        tasks = [
            self.client.spawn(self._carry(requests, self._up)),
            self.server.spawn(self._carry(serve(self._incoming()), self._down)),
        ]
        try:
            while True:
                message = await self._down.get()
                if self._broken:
                    raise Unavailable("connection lost")
                if message is None:
                    return
                yield message
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _incoming(self) -> AsyncIterator[Req]:
        while (message := await self._up.get()) is not None:
            yield message

    async def _carry(self, source: AsyncIterator[Any], queue: asyncio.Queue[Any]) -> None:
        loop = asyncio.get_running_loop()
        arrives_s = 0.0
        try:
            async for message in source:
                takes_s = self.network.rng.uniform(0.0001, 0.001)
                arrives_s = max(arrives_s, loop.time()) + takes_s
                loop.call_at(arrives_s, queue.put_nowait, message)
        finally:
            loop.call_at(arrives_s, queue.put_nowait, None)


class SimBus:
    """One host's connection to the broker."""

    connected = True
    connected_for_s = 1e9

    def __init__(self, network: Network, host: Host) -> None:
        self._network = network
        self._host = host

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        if self._host.alive:
            message = Message(subject, data, headers or {}, _no_reply)
            self._network.deliver(self._host, message, self._network.matching(subject))

    async def request(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        receivers = self._network.matching(subject)
        if not receivers:
            await asyncio.sleep(0.001)
            raise NoResponders(subject)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply(data: bytes) -> None:
            for _ in range(self._network.copies()):
                await asyncio.sleep(self._network.latency_s())
                if not answer.done():
                    answer.set_result(data)

        if self._host.alive:
            message = Message(subject, data, headers or {}, reply)
            self._network.deliver(self._host, message, receivers)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise BusTimeout(subject) from None

    async def subscribe(self, subject: str, handler: Handler) -> None:
        self._network.subscriptions.setdefault(subject, []).append((self._host, handler))

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None: ...

    async def ensure_job_queue(self, max_age_s: float) -> None: ...

    async def publish_job(
        self, data: bytes, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        if not self._host.alive:
            raise BusTimeout(names.JOB_SUBJECT)
        if self._network.copies() == 0:
            await asyncio.sleep(2.0)
            raise BusTimeout(names.JOB_SUBJECT)
        await asyncio.sleep(self._network.latency_s())
        self._network.store(data, headers or {})
        if self._network.copies() == 0:
            await asyncio.sleep(2.0)
            raise BusTimeout(names.JOB_SUBJECT)

    async def fetch_job(self, timeout_s: float) -> Job | None:
        waiter: asyncio.Future[_StoredJob] = asyncio.get_running_loop().create_future()
        self._network.fetchers.append((self._host, waiter))
        self._network.feed()
        try:
            async with asyncio.timeout(timeout_s):
                stored = await waiter
        except TimeoutError:
            return None
        for _ in range(self._network.copies() - 1):
            # Delivered twice: the broker thinks that the first delivery was lost.
            self._network.again(stored)

        async def ack() -> None:
            if self._network.copies():
                stored.acked = True

        async def nak() -> None:
            self._network.again(stored)

        return Job(stored.data, stored.headers, stored.num_delivered, ack, nak)

    async def close(self) -> None: ...


async def _no_reply(data: bytes) -> None: ...
