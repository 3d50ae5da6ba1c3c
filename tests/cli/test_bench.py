"""The load generator: what it sends, when, and what it makes of the answers."""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from cli.bench.load import Ending, Outcome, run_closed, run_open
from cli.bench.page import page
from cli.bench.report import rounded
from cli.bench.roofline import Roofs, point_of
from cli.bench.serve import make_load
from cli.bench.serve_plot import draw
from cli.bench.summary import Targets, percentile, summarise
from cli.bench.target import Piece
from cli.bench.workloads import (
    AGENT,
    CHAT,
    DATASETS,
    RAG,
    Conversation,
    Session,
    Turn,
    bursts,
    conversations,
    dataset,
    from_trace,
    poisson,
    poisson_of,
    rag,
    random_lengths,
    tokens,
)
from cli.main import main
from cli.otlp import TraceSpan
from common.errors import ConfigError, Overloaded, Unavailable
from common.types import TokenId, Usage

TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)


class ScriptedTarget:
    """Answers with ids from 1,000 up, two in the first message. A prompt that begins with 1 is
    refused, with 2 fails after a token, with 3 brings nothing."""

    def __init__(self, tells_ids: bool = True, delay_s: float = 0.0) -> None:
        self.prompts: list[tuple[TokenId, ...]] = []
        self.now = self.most = 0
        self._tells_ids = tells_ids
        self._delay_s = delay_s

    async def send(
        self, prompt_ids: Sequence[TokenId], max_tokens: int, wants_ids: bool
    ) -> AsyncGenerator[Piece, None]:
        self.prompts.append(tuple(prompt_ids))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self._delay_s)
            if prompt_ids[0] == 1:
                raise Overloaded("queue full")
            if prompt_ids[0] == 3:
                return
            ids = tuple(range(1000, 1000 + max_tokens))
            for part in (ids[:2], ids[2:]):
                yield Piece(len(part), part if self._tells_ids else ())
                if prompt_ids[0] == 2:
                    raise Unavailable("worker lost")
            yield Piece(usage=Usage(prompt_tokens=len(prompt_ids), output_tokens=max_tokens))
        finally:
            self.now -= 1

    async def close(self) -> None:
        """Nothing is open."""


def one_turn(*ids: TokenId, max_tokens: int = 4) -> Session:
    return Session((Turn(ids, max_tokens),))


# ---------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_is_the_same_for_the_same_seed_only(name: str) -> None:
    first, again, other = (dataset(name, 3, seed, 64, 8) for seed in (1, 1, 2))
    assert first == again != other
    ids = [id_ for session in first for turn in session.turns for id_ in turn.new_ids]
    # Every model's vocabulary has these, the oracle's of 512 too; none is special.
    assert min(ids) >= 32 and max(ids) < 500


def test_the_committed_workloads_have_the_lengths_that_they_name() -> None:
    chat = conversations(2, 0, CHAT)
    assert [len(turn.new_ids) for turn in chat[0].turns] == [512 + 60] + [60] * 7
    assert {turn.max_tokens for turn in chat[0].turns} == {150}
    assert chat[0].turns[0].new_ids[:512] == chat[1].turns[0].new_ids[:512]
    assert chat[0].turns[0].new_ids[512:] != chat[1].turns[0].new_ids[512:]
    assert (AGENT.shared, AGENT.num_turns) == (1200, 12)
    starts = {session.turns[0].new_ids[:1500] for session in rag(100, 0)}
    assert RAG.document == 1500 and 1 < len(starts) <= RAG.num_documents


def test_another_salt_gives_other_tokens_of_the_same_lengths() -> None:
    one, two = (random_lengths(8, 3, 50, 10, salt) for salt in ("a", "b"))
    lengths = [
        [(len(s.turns[0].new_ids), s.turns[0].max_tokens) for s in load] for load in (one, two)
    ]
    assert lengths[0] == lengths[1]
    assert all(
        a.turns[0].new_ids[0:8] != b.turns[0].new_ids[0:8] for a, b in zip(one, two, strict=True)
    )


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    arrivals = poisson(2000, 5.0, seed=1)
    assert arrivals == sorted(arrivals) and arrivals[-1] < 2000
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    assert poisson_of(50, 5.0, seed=1) == arrivals[:50]
    assert poisson(1e-9, 5.0, seed=1) == arrivals[:1]
    assert bursts(7, rate=2.0, size=3) == [0, 0, 0, 1.5, 1.5, 1.5, 3.0]


