"""What `baton scale` reads from its command line, and how new workers share the cores."""

import os
from pathlib import Path

import pytest

from cli.child import Child, ChildSpec
from cli.scale import parsed
from cli.scaling import threads_left
from common.errors import InvalidRequest


def test_pools_and_sizes() -> None:
    request = parsed(["decode=3", "prefill=2"])
    assert (request.prefill, request.decode) == (2, 3)
    assert not parsed(["decode=3"]).HasField("prefill")
    assert parsed(["decode=0"]).HasField("decode")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (["gateway=2"], "is not like prefill=2 or decode=2"),
        (["both=1"], "is not like"),
        (["prefill"], "is not like"),
        (["prefill="], "is not like"),
        (["prefill=-1"], "is not like"),
        (["prefill=1.5"], "is not like"),
        (["prefill=²"], "is not like"),
        (["prefill=1", "prefill=2"], "given twice"),
    ],
)
def test_what_is_refused(sizes: list[str], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parsed(sizes)


def test_new_workers_get_the_cores_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def child(num_threads: int) -> Child:
        spec = ChildSpec("decode", "decode-0", (), {"OMP_NUM_THREADS": str(num_threads)})
        return Child(spec, tmp_path)

    assert threads_left([child(8)], 2) == 4
    assert threads_left([child(8), child(8)], 2) == 1
    assert threads_left([], 3) == 5
