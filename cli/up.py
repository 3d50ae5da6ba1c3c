"""`baton up`: everything on this machine, by one command, in the foreground.

The processes are those that compose and Kubernetes start; only nats-server, credentials and ports
are chosen here. stdout carries the address panel, or with ``--json`` one line; what happens while
they run goes to stderr, their logs to the run's folder.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cli.child import ChildSpec, Ready
from cli.launch_plan import CHOSEN, MAX_POOL, LaunchPlan, Pools
from cli.models import prepared
from cli.otlp import OtlpReceiver
from cli.output import print_json, print_plain
from cli.progress import Progress
from cli.run_dir import RunDir, RunState
from cli.scaling import Scaler
from cli.settings_flags import ConfigFile, with_settings
from cli.supervisor import Supervisor
from cli.supervisor_service import SupervisorServer
from common.config import DecodeSettings, GatewaySettings, PrefillSettings, read_secret
from common.nats_server import NatsServer

T = TypeVar("T")


class _Stopped(Exception):
    """A signal came."""


@dataclass(frozen=True, slots=True)
class Running:
    """What is up."""

    gateways: list[Ready]
    workers: list[Ready]
    log_dir: Path
    public_tls: bool


@with_settings(GatewaySettings, PrefillSettings, DecodeSettings, without=CHOSEN)
def up(
    prefill: Annotated[
        int, typer.Option(min=0, max=MAX_POOL, help="workers that compute prompts")
    ] = 1,
    decode: Annotated[
        int, typer.Option(min=0, max=MAX_POOL, help="workers that generate tokens")
    ] = 1,
    colocated: Annotated[
        int, typer.Option(min=0, max=MAX_POOL, help="workers that do both by themselves")
    ] = 0,
    gateways: Annotated[
        int, typer.Option(min=1, max=16, help="processes that clients talk to, a port each")
    ] = 1,
    model: Annotated[
        str, typer.Option(help="default, oracle, null, a model's folder or a .gguf file")
    ] = "default",
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="of the first gateway; 0 means free")
    ] = 50051,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="OpenAI-compatible, the same way")
    ] = 8000,
    otlp: Annotated[
        str | None, typer.Option(help="OTLP/gRPC collector that traces go to as well")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one line when ready")] = False,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="allow faults to be injected; never for real requests")
    ] = False,
    config: ConfigFile = None,
    **settings: Any,
) -> None:
    """Start a whole Baton on this machine and stop it again on Ctrl-C."""
    pools = Pools(prefill, decode, colocated, gateways)
    if chaos:
        settings["allow_failpoints"] = True
    plan = LaunchPlan(pools, grpc_port, http_port, config, settings)

    async def announce(running: Running) -> None:
        _announce(running, as_json)
        await asyncio.Event().wait()

    asyncio.run(run(plan, model, otlp, announce, quiet=as_json))


async def run(
    plan: LaunchPlan,
    model: str,
    otlp: str | None,
    use: Callable[[Running], Awaitable[None]],
    quiet: bool = False,
) -> None:
    """Starts everything, calls ``use``, and stops everything when that returns or a signal comes;
    a second signal stops at once. ``quiet``: says nothing of how the start goes."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            # The kernel kills the children (common/child.py).
            os._exit(1)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    with suppress(_Stopped):
        await _run(plan, model, otlp, use, stop, quiet)