def test_a_trace_keeps_its_arrivals_and_what_its_prompts_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 4000, "input_length": 1030, "output_length": 6, "hash_ids": [1, 2, 4]},
        {"timestamp": 8000, "input_length": 600, "output_length": 7, "hash_ids": [9, 5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first, second, third = from_trace(path, 10, None)
    assert [session.arrival_s for session in (first, second, third)] == [0, 4, 8]
    assert len(second.turns[0].new_ids) == 1030 and second.turns[0].max_tokens == 6
    assert first.turns[0].new_ids[:1024] == second.turns[0].new_ids[:1024]
    assert first.turns[0].new_ids[1024:1030] != second.turns[0].new_ids[1024:1030]
    assert first.turns[0].new_ids[:512] != third.turns[0].new_ids[:512]
    # The first warms up; the others begin at once, as far apart as they were.
    assert make_load([first, second, third], 1, None, None, 0).arrivals == [0, 4]
    assert make_load([first, second, third], 1, None, 2, 0).arrivals is None


# ---------------------------------------------------------------- the generator


async def test_every_request_ends_as_one_outcome() -> None:
    sessions = [one_turn(5), one_turn(1), one_turn(2), one_turn(3)]
    ended: list[Outcome] = []
    outcomes = await run_closed(ScriptedTarget(), sessions, 2, ended.append)
    assert ended == outcomes
    by_session = {outcome.session: outcome for outcome in outcomes}
    endings = [by_session[i].ending for i in range(4)]
    assert endings == [Ending.OK, Ending.REFUSED, Ending.FAILED, Ending.FAILED]
    assert by_session[1].reason == "queue full" and by_session[2].reason == "worker lost"
    assert [count for _, count in by_session[0].arrivals] == [2, 2]
    assert by_session[0].num_output == 4 and len(by_session[0].itl_s) == 1


@pytest.mark.parametrize("tells_ids", [True, False])
async def test_a_turn_goes_on_from_the_answer_before(tells_ids: bool) -> None:
    target = ScriptedTarget(tells_ids)
    session = Session((Turn((7, 8), 3), Turn((9,), 3)))
    await run_closed(target, [session], 1)
    first, second = target.prompts
    assert first == (7, 8) and second[:2] == first and second[-1] == 9 and len(second) == 6
    # Where the ids are not told, others of the same number stand for them.
    assert (second[2:5] == (1000, 1001, 1002)) is tells_ids


async def test_a_session_ends_with_its_first_refusal() -> None:
    target = ScriptedTarget()
    outcomes = await run_closed(target, [Session((Turn((1,), 3), Turn((9,), 3)))], 1)
    assert len(target.prompts) == len(outcomes) == 1


async def test_a_closed_loop_has_so_many_at_once_and_an_open_loop_does_not_wait() -> None:
    sessions = [one_turn(5) for _ in range(9)]
    closed = ScriptedTarget(delay_s=0.01)
    assert len(await run_closed(closed, sessions, 3)) == 9 and closed.most == 3
    opened = ScriptedTarget(delay_s=0.2)
    assert len(await run_open(opened, sessions, [0.0] * 9)) == 9 and opened.most == 9


async def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """A generator that is held up for 50 ms must not make the server look faster."""
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, time.sleep, 0.06)
    (outcome,) = await run_open(ScriptedTarget(), [one_turn(5)], [0.02])
    assert outcome.ttft_s >= 0.04


async def test_leaving_early_cancels_the_request() -> None:
    target = ScriptedTarget()
    async with aclosing(target.send((5,), 4, False)) as pieces:
        await anext(pieces)
    assert target.now == 0


# ---------------------------------------------------------------- figures


def outcome(start_s: float, ttft_s: float, tpot_s: float, num: int = 5) -> Outcome:
    times = [start_s + ttft_s + i * tpot_s for i in range(num)]
    usage = Usage(prompt_tokens=10, output_tokens=num)
    return Outcome(0, 0, start_s, 10, times[-1], arrivals=[(t, 1) for t in times], usage=usage)


def test_the_summary_is_what_one_counts_by_hand() -> None:
    refused = Outcome(0, 0, 1.0, 10, 1.0, Ending.REFUSED, "queue full")
    outcomes = [outcome(0, 0.5, 0.05), outcome(1, 1.5, 0.05), outcome(2, 0.5, 0.2), refused]
    summary = summarise(outcomes, TARGETS)
    assert (summary.num_ok, summary.num_refused, summary.num_failed) == (3, 1, 0)
    assert summary.reasons == {"queue full": 1}
    assert summary.duration_s == pytest.approx(3.3)
    assert summary.output_tokens == 15 and summary.prompt_tokens == 30
    # One missed the first token's target, one the others'.
    assert summary.num_good == 1 and summary.goodput == pytest.approx(1 / 3.3)
    assert summary.ttft_ms is not None and summary.itl_ms is not None
    assert summary.ttft_ms.p50 == pytest.approx(500) and summary.ttft_ms.p99 == pytest.approx(1500)
    assert summary.itl_ms.p90 == pytest.approx(200) and summary.itl_ms.p50 == pytest.approx(50)


def test_a_summary_of_refusals_alone_has_no_latencies() -> None:
    summary = summarise([Outcome(0, 0, 1.0, 10, 1.0, Ending.REFUSED, "full")], TARGETS)
    assert summary.ttft_ms is summary.itl_ms is None and summary.goodput == 0


def test_percentiles_go_by_nearest_rank() -> None:
    values = sorted(random.Random(1).sample(range(1000), 100))
    assert percentile(values, 0.99) == values[98] and percentile(values, 0.5) == values[49]
    assert percentile([7.0], 0.01) == percentile([7.0], 1.0) == 7.0


def test_the_page_needs_nothing_but_itself() -> None:
    outcomes = [outcome(i, 0.1 * i, 0.05) for i in range(1, 9)]
    summary = summarise(outcomes, TARGETS)
    settings = {"dataset": "<b>&", "arrivals": "8 at once"}
    text = page(draw(outcomes, summary, TARGETS, settings), summary, settings)
    assert text.count("src=") == 1 and 'src="data:image/png;base64,' in text
    assert "<b>" not in text and "http" not in text.split("base64,")[0]
    assert "8 of 8 requests answered" in text


def test_a_point_is_all_work_over_the_time_from_its_first_span_to_its_last() -> None:
    def span(name: str, start_s: float, end_s: float, **attributes: float) -> TraceSpan:
        times = (round(start_s * 1e9), round(end_s * 1e9))
        named = {f"baton.{key}": value for key, value in attributes.items()}
        return TraceSpan("t", "s", "", name, "decode", "i", *times, "ok", "", dict(named))

    spans = [
        span("decode", 0, 9, flops=9e9, bytes=9e9),
        span("decode.run", 1, 3, flops=1e9, bytes=2e9),
        span("decode.run", 2, 5, flops=3e9, bytes=2e9),
    ]
    point = point_of("decode", "2 at once", spans)
    roofs = Roofs(threads=1, flops_per_s=100e9, bytes_per_s=10e9)
    assert roofs.ridge == 10 and roofs.at(1) == 10e9 and roofs.at(1000) == 100e9
    row = point.as_json(roofs)
    assert (row["intensity"], row["flops_per_s"], row["limit"]) == (1.0, 1e9, "memory")
    assert row["of_the_roof"] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="no FLOPs"):
        point_of("prefill", "", spans)


