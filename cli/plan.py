"""`baton plan`: how many requests a memory serves, before anything is bought or started.

    memory x utilisation - weights = KV budget;  budget / bytes a block - null block = blocks

What it cannot know from a config is what a step needs besides (activations, the device's context
and graphs); a worker on a GPU measures that and subtracts it too. So a plan is an upper bound.
"""

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cli.model_shape import ModelShape, read_shape
from cli.models import prepared
from cli.output import print_json
from cli.prepare import DEFAULT_MODEL
from common.errors import ConfigError
from common.sizes import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """``*_requests``: how many requests of this prompt and output fit at once, each at its longest.
    Contiguous: one region of ``max_model_len`` tokens each. Paged: whole blocks each."""

    model: str
    dtype: str
    num_parameters: int
    memory_bytes: int
    gpu_memory_utilization: float
    weight_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_token: int
    block_size: int
    block_bytes: int
    num_blocks: int
    max_model_len: int
    prompt_tokens: int
    output_tokens: int
    blocks_per_request: int
    contiguous_requests: int
    paged_requests: int

    @property
    def weight_share(self) -> float:
        return self.weight_bytes / self.memory_bytes


def plan(
    model: Annotated[
        str, typer.Option(help="default, prepared entry, Hugging Face folder or config.json")
    ],
    memory: Annotated[str, typer.Option(help="the device's, as 80GiB")],
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens of a request")],
    output: Annotated[int, typer.Option(min=1, help="output tokens of a request")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; default: the config's")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, max=256, help="tokens a KV block")] = 16,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="share of the device")
    ] = 0.9,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="longest prompt + output; default: the model's")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the plan as JSON")] = False,
) -> None:
    """Tell how many requests fit into a memory, from the model's config alone."""
    made = make_plan(
        read_shape(_path_of(model)),
        memory_bytes=parse_bytes(memory, "memory"),
        request=(prompt, output),
        dtype=dtype,
        block_size=block_size,
        utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
    )
    if as_json:
        print_json({**asdict(made), "weight_share": round(made.weight_share, 6)})
    else:
        _print(made)


def _path_of(model: str) -> Path:
    return Path(asyncio.run(prepared(model)) if model == DEFAULT_MODEL else model)


def make_plan(
    shape: ModelShape,
    memory_bytes: int,
    request: tuple[int, int],
    dtype: str | None = None,
    block_size: int = 16,
    utilization: float = 0.9,
    max_model_len: int | None = None,
) -> Plan:
    """``request``: prompt and output tokens. Raises ConfigError, with the arithmetic, where the
    weights leave no block, and for a request longer than the model takes."""
    num_prompt, num_output = request
    longest = max_model_len or shape.config.max_position_embeddings
    if num_prompt + num_output > longest:
        raise ConfigError(
            "prompt",
            f"{num_prompt} + {num_output} output tokens are more than the longest, {longest}",
        )
    value_bytes, token_bytes = shape.value_bytes(dtype), shape.kv_bytes_per_token(dtype)
    weight_bytes = shape.num_parameters() * value_bytes
    budget, block_bytes = int(memory_bytes * utilization) - weight_bytes, token_bytes * block_size
    num_blocks = budget // block_bytes - 1  # one is the null block
    if num_blocks < 1:
        raise ConfigError(
            "memory",
            f"{format_bytes(memory_bytes)} x {utilization:g} = "
            f"{format_bytes(budget + weight_bytes)}, less {format_bytes(weight_bytes)} of weights, "
            f"leaves no block of {format_bytes(block_bytes)} beside the null block",
        )
    # The last output token's keys and values are never computed.
    blocks_per_request = -(-(num_prompt + num_output - 1) // block_size)
    return Plan(
        model=shape.name,
        dtype=str(dtype or shape.dtype),
        num_parameters=shape.num_parameters(),
        memory_bytes=memory_bytes,
        gpu_memory_utilization=utilization,
        weight_bytes=weight_bytes,
        kv_budget_bytes=budget,
        kv_bytes_per_token=token_bytes,
        block_size=block_size,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        max_model_len=longest,
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        blocks_per_request=blocks_per_request,
        contiguous_requests=budget // (longest * token_bytes),
        paged_requests=num_blocks // blocks_per_request,
    )


def _print(made: Plan) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in _rows(made):
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{made.model}, {made.dtype}, {made.num_parameters / 1e9:.2f} B parameters")
    console.print()
    console.print(table)
    console.print()
    note = "activations and graphs come on top: a GPU worker measures and subtracts them at start"
    console.print(note, style="dim")


def _rows(made: Plan) -> list[tuple[str, Any, str]]:
    tokens = made.num_blocks * made.block_size
    request = f"{made.prompt_tokens:,} + {made.output_tokens:,} tokens"
    usable = f"{made.gpu_memory_utilization:g} of it, less the weights"
    return [
        ("memory", format_bytes(made.memory_bytes), f"{made.memory_bytes / 1e9:,.1f} GB"),
        ("weights", format_bytes(made.weight_bytes), f"{100 * made.weight_share:.1f} % of it"),
        ("KV budget", format_bytes(made.kv_budget_bytes), usable),
        ("KV a token", format_bytes(made.kv_bytes_per_token), ""),
        ("blocks", f"{made.num_blocks:,}", f"of {made.block_size} tokens: {tokens:,} tokens"),
        ("", "", ""),
        (
            "requests, contiguous",
            f"{made.contiguous_requests:,}",
            f"{made.max_model_len:,} tokens reserved for each",
        ),
        (
            "requests, paged",
            f"{made.paged_requests:,}",
            f"{made.blocks_per_request:,} blocks for each of {request}",
        ),
    ]
