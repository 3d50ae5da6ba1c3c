"""`baton status --blocks`, against an admin port that serves a real pool's ledger."""

import asyncio
import json

import pytest

from cli.ledgers import show_ledgers
from common.admin import AdminServer
from common.errors import Unavailable
from engine.block_pool import BlockPool, RefKind
from engine.prefix_cache import NO_PARENT, PrefixCache
from worker.introspection import Json, to_json

TOKEN = "t"


def page() -> dict[str, Json]:
    """Two blocks of a sequence, one of a lease, one cached."""
    pool = BlockPool(9, 4, "m", PrefixCache(9), clock=lambda: 100.0)
    chain = pool.chain("", "")
    assert chain is not None
    cached = pool.hold(RefKind.SEQUENCE, 1)
    (block,) = pool.allocate(cached, 1) or ()
    pool.index(block, NO_PARENT, chain, 0, [1, 2, 3, 4])
    pool.release(cached)
    pool.allocate(pool.hold(RefKind.SEQUENCE, 5), 2)
    pool.allocate(pool.hold(RefKind.LEASE, 6), 1)
    sequences: Json = {"5": {"request_id": "req-five", "attempt": 1}}
    return {"ledger": to_json(pool.ledger()), "sequences": sequences}


async def shown(token: str, as_json: bool) -> None:
    server = AdminServer("127.0.0.1", 0, TOKEN, lambda: True, str, {"kv": page})
    port = await server.start()
    try:
        admins = {"decode-1": f"127.0.0.1:{port}"}
        await asyncio.to_thread(show_ledgers, admins, token, as_json)
    finally:
        await server.stop()


async def test_the_sum_and_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    await shown(TOKEN, as_json=False)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == (
        "decode-1: 4 free + 1 cached + 2 in use + 1 leased + 0 importing = 8 blocks; 0 leaked"
    )
    assert sum("sequence 5" in line and "req-five" in line for line in lines) == 2
    assert sum("lease 6" in line for line in lines) == 1
    assert "1 more" in lines[-1] and "cached" in lines[-1]


async def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    await shown(TOKEN, as_json=True)
    ledger = json.loads(capsys.readouterr().out)["workers"]["decode-1"]
    assert ledger["conserved"] and ledger["leaked"] == 0
    assert ledger["counts"]["total"] == 8
    states = [block["state"] for block in ledger["blocks"]]
    assert sorted(states) == ["cached", "in_use", "in_use", "leased"]
    (reference,) = next(b for b in ledger["blocks"] if b["state"] == "leased")["references"]
    assert reference == {"kind": "lease", "owner_id": 6, "age_s": 0.0, "request_id": ""}
    assert all(block["generation"] == 1 for block in ledger["blocks"])


async def test_a_wrong_token_is_told() -> None:
    with pytest.raises(Unavailable, match="401"):
        await shown("wrong", as_json=True)