def test_json_has_no_more_digits_than_mean_something() -> None:
    assert rounded({"a": (1 / 3, [2.00004]), "b": "x"}) == {"a": [0.3333, [2.0]], "b": "x"}


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--dataset", "poems"], "dataset"),
        (["serve", "--rate", "1", "--concurrency", "2"], "rate"),
        (["serve", "--plot", "picture.txt"], "plot"),
        (["serve", "--address", "127.0.0.1:1", "--requests", "1", "--trace", "missing"], "trace"),
        (["sweep", "--concurrency", "1,x"], "concurrency"),
        (["sweep", "--concurrency", "0"], "concurrency"),
        (["memory", "--sizes", "much"], "sizes"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    arguments: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {named}: ")


def test_memory_runs_both_loads_on_a_baton_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """96 KiB of the oracle's blocks are too few for the burst, so that it preempts or refuses."""
    command = (
        "baton bench memory --model oracle --colocated --sizes 96KiB --rate 20 --duration 1"
        " --burst 20 --prompt 64 --output 64 --max-queued 4 --json"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    result = json.loads(capsys.readouterr().out)
    steady, bursty = result["rows"]
    assert (steady["load"], bursty["load"]) == ("steady", "bursty")
    assert steady["num_requests"] == bursty["num_requests"] > 5
    for row in result["rows"]:
        assert row["num_ok"] + row["num_refused"] == row["num_requests"] and row["num_ok"] > 0
    assert bursty["preemptions"] + bursty["num_refused"] > 0


def test_a_conversation_of_one_turn_is_a_shared_prefix() -> None:
    sessions = conversations(3, 0, Conversation(16, 1, 4, 2))
    assert {session.turns[0].new_ids[:16] for session in sessions} == {
        sessions[0].turns[0].new_ids[:16]
    }
    assert {len(session.turns) for session in sessions} == {1}
    assert tokens(random.Random(3), 5) == tokens(random.Random(3), 5)


def test_a_name_that_is_no_dataset_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="multi-turn"):
        dataset("poems", 1, 0, 1, 1)
