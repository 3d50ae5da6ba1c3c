"""Memory of a whole Baton on the default model, by process and kind of weights. JSON.

``python -m bench.memory``

Each kind of weights is served by one prefill and one decode worker until both have computed
something. ``resident_mib`` is what a process has in memory, ``own_share_mib`` the same with what is
shared divided among those who share it, so that the shares add up to what the machine gives.
``beside_mib`` is the resident size without the mapped weights and pools, of which a decode worker
has those of its peers too, as far as it has read from them.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil

from bench.bounds import at_most
from bench.deployment import deployment
from cli.model_cache import default_cache_dir, prepare_entry
from cli.prepare import DEFAULT_MODEL, find_source
from common.client import BatonClient, Sampling

QUANTIZATIONS = ("none", "int8", "int4")
# Of 720 KiB each, in fp32: 256 MiB.
NUM_BLOCKS = 364
MAX_BESIDE_MIB = 400
MAX_TOGETHER_MIB = 1907


async def measure(quantization: str, entry: Path) -> dict[str, Any]:
    flags = (
        *("--model", str(entry), "--quantization", quantization),
        *("--num-blocks", str(NUM_BLOCKS), "--local-prefill", "never", "--async-depth", "0"),
    )
    async with deployment(1000.0, *flags) as up:
        async with BatonClient(up.target) as client:
            await asyncio.gather(*(_ask(client, number) for number in range(4)))
        sizes = {name: process.memory_full_info() for name, process in up.processes.items()}
        mapped = {role: _mapped_mib(up.processes[role]) for role in ("prefill", "decode")}
    resident = {name: size.rss / (1 << 20) for name, size in sizes.items()}
    beside = max(resident[role] - sum(mapped[role].values()) for role in mapped)
    together = sum(size.pss for size in sizes.values()) / (1 << 20)
    return {
        "mapped_mib": {role: {k: round(v) for k, v in mapped[role].items()} for role in mapped},
        "resident_mib": {name: round(size) for name, size in resident.items()},
        "own_share_mib": {name: round(size.pss / (1 << 20)) for name, size in sizes.items()},
        "beside_mib": at_most(round(beside), MAX_BESIDE_MIB, "MiB"),
        "together_mib": at_most(round(together), MAX_TOGETHER_MIB, "MiB"),
    }


def _mapped_mib(process: psutil.Process) -> dict[str, float]:
    """What is in memory of the files of weights and of pools."""
    names = {"weights": "/packed-", "pools": "/baton-kv-"}
    maps = process.memory_maps(grouped=True)
    return {
        name: sum(part.rss for part in maps if mark in part.path) / (1 << 20)
        for name, mark in names.items()
    }


async def _ask(client: BatonClient, number: int) -> None:
    prompt = [1 + (number + i * i) % 1000 for i in range(200)]
    async for _ in client.generate(prompt, Sampling(max_tokens=8, ignore_eos=True)):
        pass


def main() -> None:
    entry = prepare_entry(find_source(DEFAULT_MODEL), default_cache_dir(), lambda *_: None)
    results = {name: asyncio.run(measure(name, entry)) for name in QUANTIZATIONS}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
