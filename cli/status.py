"""`baton status`: who is there, what they do, and who holds which blocks."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cli.ledgers import show_ledgers
from cli.output import print_json, print_plain
from cli.run_dir import find_run
from cli.target import Address, gateway_client
from common.config import read_secret
from common.wire import inference

_BLOCKS = ("total", "free", "cached", "in_use", "leased", "importing")


def status(
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
    with_blocks: Annotated[
        bool, typer.Option("--blocks", help="every KV block: its state, who holds it, since when")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="the run's token, for --blocks; default: of the `baton up` here"),
    ] = None,
) -> None:
    """Show all workers with their load and their KV blocks."""
    with gateway_client(address) as client:
        listing = client.list_workers()
    if with_blocks:
        token = read_secret(token_file or Path(find_run().token_file), "token_file")
        admins = {worker.worker_id: worker.admin_endpoint for worker in listing.workers}
        show_ledgers(admins, token, as_json)
    elif as_json:
        refused = [_refused(worker) for worker in listing.refused]
        print_json({"workers": [_worker(w) for w in listing.workers], "refused": refused})
    else:
        print_plain(_table(listing))


def _worker(worker: inference.WorkerStatus) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "epoch": worker.epoch,
        "endpoint": worker.endpoint,
        "admin": worker.admin_endpoint,
        "pid": worker.pid,
        "state": worker.state,
        "transport": _transport(worker),
        "bytes_moved": sum(worker.bytes_moved.values()),
        "kv_links": dict(worker.kv_links),
        "running": worker.running,
        "waiting": worker.waiting,
        "blocks": {name: getattr(worker.blocks, name) for name in _BLOCKS},
    }


def _transport(worker: inference.WorkerStatus) -> str:
    """The one that moved most, else the one that it would use first."""
    if any(worker.bytes_moved.values()):
        return max(worker.bytes_moved, key=lambda name: worker.bytes_moved[name])
    return next(iter(worker.transports), "")


def _refused(worker: inference.RefusedWorker) -> dict[str, str]:
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "field": worker.field,
        "expected": worker.expected,
        "actual": worker.actual,
    }


def _table(listing: inference.ListWorkersResponse) -> Table:
    """What they do, and below it who holds which blocks."""
    load, blocks, refused = (Table(box=None, pad_edge=False) for _ in range(3))
    for column in ("worker", "role", "state", "pid", "moved", "running", "waiting"):
        load.add_column(column, header_style="bold")
    for column in ("blocks of", *(name.replace("_", " ") for name in _BLOCKS)):
        blocks.add_column(column, header_style="bold")
    for worker in map(_worker, listing.workers):
        moved = f"{worker['transport']} {worker['bytes_moved'] / 1e6:.1f} MB"
        plain = (worker["id"], worker["role"], worker["state"], worker["pid"], moved)
        load.add_row(*map(str, (*plain, worker["running"], worker["waiting"])))
        blocks.add_row(worker["id"], *map(str, worker["blocks"].values()))
    for other in listing.refused:
        reason = f"{other.field} is {other.actual}, expected {other.expected}"
        refused.add_row(other.worker_id, other.role, "refused:", reason)
    whole = Table.grid()
    for part in (load, "", blocks, *(("", refused) if listing.refused else ())):
        whole.add_row(part)
    return whole
