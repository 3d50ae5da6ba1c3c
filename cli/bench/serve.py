"""`baton bench serve`: latency, throughput and goodput of a running server, Baton or not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cli.bench.load import Outcome, run_closed, run_open
from cli.bench.page import write_page
from cli.bench.plot import save
from cli.bench.progress import progress
from cli.bench.report import as_json as summary_json
from cli.bench.report import headline, latency_table
from cli.bench.serve_plot import draw
from cli.bench.summary import Summary, Targets, summarise
from cli.bench.target import GrpcTarget, Target
from cli.bench.workloads import DATASETS, Session, dataset, from_trace, poisson_of
from cli.kv_waste.plot import check_plot
from cli.output import print_json, print_plain
from cli.target import Address, gateway_address
from common.config import read_token
from common.errors import ConfigError, Unavailable

_WARM_UP_AT_ONCE = 4
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Server:
    """Which server, and by which protocol: gRPC where ``url`` is None."""

    url: str | None
    address: str | None
    model: str | None
    is_chat: bool
    api_key: str

    @asynccontextmanager
    async def target(self) -> AsyncIterator[Target]:
        target: Target
        if self.url is None:
            target = GrpcTarget(gateway_address(self.address))
        else:
            # Its HTTP client is not for the serving processes, which are this program too.
            from cli.bench.http_target import HttpTarget

            target = await HttpTarget.connect(self.url, self.model, self.is_chat, self.api_key)
        try:
            yield target
        finally:
            await target.close()


@dataclass(frozen=True, slots=True)
class Load:
    """``arrivals`` None: closed loop of ``at_once``. ``how`` says it in words."""

    warm_up: list[Session]
    sessions: list[Session]
    arrivals: list[float] | None
    how: str
    at_once: int = 0

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def as_json(self) -> dict[str, Any]:
        return {
            "sessions": len(self.sessions),
            "warm_up_sessions": len(self.warm_up),
            "arrivals": self.how,
        }


def serve(
    url: Annotated[
        str | None, typer.Option(help="OpenAI endpoint, such as http://127.0.0.1:8000")
    ] = None,
    address: Address = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="with --url: chat completions, not completions")
    ] = False,
    model: Annotated[str | None, typer.Option(help="with --url; default: the first")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="with --url; mode 0600")] = None,
    data: Annotated[str, typer.Option("--dataset", help=", ".join(DATASETS))] = "random",
    trace: Annotated[
        Path | None, typer.Option(help="instead: JSON Lines as of `baton kv-waste`, with arrivals")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="sessions to play")] = 100,
    warm_up: Annotated[int, typer.Option(min=0, help="sessions before, not counted")] = 4,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="sessions a second, Poisson (open loop)")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="instead: so many at once (closed loop); default 8")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="mean tokens of a prompt")] = 256,
    output: Annotated[int, typer.Option(min=1, help="mean tokens of an output")] = 64,
    max_len: Annotated[int | None, typer.Option(min=1, help="of a trace's requests")] = None,
    ttft: Annotated[float, typer.Option(min=1, help="target, ms")] = 2000.0,
    tpot: Annotated[float, typer.Option(min=1, help="target, ms")] = 100.0,
    seed: Annotated[int, typer.Option(min=0, help="of lengths, tokens and arrivals")] = 0,
    plot: Annotated[Path | None, typer.Option(help="picture to write: .png, .svg, .pdf")] = None,
    html: Annotated[Path | None, typer.Option(help="page with everything in it to write")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Play a load on a running server: the `baton up` here, or any OpenAI endpoint."""
    _check_files(plot, html)
    targets = Targets(ttft / 1000, tpot / 1000)
    if trace is not None:
        sessions = from_trace(trace, requests + warm_up, max_len)
    else:
        sessions = dataset(data, requests + warm_up, seed, prompt, output)
    load = make_load(sessions, warm_up, rate, concurrency, seed)
    server = Server(url, address, model, chat, read_token(api_key_file, "api_key_file"))
    kind = "OpenAI, chat" if chat else "OpenAI, completions"
    settings: dict[str, Any] = {"server": f"{url}, {kind}" if url else "Baton, gRPC"}
    settings["dataset"] = trace.name if trace else data
    if trace is None and data == "random":
        settings |= {"mean_prompt_tokens": prompt, "mean_output_tokens": output}
    limits = {"ttft_target_ms": ttft, "tpot_target_ms": tpot, "seed": seed}
    outcomes = asyncio.run(_play(server, load))
    _tell(outcomes, targets, {**settings, **load.as_json(), **limits}, plot, html, as_json)


def _check_files(plot: Path | None, html: Path | None) -> None:
    """Raises ConfigError, before anything is sent, where no picture could be written."""
    for picture in (plot, html and html.with_suffix(".png")):
        if picture is not None:
            check_plot(picture)


def _tell(
    outcomes: list[Outcome],
    targets: Targets,
    settings: dict[str, Any],
    plot: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    summary = summarise(outcomes, targets)
    if plot is not None:
        save(draw(outcomes, summary, targets, settings), plot)
    if html is not None:
        write_page(html, draw(outcomes, summary, targets, settings), summary, settings)
    if as_json:
        print_json({"settings": settings, **summary_json(summary)})
    else:
        _print(summary)
    if not summary.num_ok:
        raise Unavailable("no request was answered")


def make_load(
    sessions: list[Session],
    num_warm_up: int,
    rate: float | None,
    concurrency: int | None,
    seed: int,
) -> Load:
    """The first sessions warm up. A trace has its own arrivals, unless a rate or a concurrency is
    given. Raises ConfigError for what contradicts itself."""
    if rate is not None and concurrency is not None:
        raise ConfigError("rate", "give either a rate or a concurrency")
    if len(sessions) <= num_warm_up:
        raise ConfigError("warm-up", f"leaves nothing of {len(sessions)} sessions to count")
    warm_up, played = sessions[:num_warm_up], sessions[num_warm_up:]
    own = [session.arrival_s for session in played if session.arrival_s is not None]
    if rate is not None:
        arrivals = poisson_of(len(played), rate, seed)
        return Load(warm_up, played, arrivals, f"Poisson, {rate:g} a second")
    if own and concurrency is None:
        arrivals = [arrival_s - own[0] for arrival_s in own]
        return Load(warm_up, played, arrivals, "as in the trace")
    at_once = concurrency or _AT_ONCE
    return Load(warm_up, played, None, f"{at_once} at once", at_once)


async def _play(server: Server, load: Load) -> list[Outcome]:
    with progress() as steps:
        async with server.target() as target:
            warm_up = await run_closed(target, load.warm_up, _WARM_UP_AT_ONCE)
            if bad := [outcome.reason for outcome in warm_up if outcome.reason]:
                note = f"{len(bad)} warm-up requests were not answered: {bad[0]}"
                Console(stderr=True, highlight=False).print(note, style="red", markup=False)
            with steps.step("requests", load.num_requests) as on_end:
                if load.arrivals is None:
                    return await run_closed(target, load.sessions, load.at_once, on_end)
                return await run_open(target, load.sessions, load.arrivals, on_end)


def _print(summary: Summary) -> None:
    print_plain(latency_table(summary))
    console = Console(highlight=False, soft_wrap=True)
    console.print()
    console.print(headline(summary), markup=False)
    for reason, number in summary.reasons.items():
        console.print(f"{number} x {reason}", style="red", markup=False)
