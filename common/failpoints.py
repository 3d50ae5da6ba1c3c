"""Named places where a test makes a process fail. Off, and free of cost, unless armed.

A spec is ``name=action[:seconds][@n]``, several joined by ``;``. With ``@n`` only the n-th hit of
that name acts, without it every hit::

    prefill.chunk=kill@2;decode.before_claim=sleep:1.5

Actions: ``kill`` (SIGKILL to itself), ``exit`` (leaves at once, no clean-up), ``sleep:S``,
``raise`` (FailpointRaised), and ``drop``, ``dup``, ``corrupt``, which `hit` returns for the place
to obey; `OBEYED` says which places do. ``drop`` where a reply is about to be sent means "done, and
then a time-out". Only the standard library is used, so that any layer can call `hit`.
"""

import asyncio
import math
import os
import signal
import threading
import time
from dataclasses import dataclass

from common.errors import ConfigError

FAILPOINTS = {
    "gateway.before_publish": "a job is about to be published",
    "gateway.after_publish": "a job was published, its accept not seen yet",
    "gateway.before_accept_reply": "an accept was judged, the reply not sent",
    "gateway.before_ticket_reply": "a ticket was judged, the reply not sent",
    "gateway.before_start": "a ticket was taken, Start not sent",
    "gateway.before_renew": "an offer is about to be renewed",
    "gateway.before_cancel": "an owner is about to be told that nobody waits for its work",
    "gateway.before_heartbeat": "a heartbeat is about to go to a decode worker",
    "prefill.after_pull": "a job was delivered, nothing done with it",
    "prefill.before_chosen_reply": "a job sent by name was judged, the reply not sent",
    "prefill.before_accept": "about to ask the gateway for a job",
    "prefill.after_accept": "a job was granted, not yet acked or started",
    "prefill.before_ack": "the answer of a gateway is there, the delivery not acked",
    "prefill.chunk": "a step computed part of a prompt",
    "prefill.after_compute": "the first token is there, nothing offered",
    "prefill.before_ticket": "blocks are offered, the ticket not sent",
    "prefill.after_ticket": "the ticket was answered",
    "decode.before_grant": "a reservation was judged, the answer not sent",
    "decode.after_start": "Start arrived",
    "decode.before_claim": "blocks are allocated, the lease not claimed",
    "decode.after_claim": "the lease is claimed, nothing copied",
    "decode.copy_block": "one block is about to be copied",
    "decode.before_renew": "claimed leases are about to be renewed",
    "decode.before_settle": "all blocks are copied, nothing settled",
    "decode.after_settle": "the verdict is there, the sequence not running",
    "decode.before_send": "a step's tokens are about to be sent",
    "decode.after_send": "a step's tokens were handed to the stream",
    "decode.before_heartbeat": "a heartbeat is about to go to a gateway",
    "export.before_claim_reply": "a claim was judged, the answer not sent",
    "export.before_renew_reply": "a renewal was judged, the answer not sent",
    "export.before_settle_reply": "a settle was judged, the answer not sent",
    "export.before_release_reply": "a release was judged, the answer not sent",
    "transfer.corrupt_block": "a block was copied; corrupt flips one of its bits",
    "transfer.corrupt_checksum": "a block is about to be checked; corrupt flips a bit of its sum",
    "engine.step": "a step is about to be computed; raise has each of its rows computed alone",
    "engine.row": "a row of such a step is about to be computed; raise fails it",
    "worker.report": "a worker is about to report itself",
}

