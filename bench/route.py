"""Which worker a chat's next turn goes to: by cached prefix, or at random. JSON.

``python -m bench.route [--sessions 24] [--plot PATH]``

Multi-turn chats (cli/bench/workloads.py) over 2 prefill and 2 decode workers with the null model,
at full lengths, first with ``--routing auto``, then with ``--routing random``. A prompt token is
*recomputed* when an earlier turn of its chat, or an earlier chat's system prompt, had it, and a
worker computed it again all the same.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.bounds import at_most
from cli.bench.load import Ending, Outcome, run_closed
from cli.bench.plot import bars, new_figure, save
from cli.bench.report import rounded
from cli.bench.setup import baton
from cli.bench.workloads import CHAT, conversations

SEED = 23
CONCURRENCY = 6
NUM_BLOCKS = 4096
# Of the null model: turns of different chats overlap as they would, and prompts cost time.
STEP_MS = 2
TOKEN_US = 50
BOUND = 0.4
ROUTINGS = {"prefix-aware": "auto", "random": "random"}


async def bench_routing(routing: str, num_sessions: int) -> dict[str, Any]:
    flags = (
        "--model", "null", "--prefill", "2", "--decode", "2", "--routing", routing,
        "--num-blocks", str(NUM_BLOCKS), "--step-delay-ms", str(STEP_MS),
        "--token-delay-us", str(TOKEN_US),
    )  # fmt: skip
    sessions = conversations(num_sessions, SEED, CHAT)
    async with baton(*flags) as setup, setup.target() as target:
        outcomes = await run_closed(target, sessions, CONCURRENCY)
    return counts(outcomes)


def counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Tokens of prompts: computed, and of those the ones that had been computed before."""
    computed = new = prompt = 0
    is_first = True
    for outcome in sorted(outcomes, key=lambda outcome: outcome.start_s):
        if outcome.ending is not Ending.OK or outcome.usage is None:
            raise SystemExit(f"a request was not answered: {outcome.reason}")
        prompt += outcome.usage.prompt_tokens
        computed += outcome.usage.prefill_computed + outcome.usage.decode_computed
        new += CHAT.new + (CHAT.shared if is_first else 0)
        is_first = False
    return {
        "requests": len(outcomes),
        "prompt_tokens": prompt,
        "computed": computed,
        "recomputed": computed - new,
        "hit_rate": 1 - computed / prompt,
    }


def draw(found: dict[str, Any], path: Path) -> None:
    load = found["setup"]
    figure = new_figure(
        "What routing by prefix saves",
        f"{load['sessions']} chats of {CHAT.num_turns} turns over {load['workers']}",
        1,
    )
    figure.subplots_adjust(left=0.13)
    values = {name: found["routing"][name]["recomputed"] for name in ROUTINGS}
    bars(figure.axes[0], values, "prompt tokens computed though a worker had them")
    save(figure, path)


async def measure(num_sessions: int) -> dict[str, Any]:
    found = {}
    for name, routing in ROUTINGS.items():
        sys.stderr.write(f"routing {routing} ...\n")
        found[name] = await bench_routing(routing, num_sessions)
    ratio = found["prefix-aware"]["recomputed"] / max(1, found["random"]["recomputed"])
    return {
        "setup": {
            "workers": "2 prefill and 2 decode workers, null model",
            "sessions": num_sessions,
            "at_once": CONCURRENCY,
            "turns": CHAT.num_turns,
            "blocks_a_worker": NUM_BLOCKS,
            "step_ms": STEP_MS,
            "prompt_token_us": TOKEN_US,
            "seed": SEED,
        },
        "routing": found,
        "recomputed_over_random": at_most(ratio, BOUND, ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--plot", type=Path, help="picture to write")
    arguments = parser.parse_args()
    result = rounded(asyncio.run(measure(arguments.sessions)))
    if arguments.plot:
        draw(result, arguments.plot)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
