"""The arithmetic of the scripts in bench/: what they conclude from what was measured."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from bench import prefix, route
from bench.bounds import at_least, at_most, pair_interval
from bench.mixed import LONG, SHORT, Streams, mixed_sessions
from cli.bench.load import Ending, Outcome
from cli.bench.target import Piece
from cli.bench.workloads import CHAT, Conversation, Rag, Session, Turn, conversations, rag
from common.types import Usage


def test_a_figure_stands_beside_its_bound() -> None:
    assert at_most(0.4, 0.4, "ms") == {"value": 0.4, "unit": "ms", "at_most": 0.4, "ok": True}
    assert not at_most(0.41, 0.4, "")["ok"]
    assert at_least(5.0, 4.0, "")["ok"] and not at_least(3.0, 4.0, "")["ok"]


def test_the_interval_of_pairs_is_that_of_the_sign_test() -> None:
    found = pair_interval([float(i) for i in range(1, 25)])
    # Of 24 pairs it is from the 7th to the 18th value, as in the tables of the sign test.
    assert found == {"median": 12.5, "interval_95": [7.0, 18.0]}
    assert pair_interval([3.0, 1.0, 2.0])["interval_95"] == [1.0, 3.0]
    assert pair_interval([float(i) for i in range(6)])["interval_95"] == [0.0, 5.0]


def test_the_ceiling_is_what_earlier_prompts_had_too() -> None:
    session = Session((Turn((1, 2, 3, 4), 2), Turn((9,), 2)))
    other = Session((Turn((1, 2, 7, 8), 2),))
    # Prompts of 4, 7 and 4 tokens; new are 4, then 1 behind what is known, then 2.
    assert prefix.ceiling([session, other]) == pytest.approx(1 - (4 + 1 + 2) / 15)
    assert 0.7 < prefix.ceiling(rag(200, 0, Rag())) < 0.95
    chat = conversations(1, 0, Conversation(shared=512, num_turns=8, new=60, answer=150))
    assert prefix.ceiling(chat) == pytest.approx(
        1 - (512 + 8 * 60) / sum(572 + i * 210 for i in range(8))
    )


def test_hits_count_both_pools() -> None:
    usages = [
        Usage(prompt_tokens=100, prefill_computed=20, prefill_cached=80, decode_cached=64,
              decode_transferred=36),
        Usage(prompt_tokens=100, decode_cached=90, decode_computed=10),
    ]  # fmt: skip
    found = prefix.hits([Outcome(0, 0, 0.0, 100, usage=usage) for usage in usages])
    assert found["tokens_saved"] == 170 and found["hit_rate"] == pytest.approx(0.85)
    assert found["decode_hit_rate"] == pytest.approx(0.77) and found["tokens_transferred"] == 36


def test_recomputed_is_what_was_not_new() -> None:
    def turn(start_s: float, prompt: int, computed: int) -> Outcome:
        usage = Usage(prompt_tokens=prompt, prefill_computed=computed)
        return Outcome(0, 0, start_s, prompt, usage=usage)

    first, second = CHAT.shared + CHAT.new, CHAT.new + 40
    found = route.counts([turn(1.0, 900, second), turn(0.0, first, first)])
    assert found["recomputed"] == 40 and found["computed"] == first + second
    bad = Outcome(0, 0, 0.0, 5, ending=Ending.REFUSED, reason="full")
    with pytest.raises(SystemExit, match="full"):
        route.counts([bad])


def test_a_quarter_of_the_mixed_prompts_is_long() -> None:
    lengths = [len(session.turns[0].new_ids) for session in mixed_sessions(8)]
    assert lengths == [LONG[0], *[SHORT[0]] * 3] * 2
    assert len({session.turns[0].new_ids for session in mixed_sessions(8)}) == 8


async def test_a_stream_that_stalls_until_the_end_shows_its_stall() -> None:
    """What a watched stream tells: gaps that reach into the time that is asked about."""

    class Target:
        async def send(self, *_: object) -> AsyncGenerator[Piece, None]:
            for _ in range(3):
                yield Piece(2)
                await asyncio.sleep(0.02)

        async def close(self) -> None:
            """Nothing is open."""

    streams = Streams(Target())
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    await streams.run(Session((Turn((1,), 6),)))
    await streams.all_began(1)
    end_s = loop.time()
    assert streams.num_tokens(begin_s, end_s) == 6
    assert len(streams.gaps(begin_s, end_s)) == 2 and min(streams.gaps(begin_s, end_s)) >= 0.015
    assert streams.gaps(end_s, end_s + 1) == []