KILL, EXIT, SLEEP, RAISE = "kill", "exit", "sleep", "raise"
DROP, DUP, CORRUPT = "drop", "dup", "corrupt"
_ACTIONS = (KILL, EXIT, SLEEP, RAISE, DROP, DUP, CORRUPT)
# Places that do as `hit` says; the other actions work everywhere.
OBEYED = {
    "gateway.before_publish": (DROP, DUP),
    "gateway.before_accept_reply": (DROP,),
    "gateway.before_ticket_reply": (DROP,),
    "gateway.before_renew": (DROP,),
    "gateway.before_cancel": (DROP,),
    "gateway.before_heartbeat": (DROP,),
    "prefill.after_pull": (DROP,),
    "prefill.before_chosen_reply": (DROP,),
    "prefill.before_accept": (DUP,),
    "prefill.before_ack": (DROP,),
    "prefill.before_ticket": (DUP,),
    "decode.copy_block": (DROP,),
    "decode.before_renew": (DROP,),
    "decode.before_send": (DROP, DUP),
    "decode.before_heartbeat": (DROP,),
    "export.before_claim_reply": (DROP,),
    "export.before_renew_reply": (DROP,),
    "export.before_settle_reply": (DROP,),
    "export.before_release_reply": (DROP,),
    "transfer.corrupt_block": (CORRUPT,),
    "transfer.corrupt_checksum": (CORRUPT,),
    "worker.report": (DROP,),
}
EXIT_STATUS = 70


class FailpointRaised(RuntimeError):
    """What the action ``raise`` raises; stands for a bug at that place."""


@dataclass(slots=True)
class _Armed:
    action: str
    sleep_s: float
    at_hit: int | None
    num_hits: int = 0


_armed: dict[str, _Armed] = {}
_lock = threading.Lock()


def arm(spec: str) -> None:
    """Replaces what is armed by ``spec``; an empty one disarms. Raises ConfigError."""
    parsed = dict(_parse(part.strip()) for part in spec.split(";") if part.strip())
    with _lock:
        _armed.clear()
        _armed.update(parsed)


def num_hits() -> dict[str, int]:
    """How often each armed place was reached since it was armed."""
    with _lock:
        return {name: armed.num_hits for name, armed in _armed.items()}


def hit(name: str) -> str | None:
    """Called at the place ``name``; a sleep blocks the calling thread. Returns ``drop``, ``dup``
    or ``corrupt`` for the caller to obey, else None."""
    if not _armed:
        return None
    armed = _due(name)
    if armed is None:
        return None
    if armed.action == SLEEP:
        time.sleep(armed.sleep_s)
        return None
    return _act(name, armed)


async def hit_async(name: str) -> str | None:
    """As `hit`, for coroutines: a sleep holds up the calling task only."""
    if not _armed:
        return None
    armed = _due(name)
    if armed is None:
        return None
    if armed.action == SLEEP:
        await asyncio.sleep(armed.sleep_s)
        return None
    return _act(name, armed)


def _due(name: str) -> _Armed | None:
    assert name in FAILPOINTS, name
    armed = _armed.get(name)
    if armed is None:
        return None
    with _lock:
        armed.num_hits += 1
        due = armed.at_hit is None or armed.num_hits == armed.at_hit
    return armed if due else None


def _act(name: str, armed: _Armed) -> str | None:
    if armed.action == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if armed.action == EXIT:
        os._exit(EXIT_STATUS)
    if armed.action == RAISE:
        raise FailpointRaised(name)
    return armed.action


def _parse(part: str) -> tuple[str, _Armed]:
    name, _, rest = part.partition("=")
    action, at, count = rest.partition("@")
    action, colon, seconds = action.partition(":")
    if name not in FAILPOINTS:
        raise ConfigError("failpoints", f"{name!r} is not one of {', '.join(FAILPOINTS)}")
    if action not in _ACTIONS:
        raise ConfigError("failpoints", f"{name}: {action!r} is not one of {', '.join(_ACTIONS)}")
    if action in (DROP, DUP, CORRUPT) and action not in OBEYED.get(name, ()):
        raise ConfigError("failpoints", f"{name} does not obey {action}")
    if bool(colon) != (action == SLEEP):
        raise ConfigError("failpoints", f"{name}: sleep, and only sleep, takes :seconds")
    try:
        armed = _Armed(action, float(seconds or 0), int(count) if at else None)
    except ValueError:
        raise ConfigError("failpoints", f"{part!r} is not name=action[:seconds][@n]") from None
    if not 0 <= armed.sleep_s < math.inf or (armed.at_hit is not None and armed.at_hit < 1):
        raise ConfigError("failpoints", f"{name}: seconds must be at least 0 and n at least 1")
    return name, armed
