"""Whether a gateway would answer a request: asked at its admin port, which needs neither the API
key nor the certificate that clients may need."""

import asyncio
import json
import urllib.request
from collections.abc import Collection

from common.errors import Unavailable

_TIMEOUT_S = 60.0
_CALL_S = 10.0
_POLL_S = 0.05


async def wait_until_ready(admin: str, token: str, worker_ids: Collection[str]) -> None:
    """Until the gateway at that admin address knows these workers as ready and would serve. Raises
    Unavailable after a minute."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            ready = await is_ready(admin, token, worker_ids)
            while not ready:
                await asyncio.sleep(_POLL_S)
                ready = await is_ready(admin, token, worker_ids)
    except TimeoutError:
        raise Unavailable(
            f"gateway and workers did not find each other in {_TIMEOUT_S:.0f} s"
        ) from None


async def is_ready(admin: str, token: str, worker_ids: Collection[str]) -> bool:
    """Whether it is so at this moment."""
    return await asyncio.to_thread(_is_ready, admin, token, worker_ids)


def _is_ready(admin: str, token: str, worker_ids: Collection[str]) -> bool:
    request = urllib.request.Request(
        f"http://{admin}/debug/ready", headers={"authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_CALL_S) as response:
            page = json.load(response)
    except OSError:
        return False
    return bool(page["serving"]) and set(page["workers"]).issuperset(worker_ids)
