"""All decode workers: a link to each that the registry knows, and the choice among them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.attempt import Attempt
from gateway.decode_link import DecodeLink, Dial
from gateway.patience import Patience
from gateway.registry import WorkerEntry, WorkerRegistry
from gateway.router import Router
from gateway.run import Run, Runs

# A cached block of the prompt is one that need not be copied or computed; a free block is only
# room, and a load that is uneven by some blocks costs nothing while there is room.
_HELD_WEIGHT = 8

log = logging.getLogger(__name__)

REDIAL_S = 0.3
# After this long without a grant a request looks whether another worker has room by now.
RECONSIDER_S = 0.5
# How long a request that has already given tokens waits for a decode worker to appear.
RESUME_WAIT_S = 10.0


@dataclass(slots=True)
class DecodePool:
    """`join` and `leave` follow the registry; `reserve` returns a link that promised room."""

    gateway_id: str
    runs: Runs
    registry: WorkerRegistry
    router: Router
    worker_timeout_s: float
    dialer: Callable[[WorkerEntry], Dial]
    # Called when a link became usable or was lost.
    on_change: Callable[[], None]
    links: dict[str, DecodeLink] = field(default_factory=dict)
    _followers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def join(self, entry: WorkerEntry) -> None:
        if entry.worker_id not in self._followers:
            task = asyncio.get_running_loop().create_task(self._follow(entry))
            self._followers[entry.worker_id] = task

    def leave(self, worker_id: str, died: bool = False) -> None:
        """``died``: what it had of requests is a death of their owner."""
        link = self.links.get(worker_id)
        if died and link is not None:
            link.died = True
        if (task := self._followers.pop(worker_id, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._followers.values())
        for worker_id in list(self._followers):
            self.leave(worker_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    def alive(self, worker_id: str) -> bool:
        """A live stream is proof of life, whatever the registry has (not) heard."""
        link = self.links.get(worker_id)
        return link is not None and link.connected

    async def _follow(self, entry: WorkerEntry) -> None:
        """Keeps a link to one worker until it leaves."""
        while True:
            link = DecodeLink(
                entry.worker_id, self.gateway_id, self.runs, self.worker_timeout_s, self._wake
            )
            self.links[entry.worker_id] = link
            try:
                await link.run(self.dialer(entry))
            except Exception:
                log.exception("the link to %s failed", entry.worker_id)
            finally:
                # A worker that was started anew under its old id has its next link already.
                if self.links.get(entry.worker_id) is link:
                    del self.links[entry.worker_id]
                self._wake()
            await asyncio.sleep(REDIAL_S)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    # ------------------------------------------------------------ choice

    def candidates(self, run: Run, prefer_local: bool) -> list[DecodeLink]:
        """Links that could take the run, best first: not one that lost its KV before, fewest
        requests waiting for room, room for the prompt, best `_fit`. ``prefer_local``: only those
        that compute prompts themselves, if there are any."""
        links = self._usable()
        if prefer_local:
            links = [link for link in links if self.is_local(link)] or links
        preferred = [link for link in links if link.worker_id not in run.excluded_decode]
        num_blocks = -(-run.num_tokens // max(1, self.registry.block_size))
        return sorted(
            preferred or links,
            key=lambda link: (
                link.num_reserving, link.headroom < num_blocks, -self._fit(run, link)
            ),
        )  # fmt: skip

    def _usable(self) -> list[DecodeLink]:
        links = []
        for worker_id, link in self.links.items():
            entry = self.registry.entries.get(worker_id)
            if link.connected and entry is not None and entry.ready:
                links.append(link)
        return links

    def _fit(self, run: Run, link: DecodeLink) -> int:
        """In blocks: room, less the block that each running sequence will soon ask for, plus what
        is cached of the prompt."""
        running = self.registry.entries[link.worker_id].report.load.running
        held = self.router.num_held(run, link.worker_id)
        return link.headroom - running + _HELD_WEIGHT * held

    def is_local(self, link: DecodeLink) -> bool:
        """The worker computes every prompt itself (role `both`)."""
        entry = self.registry.entries.get(link.worker_id)
        return entry is not None and entry.computes_all_prompts

    async def reserve(
        self, run: Run, attempt: Attempt, num_blocks: int, prefer_local: bool, patience: Patience
    ) -> DecodeLink:
        """Room for the run. A promise that an earlier attempt still holds is taken over. Raises
        Unavailable without any worker, ReserveRefused, AttemptLost."""
        link = attempt.link
        if link is None or not link.connected:
            link = await self._choose(run, prefer_local, patience)
        while True:
            attempt.link = link
            reserving = asyncio.ensure_future(link.reserve(run, attempt, num_blocks))
            try:
                while not reserving.done():
                    await asyncio.wait((reserving,), timeout=RECONSIDER_S)
                    better = next(iter(self.candidates(run, prefer_local)), link)
                    if better is not link and better.headroom >= num_blocks > link.headroom:
                        break
            finally:
                if not reserving.done():
                    reserving.cancel()
                    await asyncio.wait((reserving,))
            if not reserving.cancelled():
                reserving.result()
                return link
            link = better

    def patience(self, run: Run) -> Patience:
        """A request that has given tokens waits for a worker to come back; others are refused."""
        limit_s = RESUME_WAIT_S if run.resumed else 0.0
        clock = asyncio.get_running_loop().time
        return Patience("decode", lambda: bool(self._usable()), limit_s, clock)

    async def _choose(self, run: Run, prefer_local: bool, patience: Patience) -> DecodeLink:
        while True:
            candidates = self.candidates(run, prefer_local)
            if candidates:
                return candidates[0]
            patience.look()
            changed = self._changed
            with suppress(TimeoutError):
                async with asyncio.timeout(patience.left_s):
                    await changed.wait()
