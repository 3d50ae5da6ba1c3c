"""A process that only fetches, to be killed: reads one offer as hex from stdin, says "copying" and
then takes its time over each block."""

import argparse
import asyncio
import sys
from pathlib import Path

from common import failpoints, wire
from tests.kv_transfer.rig import moves, reached
from tests.kv_transfer.test_processes import importer

BLOCK_S = 0.5


async def fetch(transport: str, folder: Path) -> None:
    message = wire.worker.Offer.FromString(bytes.fromhex(sys.stdin.readline()))
    offer = wire.offer_from_proto(message)
    async with importer(transport, folder) as here:
        failpoints.arm(f"decode.copy_block=sleep:{BLOCK_S}")
        fetching = asyncio.create_task(
            here.imports.fetch(offer, moves({index: index for index in range(len(offer.blocks))}))
        )
        await reached("decode.copy_block")
        print("copying", flush=True)
        await fetching


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(fetch(arguments.transport, arguments.folder))
