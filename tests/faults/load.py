"""Clients that ask one request after the other while something happens to the cluster."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from faults.history import History, watch
from support.oracle_requests import Case, make_cases

from common.client import BatonClient
from common.errors import Overloaded, Unavailable

_AGAIN_S = 0.2


@dataclass
class Load:
    """``patience_s``: for so long a client asks again, at the next gateway, what was refused as
    UNAVAILABLE or RESOURCE_EXHAUSTED before its first token."""

    num_clients: int = 16
    prompt_tokens: tuple[int, int] = (1, 200)
    max_tokens: tuple[int, int] = (10, 60)
    pause_s: float = 0.1
    patience_s: float = 0.0
    histories: list[History] = field(default_factory=list)

    async def until_more(self, num_answers: int) -> None:
        wanted = len(self.histories) + num_answers
        async with asyncio.timeout(120):
            while len(self.histories) < wanted:
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def on(self, targets: Sequence[str], seed: int) -> AsyncIterator["Load"]:
        """Runs while the block does; on leaving, all requests have ended."""
        cases = iter(make_cases(seed, 100_000, self.prompt_tokens, self.max_tokens))
        stopping = asyncio.Event()
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(BatonClient(target)) for target in targets]

            async def run(number: int) -> None:
                while not stopping.is_set():
                    self.histories.append(await self._ask(clients, number, next(cases)))
                    await asyncio.sleep(self.pause_s)

            async with asyncio.TaskGroup() as group:
                for number in range(self.num_clients):
                    group.create_task(run(number))
                try:
                    yield self
                finally:
                    stopping.set()

    async def _ask(self, clients: Sequence[BatonClient], number: int, case: Case) -> History:
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + self.patience_s
        while True:
            history = await watch(clients[number % len(clients)], case)
            is_refused = isinstance(history.refusal, Unavailable | Overloaded)
            if not is_refused or history.messages or clock() > give_up_s:
                return history
            number += 1
            await asyncio.sleep(_AGAIN_S)
