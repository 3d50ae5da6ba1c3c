"""`baton kv-waste`: the command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cli.kv_waste.distributions import DISTRIBUTIONS, generate
from cli.kv_waste.plot import check_plot, draw
from cli.kv_waste.policies import policies
from cli.kv_waste.replay import Replay
from cli.kv_waste.report import Report
from cli.kv_waste.workload import Workload, read_trace
from cli.model_shape import read_shape
from cli.output import print_json
from common.errors import ConfigError
from common.sizes import parse_bytes

# OPT-13B in 16 bits on an A100-40GB, as in table 1 of the PagedAttention paper: 40 layers, keys and
# values, 5,120 values of 2 bytes each; 12 GiB are the paper's 15.7K slots.
_TOKEN_BYTES = 40 * 2 * 5120 * 2
_MEMORY = "12GiB"


def kv_waste(
    trace: Annotated[
        Path | None, typer.Option(help="JSON Lines with input_length and output_length")
    ] = None,
    distribution: Annotated[
        str | None, typer.Option(help=f"instead of a trace: {', '.join(DISTRIBUTIONS)}")
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(min=1, help="longest prompt + output; default: the workload's own"),
    ] = None,
    memory: Annotated[str, typer.Option(help="memory for KV, as 12GiB")] = _MEMORY,
    model: Annotated[
        Path | None,
        typer.Option(help="a model's folder or config.json, for its bytes a token; else OPT-13B"),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="tokens a paged block")] = 16,
    shared_prefix: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="system prompt of all, with a distribution")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="of a distribution's lengths")] = 0,
    plot: Annotated[Path | None, typer.Option(help="picture to write: .png, .svg, .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Replay requests against four ways of allocating KV memory, and show what each wastes."""
    if plot is not None:
        check_plot(plot)
    memory_bytes = parse_bytes(memory, "memory")
    token_bytes = _TOKEN_BYTES if model is None else read_shape(model).kv_bytes_per_token()
    num_slots = memory_bytes // token_bytes
    if not num_slots:
        raise ConfigError("memory", f"{memory_bytes} bytes hold no token of {token_bytes} bytes")
    workload, source = _workload(trace, distribution, max_len, num_slots, shared_prefix, seed)
    # All four are made first: a memory that is too small for one of them is refused at once.
    replays = [Replay(workload, make(num_slots, workload)) for make in policies(block_size)]
    with _progress(len(workload.requests) * len(replays)) as on_end:
        outcomes = tuple(replay.run(on_end) for replay in replays)
    report = Report(workload, source, memory_bytes, token_bytes, block_size, outcomes)
    if plot is not None:
        draw(report, plot)
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)


def _workload(
    trace: Path | None,
    distribution: str | None,
    max_len: int | None,
    num_slots: int,
    shared_prefix: int,
    seed: int,
) -> tuple[Workload, str]:
    """The requests, and where their lengths come from."""
    if trace is None:
        name = distribution or "chat"
        workload = generate(name, seed, num_slots, max_len, shared_prefix)
        return workload, DISTRIBUTIONS[name].source
    if distribution is not None:
        raise ConfigError("distribution", "give either a trace or a distribution")
    if shared_prefix:
        raise ConfigError("shared-prefix", "a trace names its own prefixes, by hash_ids")
    return read_trace(trace, max_len), trace.name


def _print(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(report.title(), style="bold", markup=False)
    console.print()
    console.print(report.table())
    console.print()
    for note in report.notes():
        console.print(note, style="dim", markup=False)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """On a terminal only, and on stderr: what is printed stays clean."""
    console = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
