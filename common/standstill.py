"""When this process itself stood still: stopped, starved of its core, or with a machine asleep."""

import asyncio

# Less is how busy machines are.
_NOTICED_S = 1.0


async def late_s(delay_s: float) -> float:
    """Sleeps for ``delay_s``. Returns by how many seconds more it was, 0.0 unless that is a
    standstill: what others said meanwhile has then not been read yet."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + delay_s
    await asyncio.sleep(delay_s)
    late = loop.time() - due_s
    return late if late > _NOTICED_S else 0.0
