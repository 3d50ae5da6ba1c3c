"""`baton trace`: where each millisecond of one request went, over all processes."""

import asyncio
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from grpc import aio
from rich.text import Text
from rich.tree import Tree

from cli.otlp import TraceSpan, spans_of
from cli.output import print_json, print_plain, rounded_ms
from cli.run_dir import find_run
from common import rpc
from common.config import read_secret
from common.wire import supervisor as wire
from common.wire import supervisor_grpc

_TIMEOUT_S = 10.0
# Spans are sent in batches: a trace asked for at once may lack its last ones.
_SETTLE_S, _NUM_LOOKS = 0.5, 6


# Attributes for other tools, of which the tree shows the value under another name.
_SAID_TWICE = (
    "gen_ai.latency.",
    "gen_ai.provider.",
    "gen_ai.request.id",
    "gen_ai.request.n",
    "gen_ai.response.id",
    "gen_ai.response.model",
    "gen_ai.usage.completion_tokens",
    "gen_ai.usage.prompt_tokens",
)


def trace(
    trace_id: Annotated[str, typer.Argument(metavar="ID", help="trace id or request id")],
    as_json: Annotated[bool, typer.Option("--json", help="all spans as JSON")] = False,
) -> None:
    """Show one request's trace as a tree."""
    found, spans = asyncio.run(_fetch(trace_id))
    if as_json:
        print_json({"trace_id": found, "spans": [_as_dict(span) for span in spans]})
    else:
        print_plain(tree_of(found, spans))


def tree_of(trace_id: str, spans: list[TraceSpan]) -> Tree:
    """Children under their parents; a span whose parent is not here is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        children[span.parent_id if span.parent_id in known else ""].append(span)
    start_ns = min((span.start_ns for span in spans), default=0)
    tree = Tree(f"trace {trace_id}")

    def add(branch: Tree, parent_id: str) -> None:
        for span in children.pop(parent_id, ()):
            add(branch.add(_label(span, start_ns)), span.span_id)

    add(tree, "")
    return tree


async def _fetch(id_: str) -> tuple[str, list[TraceSpan]]:
    state = find_run()
    token = read_secret(Path(state.token_file), "token_file")
    channel = rpc.make_internal_channel(state.supervisor, token)
    try:
        for look in range(_NUM_LOOKS):
            await asyncio.sleep(_SETTLE_S if look else 0.0)
            response = await _get(channel, id_)
            spans = spans_of(response.resource_spans)
            if _complete(spans):
                break
    finally:
        await channel.close()
    return response.trace_id, spans


async def _get(channel: aio.Channel, id_: str) -> wire.GetTraceResponse:
    stub = supervisor_grpc.SupervisorServiceStub(channel)
    try:
        return await stub.GetTrace(wire.GetTraceRequest(id=id_), timeout=_TIMEOUT_S)
    except aio.AioRpcError as error:
        raise rpc.to_baton_error(error) from None


def _complete(spans: list[TraceSpan]) -> bool:
    """All parents are there, and of each attempt that went well what its decode worker did."""
    known = {span.span_id for span in spans}
    decoded = {span.parent_id for span in spans if span.name == "decode"}
    return all(not span.parent_id or span.parent_id in known for span in spans) and all(
        span.span_id in decoded
        for span in spans
        if "baton.decode_worker" in span.attributes and span.status != "error"
    )


def _label(span: TraceSpan, start_ns: int) -> Text:
    offset_ms = (span.start_ns - start_ns) / 1e6
    text = Text.assemble(
        (span.name, "bold"),
        f"  {span.duration_ms:.1f} ms",
        (f"  at {offset_ms:.1f}  {span.service}", "dim"),
    )
    if span.status == "error":
        text.append(f"  {span.error or 'error'}", "red")
    for name, value in span.attributes.items():
        if name.startswith(_SAID_TWICE):
            continue
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        text.append(f"  {name.removeprefix('baton.')}={shown}", "cyan")
    return text


def _as_dict(span: TraceSpan) -> dict[str, object]:
    return {**asdict(span), "duration_ms": rounded_ms(span.duration_ms)}