async def _run(
    plan: LaunchPlan,
    model: str,
    otlp: str | None,
    use: Callable[[Running], Awaitable[None]],
    stop: asyncio.Event,
    quiet: bool,
) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    progress = Progress(console, quiet)
    drain_budget_s = plan.check()
    async with AsyncExitStack() as stack:
        run_dir = RunDir()
        stack.callback(run_dir.close)
        run_dir.save(_starting(model, run_dir))
        stack.callback(progress.end)
        progress(f"preparing the model {model}")
        entry = await _unless(stop, prepared(model))
        progress("starting nats-server")
        nats = NatsServer(run_dir.path / "nats", tls=plan.tls)
        nats.start()
        stack.callback(nats.stop)
        token = read_secret(run_dir.token_file, "token_file")
        receiver = OtlpReceiver(token, forward_to=otlp)
        links = (nats, run_dir.token_file, await receiver.start(), entry)
        stack.push_async_callback(receiver.stop)
        service = SupervisorServer(receiver, token)
        await service.start()
        stack.push_async_callback(service.stop)
        supervisor = Supervisor(
            nats=nats,
            workers=plan.workers(*links),
            gateways=plan.gateways(*links),
            token=token,
            log_dir=run_dir.path,
            drain_budget_s=drain_budget_s,
            report=lambda text: console.print(f"baton: {text}", style="yellow"),
            progress=progress,
            on_change=lambda: run_dir.save(_state(supervisor, entry, service, run_dir)),
        )
        scaler = Scaler(supervisor, partial(_make_worker, plan, links))
        stack.push_async_callback(scaler.close)
        stack.push_async_callback(supervisor.stop)
        await _unless(stop, supervisor.start())
        service.can_scale(scaler)
        run_dir.save(_state(supervisor, entry, service, run_dir))
        progress.end()
        running = Running(
            supervisor.gateways, supervisor.workers, run_dir.path, plan.has_public_tls
        )
        await _unless(stop, use(running), lambda: console.print(_stopping(drain_budget_s)))


def _make_worker(
    plan: LaunchPlan,
    links: tuple[NatsServer, Path, str, str],
    pool: str,
    index: int,
    num_threads: int,
) -> ChildSpec:
    return plan.worker(pool, index, num_threads, *links)


async def _unless(
    stop: asyncio.Event, work: Awaitable[T], on_stop: Callable[[], None] = lambda: None
) -> T:
    """The result of ``work``. When ``stop`` is set first, calls ``on_stop``, cancels the work and
    raises _Stopped."""
    loop = asyncio.get_running_loop()
    task, stopped = asyncio.ensure_future(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            on_stop()
            raise _Stopped
        return task.result()
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _stopping(drain_budget_s: float) -> str:
    return (
        f"baton: stopping: waiting up to {drain_budget_s:g} s for running requests; "
        "Ctrl-C again stops at once"
    )


def _starting(model: str, run_dir: RunDir) -> RunState:
    return RunState(os.getpid(), model, (), "", str(run_dir.token_file), (), starting=True)


def _state(
    supervisor: Supervisor, model: str, service: SupervisorServer, run_dir: RunDir
) -> RunState:
    return RunState(
        pid=os.getpid(),
        model=model,
        grpc=tuple(gateway.grpc for gateway in supervisor.gateways),
        supervisor=service.address,
        token_file=str(run_dir.token_file),
        processes=tuple(asdict(ready) for ready in (*supervisor.gateways, *supervisor.workers)),
    )


def _announce(running: Running, as_json: bool) -> None:
    if as_json:
        workers = [{"id": w.id, "role": w.role, "pid": w.pid} for w in running.workers]
        first = running.gateways[0]
        addresses = {"grpc": first.grpc, "http": first.http}
        print_json({"ready": True, **addresses, "workers": workers})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("role", "id", "pid", "grpc", "http", "admin"):
        table.add_column(column, header_style="bold")
    for ready in (*running.gateways, *running.workers):
        table.add_row(*(ready.role, ready.id, str(ready.pid), ready.grpc, ready.http, ready.admin))
    print_plain(table)
    console = Console(highlight=False)
    console.print()
    console.print(f"logs      {running.log_dir}", soft_wrap=True)
    scheme = "https" if running.public_tls else "http"
    console.print(f"openai    base_url={scheme}://{running.gateways[0].http}/v1", soft_wrap=True)
    console.print('try       baton generate "The capital of France is" --max-tokens 16')
