"""What the bus makes of the NATS client's ways."""

import asyncio

import nats.errors
import pytest

from common.nats_calls import mapped


@pytest.mark.parametrize("error", [None, nats.errors.NoRespondersError()])
async def test_a_cancel_in_the_moment_of_the_answer(error: Exception | None) -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def call() -> str:
        return str(await mapped(asyncio.wait_for(answer, 1)))

    calling = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    if error is None:
        answer.set_result("here")
    else:
        answer.set_exception(error)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_a_cancelled_task_can_still_say_goodbye() -> None:
    said: list[str] = []

    async def goodbye() -> str:
        await asyncio.sleep(0)
        return "goodbye"

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            said.append(await mapped(goodbye()))

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert said == ["goodbye"]
