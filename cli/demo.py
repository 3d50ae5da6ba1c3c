"""`baton demo`: one prefill and one decode worker, one question, and where its time went."""

import asyncio

from rich.console import Console

from cli.generate import completion_of
from cli.launch_plan import LaunchPlan, Pools
from cli.output import phase_table, print_text
from cli.up import Running, run
from common.client import BatonClient, Chat, Chunk, Sampling

_QUESTION = "What is the capital of France?"


def demo() -> None:
    """Start everything with the small default model, ask it something, show the phases, stop."""
    plan = LaunchPlan(Pools(prefill=1, decode=1, colocated=0, gateways=1), 0, 0, None, {})
    Console(stderr=True).print("starting one prefill and one decode worker ...", style="dim")
    asyncio.run(run(plan, "default", None, _ask))


async def _ask(running: Running) -> None:
    console = Console(highlight=False)
    for worker in running.workers:
        console.print(f"{worker.role:8} pid {worker.pid}", style="dim")
    console.print(f"\n[bold]> {_QUESTION}[/bold]")
    chunks: list[Chunk] = []
    async with BatonClient(running.gateways[0].grpc) as client:
        chat = Chat((("user", _QUESTION),))
        async for chunk in client.generate(chat, Sampling(max_tokens=48, temperature=0.0)):
            chunks.append(chunk)
            print_text(chunk.text)
    print_text("\n\n")
    console.print(phase_table(completion_of(chunks).phases_ms))
