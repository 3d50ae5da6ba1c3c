"""What prefix caching saves on three generated workloads, in one process and in two pools. JSON.

``python -m bench.prefix [--sessions 1.0] [--no-ttft]``

The workloads (parameters and seeds: cli/bench/workloads.py) are questions about shared documents,
chats and agents, each at full length through `baton up --model null`, which computes nothing, so
that hit rates are those of the real path and cost no time. *Hit rate* is the share of all prompt
tokens that were found in a cache. Two pools have two caches: the prefill worker's, which never saw
an answer's tokens, and the decode worker's, which did.

*Time to first token* is taken on SmolLM2 with a few sessions of the same shape, with the cache and
with ``--no-enable-prefix-caching``, one request at a time.

The claim that this checks is 75 to 95 %. ``ceiling`` is the most that any cache could give: all
tokens that an earlier request had too. It depends on the workload alone.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from operator import eq
from typing import Any

from cli.bench.load import Ending, Outcome, run_closed
from cli.bench.report import rounded
from cli.bench.setup import baton
from cli.bench.workloads import AGENT, CHAT, RAG, Conversation, Rag, Session, conversations, rag
from common.types import TokenId

SEED = 11
CONCURRENCY = 4
# KV of 131,072 tokens: no workload here fills it, and `pressure` says what less does.
NUM_BLOCKS = 8192
PRESSURE_BLOCKS = 1024
SETUPS = {
    "one process": ("--prefill", "0", "--decode", "0", "--colocated", "1"),
    "two pools": ("--prefill", "1", "--decode", "1"),
}
CLAIM = (0.75, 0.95)


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_sessions`` at full length on the null model, and ``timed`` on SmolLM2: the same shape,
    with fewer sessions, turns and output tokens."""

    params: Rag | Conversation
    num_sessions: int
    timed: Rag | Conversation
    num_timed: int
    reason: str

    def sessions(self, share: float) -> list[Session]:
        return _sessions(self.params, max(2, round(self.num_sessions * share)))

    def timed_sessions(self) -> list[Session]:
        return _sessions(self.timed, self.num_timed)


def _sessions(params: Rag | Conversation, num_sessions: int) -> list[Session]:
    if isinstance(params, Rag):
        return rag(num_sessions, SEED, params)
    return conversations(num_sessions, SEED, params)


WORKLOADS = {
    "rag": Workload(
        RAG, 200, replace(RAG, num_documents=2, answer=2), 5,
        "one miss a document, then only the question is new: it rises with questions a document",
    ),
    "chat": Workload(
        CHAT, 16, replace(CHAT, num_turns=4, answer=16), 2,
        "every turn but the first has its whole history in the cache of whoever decoded it",
    ),
    "agent": Workload(
        AGENT, 12, replace(AGENT, num_turns=3, answer=16), 2,
        "the system prompt and tools are shared by all, and steps are many and short",
    ),
}  # fmt: skip


# ---------------------------------------------------------------- hits


def ceiling(sessions: Sequence[Session]) -> float:
    """Share of prompt tokens that an earlier turn, or the start of an earlier session, had too."""
    total = new = 0
    starts: list[tuple[TokenId, ...]] = []
    for session in sessions:
        first = session.turns[0].new_ids
        new -= max((_num_shared(start, first) for start in starts), default=0)
        starts.append(first)
        length = 0
        for turn in session.turns:
            length += len(turn.new_ids)
            new += len(turn.new_ids)
            total += length
            length += turn.max_tokens
    return 1 - new / total


def _num_shared(a: Sequence[TokenId], b: Sequence[TokenId]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))


