"""Failpoints in this process and, for those that end one, in a child."""

import asyncio
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import failpoints
from common.errors import ConfigError
from common.failpoints import FAILPOINTS, FailpointRaised, hit, hit_async


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def run(spec: str, call: str) -> subprocess.CompletedProcess[str]:
    script = f"""
        import asyncio
        from common import failpoints
        failpoints.arm({spec!r})
        for i in range(5):
            print(i, flush=True)
            {call}
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(
    "call",
    [
        'failpoints.hit("prefill.chunk")',
        'asyncio.run(failpoints.hit_async("prefill.chunk"))',
    ],
)
def test_kill_at_the_third_hit(call: str) -> None:
    done = run("prefill.chunk=kill@3", call)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2"]


def test_exit_at_every_hit() -> None:
    done = run("prefill.chunk=exit", 'failpoints.hit("prefill.chunk")')
    assert done.returncode == failpoints.EXIT_STATUS
    assert done.stdout.split() == ["0"]


def test_another_name_does_not_act() -> None:
    done = run("prefill.after_pull=kill", 'failpoints.hit("prefill.chunk")')
    assert done.returncode == 0 and len(done.stdout.split()) == 5


def test_what_the_place_obeys() -> None:
    failpoints.arm(
        "decode.before_send=drop@2; gateway.before_publish=dup;transfer.corrupt_block=corrupt"
    )
    assert [hit("decode.before_send") for _ in range(3)] == [None, failpoints.DROP, None]
    assert [hit("gateway.before_publish") for _ in range(2)] == [failpoints.DUP] * 2
    assert hit("transfer.corrupt_block") == failpoints.CORRUPT
    assert hit("decode.after_claim") is None


def test_raise() -> None:
    failpoints.arm("prefill.chunk=raise@1")
    with pytest.raises(FailpointRaised, match=re.escape("prefill.chunk")):
        hit("prefill.chunk")
    assert hit("prefill.chunk") is None


async def test_sleep_holds_up_only_the_caller() -> None:
    failpoints.arm("decode.before_claim=sleep:0.3;prefill.chunk=sleep:0.1")
    loop = asyncio.get_running_loop()
    begin = loop.time()
    slow = asyncio.create_task(hit_async("decode.before_claim"))
    await asyncio.sleep(0.01)
    assert loop.time() - begin < 0.2
    assert await slow is None
    assert loop.time() - begin >= 0.3
    begin = time.monotonic()
    hit("prefill.chunk")
    assert time.monotonic() - begin >= 0.1


def test_unarmed_costs_nothing() -> None:
    begin = time.perf_counter()
    for _ in range(100_000):
        hit("prefill.chunk")
    assert time.perf_counter() - begin < 0.2


@pytest.mark.parametrize(
    "spec",
    [
        "nowhere=kill",
        "prefill.chunk=explode",
        "prefill.chunk",
        "prefill.chunk=sleep",
        "prefill.chunk=sleep:x",
        "prefill.chunk=sleep:-1",
        "prefill.chunk=sleep:nan",
        "prefill.chunk=kill:3",
        "prefill.chunk=kill@0",
        "prefill.chunk=kill@x",
        "prefill.chunk=kill@",
        "prefill.chunk=drop",
        "decode.copy_block=corrupt",
    ],
)
def test_a_bad_spec_is_refused_and_changes_nothing(spec: str) -> None:
    failpoints.arm("prefill.after_pull=drop")
    with pytest.raises(ConfigError, match="failpoints"):
        failpoints.arm(spec)
    assert hit("prefill.after_pull") == failpoints.DROP


def test_every_name_is_used_and_every_use_is_named() -> None:
    """The table and the places agree, over all packages."""
    root = Path(failpoints.__file__).parent.parent
    used = set()
    for package in (
        "gateway",
        "prefill_worker",
        "decode_worker",
        "worker",
        "kv_transfer",
        "engine",
    ):
        for path in (root / package).rglob("*.py"):
            used |= set(re.findall(r'\bhit(?:_async)?\(\s*"([a-z_.]+)"', path.read_text()))
    assert used == set(FAILPOINTS)
