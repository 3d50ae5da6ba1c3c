"""A process that only exports: what bench/transfer.py and the tests of kv_transfer fetch from.

Prints its endpoint, then answers each line ``1,2,3`` on stdin, block ids, with an offer of those
blocks: the bytes of the wire's Offer in hex. It ends cleanly at the end of stdin.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common import failpoints, rpc, wire
from common.config import PROTOCOL_VERSION
from common.listener import host_port
from common.tls import TlsFiles
from common.types import BlockRef, KVLayout
from kv_transfer.base import TransportSettings
from kv_transfer.control import KVTransferServicer
from kv_transfer.cuda.device import open_device
from kv_transfer.exports import Exports
from kv_transfer.host import this_host
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.memory import allocate_pool
from kv_transfer.registry import make_exporters, pool_kind
from kv_transfer.transfers import TransferThread

TOKEN = "not a secret: this pool holds random bytes"
LAYOUTS = {
    "tiny": KVLayout(2, 4, 2, 8, "float32", "f"),
    "smollm2": KVLayout(30, 16, 3, 64, "float32", "f"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--layout", choices=LAYOUTS, default="tiny")
    parser.add_argument("--num-blocks", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--worker-id", default="exporter")
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--lease-s", type=float, default=10.0)
    parser.add_argument("--failpoints", default="")
    parser.add_argument("--tls", type=Path, help="folder with certificates: tcp speaks TLS")
    return parser.parse_args()


def transport_settings(folder: Path, tls: Path | None) -> TransportSettings:
    """``tls``: folder of certificates for loopback, with which tcp is no longer plain there."""
    if tls is None:
        return TransportSettings(pool_dir=folder)
    files = TlsFiles(tls / "bench.pem", tls / "bench.key", tls / "ca.pem")
    return TransportSettings(pool_dir=folder, host="0.0.0.0", tls=files)


def random_rows(num_blocks: int, block_bytes: int) -> np.ndarray:
    """Random bytes, the same in every process: a test knows what it must get."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)


async def serve(args: argparse.Namespace) -> None:
    layout = LAYOUTS[args.layout]
    transfers = TransferThread()
    kind, device = pool_kind(args.transport), None
    if kind == "cuda":
        device, layout = open_device("cuda"), replace(layout, checksum=NO_CHECKSUM)
    with allocate_pool(
        kind, layout, args.num_blocks, args.folder, args.worker_id, args.epoch, device
    ) as pool:
        pool.raw.copy_(torch.from_numpy(random_rows(*pool.raw.shape)))
        settings = transport_settings(args.folder, args.tls)
        exporters = make_exporters(args.transport, pool, settings)
        server = rpc.make_internal_server(TOKEN)
        endpoint = host_port("127.0.0.1", rpc.bind(server, "127.0.0.1", 0))
        exports = Exports(pool, exporters, transfers, endpoint, args.lease_s)
        servicer = KVTransferServicer(exports, this_host(), PROTOCOL_VERSION)
        wire.worker_grpc.add_KVTransferServiceServicer_to_server(servicer, server)
        await exports.start()
        await server.start()
        print(json.dumps({"endpoint": endpoint}), flush=True)
        await answer_offers(exports, layout.block_size)
        await exports.close()
        await server.stop(None)
        transfers.close()


async def answer_offers(exports: Exports, block_size: int) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        blocks = [BlockRef(int(block_id), 1) for block_id in line.split(",")]
        offer = await exports.offer(blocks, len(blocks) * block_size, 1, lambda end: None)
        print(wire.offer_to_proto(offer).SerializeToString().hex(), flush=True)


if __name__ == "__main__":
    arguments = parse()
    failpoints.arm(arguments.failpoints)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments))