def hits(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of both caches, in tokens of prompts."""
    usages = [outcome.usage for outcome in outcomes if outcome.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    computed = sum(usage.prefill_computed + usage.decode_computed for usage in usages)
    on_decode = sum(usage.decode_cached for usage in usages)
    return {
        "requests": len(usages),
        "prompt_tokens": prompt,
        "tokens_saved": prompt - computed,
        "hit_rate": 1 - computed / prompt,
        "decode_hit_rate": on_decode / prompt,
        "tokens_transferred": sum(usage.decode_transferred for usage in usages),
    }


async def bench_hits(workload: Workload, share: float, num_blocks: int) -> dict[str, Any]:
    sessions = workload.sessions(share)
    found: dict[str, Any] = {}
    for name, pools in SETUPS.items():
        flags = ("--model", "null", "--num-blocks", str(num_blocks), *pools)
        async with baton(*flags) as setup, setup.target() as target:
            outcomes = await run_closed(target, sessions, CONCURRENCY)
        _check(outcomes)
        found[name] = hits(outcomes)
    return found


def _check(outcomes: Sequence[Outcome]) -> None:
    bad = [outcome.reason for outcome in outcomes if outcome.ending is not Ending.OK]
    if bad:
        raise SystemExit(f"{len(bad)} requests were not answered: {bad[0]}")


# ---------------------------------------------------------------- time


async def bench_ttft(workload: Workload) -> dict[str, Any]:
    p50_ms: dict[bool, float] = {}
    mean_ms: dict[bool, float] = {}
    for cached in (True, False):
        flag = "--enable-prefix-caching" if cached else "--no-enable-prefix-caching"
        async with baton("--model", "default", flag) as setup, setup.target() as target:
            outcomes = await run_closed(target, workload.timed_sessions(), 1)
        _check(outcomes)
        times_ms = [1000 * outcome.ttft_s for outcome in outcomes]
        p50_ms[cached], mean_ms[cached] = statistics.median(times_ms), statistics.fmean(times_ms)
    return {
        "requests": len(outcomes),
        "shape": asdict(workload.timed),
        "ttft_p50_ms": {"cached": p50_ms[True], "not cached": p50_ms[False]},
        "ttft_mean_ms": {"cached": mean_ms[True], "not cached": mean_ms[False]},
        "ttft_mean_saved": 1 - mean_ms[True] / mean_ms[False],
    }


# ---------------------------------------------------------------- all of it


def verdict(hit_rate: float, reason: str) -> str:
    least, most = CLAIM
    where = "above" if hit_rate > most else "below" if hit_rate < least else "inside"
    return f"{100 * hit_rate:.1f} %, {where} the claim of 75 to 95 %: {reason}"


async def measure(share: float, with_ttft: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        sys.stderr.write(f"{name}: hits ...\n")
        sessions = workload.sessions(share)
        by_setup = await bench_hits(workload, share, NUM_BLOCKS)
        sys.stderr.write(f"{name}: hits with an eighth of the memory ...\n")
        pressed = await bench_hits(workload, share, PRESSURE_BLOCKS)
        found[name] = {
            "workload": {**asdict(workload.params), "sessions": len(sessions), "seed": SEED},
            "ceiling": ceiling(sessions),
            **by_setup,
            "hit_rate_under_pressure": {k: v["hit_rate"] for k, v in pressed.items()},
            "verdict": verdict(by_setup["one process"]["hit_rate"], workload.reason),
        }
        if with_ttft:
            sys.stderr.write(f"{name}: time to first token ...\n")
            found[name]["time"] = await bench_ttft(workload)
    return {
        "setup": {
            "hits": f"null model, {NUM_BLOCKS} blocks (pressure: {PRESSURE_BLOCKS}) of 16 tokens a"
            f" worker, {CONCURRENCY} sessions at once",
            "time": "SmolLM2-135M-Instruct, 1 prefill and 1 decode worker, one request at a time",
        },
        "claim": {"hit_rate": list(CLAIM)},
        "workloads": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=float, default=1.0, help="share of the sessions")
    parser.add_argument("--no-ttft", action="store_true", help="hit rates only")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.sessions, not arguments.no_ttft))
    print(json.dumps(rounded(result), indent=2))


if __name__ == "__main__":
    main()
