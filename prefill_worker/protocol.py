"""How a prefill worker asks its gateway: the same request again until there is an answer.

Accept and ticket are idempotent for equal content, so a lost reply costs a repetition and nothing
else. Nobody there counts as an answer only while our own link has been up long enough for the
gateway's subscription to be known to the server again.
"""

import asyncio
from collections.abc import Callable, Mapping

from common.bus import Bus, BusError, NoResponders

TRY_S = 1.0
GIVE_UP_S = 10.0
TRUSTED_LINK_S = 1.0


async def ask(
    bus: Bus,
    subject: str,
    data: bytes,
    headers: Mapping[str, str] | None = None,
    in_vain: Callable[[], None] = lambda: None,
) -> bytes | None:
    """The gateway's answer; None when it is gone, or silent for `GIVE_UP_S`. ``in_vain`` is called
    after each try without an answer."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + GIVE_UP_S
    while (now_s := loop.time()) < end_s:
        try:
            return await bus.request(subject, data, min(TRY_S, end_s - now_s), headers)
        except NoResponders:
            if bus.connected_for_s >= TRUSTED_LINK_S:
                return None
        except BusError:
            pass  # silence, or the bus is in trouble of its own
        await asyncio.sleep(max(0.0, now_s + TRY_S - loop.time()))
        in_vain()
    return None
