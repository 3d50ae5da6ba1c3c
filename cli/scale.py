"""`baton scale`: more or fewer workers in the pools of a running `baton up`."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from grpc import aio
from rich.console import Console
from rich.status import Status

from cli.output import print_json
from cli.run_dir import find_run
from cli.scaling import SCALABLE
from common import rpc
from common.config import read_secret
from common.errors import InvalidRequest
from common.wire import supervisor as wire
from common.wire import supervisor_grpc

_EXAMPLES = [f"{pool}=2" for pool in SCALABLE]
# More than the supervisor takes, and what a uint32 holds.
_MAX_COUNT = (1 << 32) - 1
_WORDS = {
    wire.ScaleResponse.CHANGE_STARTING: "starting",
    wire.ScaleResponse.CHANGE_STARTED: "started",
    wire.ScaleResponse.CHANGE_DRAINING: "draining",
    wire.ScaleResponse.CHANGE_DRAINED: "drained",
}


def scale(
    sizes: Annotated[
        list[str],
        typer.Argument(metavar="POOL=COUNT...", help="prefill=2 decode=3, or one of them"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="one line when done")] = False,
) -> None:
    """Add workers to a running `baton up`, or drain some: no request fails by it."""
    done = asyncio.run(_scale(parsed(sizes), Console(stderr=True, highlight=False, quiet=as_json)))
    if as_json:
        print_json({"started": done["started"], "drained": done["drained"]})
    elif not done:
        Console(highlight=False).print("the pools have these sizes already")


def parsed(sizes: list[str]) -> wire.ScaleRequest:
    request = wire.ScaleRequest()
    for size in sizes:
        pool, _, count = size.partition("=")
        if pool not in SCALABLE or not count.isascii() or not count.isdigit():
            raise InvalidRequest("scale", f"{size!r} is not like {' or '.join(_EXAMPLES)}")
        if request.HasField(pool):
            raise InvalidRequest("scale", f"{pool} is given twice")
        setattr(request, pool, min(int(count), _MAX_COUNT))
    return request


async def _scale(request: wire.ScaleRequest, console: Console) -> dict[str, list[str]]:
    """Ids of the workers started and drained."""
    state = find_run()
    token = read_secret(Path(state.token_file), "token_file")
    done: dict[str, list[str]] = defaultdict(list)
    waiting: dict[str, str] = {}
    async with rpc.make_internal_channel(state.supervisor, token) as channel:
        call = supervisor_grpc.SupervisorServiceStub(channel).Scale(request)
        try:
            with console.status("asking") as status:
                async for change in call:
                    _follow(change, done, waiting)
                    _show(change, waiting, console, status)
        except aio.AioRpcError as error:
            raise rpc.to_baton_error(error) from None
        finally:
            call.cancel()
    return done


def _follow(
    change: wire.ScaleResponse, done: dict[str, list[str]], waiting: dict[str, str]
) -> None:
    word = _WORDS[change.change]
    if word in ("starting", "draining"):
        waiting[change.label] = word
    else:
        waiting.pop(change.label, None)
        done[word].append(change.worker_id)


def _show(
    change: wire.ScaleResponse, waiting: dict[str, str], console: Console, status: Status
) -> None:
    cut = f", cut short (status {change.exit_status})" if change.exit_status else ""
    if change.label not in waiting:
        console.print(f"{change.label:12} {_WORDS[change.change]}{cut}  {change.worker_id}")
    status.update("waiting for " + ", ".join(f"{label} ({w})" for label, w in waiting.items()))
