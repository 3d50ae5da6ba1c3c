"""Several streams as one, in the order in which things happen."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the stream, item) until all have ended. The first error of any ends them all;
    closing the merged iterator closes every one."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for only in stream:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, T] | int] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int) -> None:
        try:
            async with aclosing(streams[index]) as stream:
                async for item in stream:
                    await queue.put((index, item))
        finally:
            await queue.put(index)

    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(pump(index)) for index in range(len(streams))]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, tuple):
                yield item
            else:
                await tasks[item]
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        while any(not task.done() for task in tasks):
            while not queue.empty():
                queue.get_nowait()
            await asyncio.wait(tasks, timeout=0.01)
        await asyncio.gather(*tasks, return_exceptions=True)
