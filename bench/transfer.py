"""How fast KV blocks move between two processes, beside this machine's memcpy. Prints JSON.

``python -m bench.transfer [--transport shm|tcp]``

SmolLM2's layout: a block of 16 tokens is 737,280 bytes (30 layers, 3 KV heads of 64, fp32). For
each size, in turns within one run: the data path alone (`KVImporter.fetch`: every block copied and
its xxh3-64 checked), one memcpy of as many bytes between two arrays of this process and, for tcp,
the same data path under mutual TLS (certificates made by the openssl command) and as many bytes
through a plain socket. One block end to end is claim, copy and settle over gRPC.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.exporter import LAYOUTS, TOKEN, transport_settings
from common import wire
from common.config import PROTOCOL_VERSION
from common.types import BlockMove, BlockRef, Offer
from kv_transfer.base import BlockCopy, CancelFlag, KVImporter, LeaseProof, Peer
from kv_transfer.control import GrpcKVControl
from kv_transfer.host import this_host
from kv_transfer.imports import Imports
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.memory import allocate_pool
from kv_transfer.registry import make_importers
from kv_transfer.transfers import TransferThread
from tests.support.certificates import make_authority, make_tls_files

LAYOUT = LAYOUTS["smollm2"]
SIZES = (1, 16, 512)
NUM_BLOCKS = 512
ROOT = Path(__file__).parents[1]


class Exporter:
    """The child process."""

    def __init__(self, transport: str, folder: Path, tls: Path | None = None) -> None:
        options = {
            "transport": transport,
            "folder": folder,
            "layout": "smollm2",
            "num-blocks": NUM_BLOCKS,
            "lease-s": 600,
        }
        if tls is not None:
            options |= {"tls": tls, "worker-id": "exporter-tls"}
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.exporter", *flags],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint = json.loads(self._line())["endpoint"]

    def offer(self, block_ids: list[int]) -> Offer:
        assert self._child.stdin is not None
        self._child.stdin.write(",".join(map(str, block_ids)) + "\n")
        self._child.stdin.flush()
        return wire.offer_from_proto(wire.worker.Offer.FromString(bytes.fromhex(self._line())))

    def stop(self) -> None:
        self._child.communicate(timeout=10)

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()


def by_turns(calls: dict[str, Callable[[], object]], num_turns: int) -> dict[str, float]:
    """Median seconds of each call, made in turns so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


class RawSocket:
    """A child that sends as many bytes as it is asked for: the plain rate of a loopback socket."""

    SENDER = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
data = bytes(1 << 20)
while wanted := int.from_bytes(connection.recv(8), "big"):
    for start in range(0, wanted, len(data)):
        connection.sendall(memoryview(data)[:min(len(data), wanted - start)])
"""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            self._child = subprocess.Popen([sys.executable, "-c", self.SENDER, port])
            self._connection, _ = listener.accept()

    def receive(self, into: memoryview) -> None:
        self._connection.sendall(len(into).to_bytes(8, "big"))
        while len(into):
            into = into[self._connection.recv_into(into) :]

    def stop(self) -> None:
        self._connection.close()
        self._child.wait(10)


@dataclass(frozen=True)
class Way:
    """From one exporter to one importer of this process."""

    exporter: Exporter
    importer: KVImporter
    peer: Peer

    def fetching(self, offer: Offer) -> Callable[[], object]:
        targets = np.random.default_rng(0).permutation(NUM_BLOCKS)
        copies = [
            BlockCopy(index, block, BlockRef(int(target), 1), checksum)
            for index, (block, target, checksum) in enumerate(
                zip(offer.blocks, targets, offer.checksums, strict=False)
            )
        ]
        proof = LeaseProof(offer.lease_id, offer.secret)
        return lambda: self.importer.fetch(self.peer, proof, copies, CancelFlag())


def measure_size(
    ways: dict[str, Callable[[], object]], num_blocks: int, raw: RawSocket | None
) -> dict[str, float]:
    """Of the data path, and of what the machine does with as many bytes; GB/s."""
    num_bytes = num_blocks * LAYOUT.block_bytes
    one = np.ones(num_bytes, dtype=np.uint8)
    other = np.zeros_like(one)
    calls = {**ways, "memcpy": lambda: np.copyto(other, one)}
    if raw is not None:
        calls["raw_socket"] = lambda: raw.receive(other.data)
    seconds = by_turns(calls, num_turns=12 if num_blocks > 100 else 60)
    rates = {f"{name}_gbps": num_bytes / value / 1e9 for name, value in seconds.items()}
    for name in ("memcpy", "raw_socket"):
        if name in seconds:
            rates[f"share_of_{name}"] = seconds[name] / seconds["data_path"]
    return rates


async def end_to_end(exporter: Exporter, imports: Imports) -> dict[str, float]:
    times = []
    for turn in range(200):
        offer = exporter.offer([turn % NUM_BLOCKS])
        start = time.perf_counter()
        await imports.fetch(offer, [BlockMove(0, BlockRef(turn % NUM_BLOCKS, 1))])
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return {"p50_us": times[len(times) // 2], "p99_us": times[int(len(times) * 0.99)]}


async def measure(transport: str, folder: Path) -> dict[str, object]:
    transfers = TransferThread()
    host = this_host()
    async with AsyncExitStack() as stack:
        stack.callback(transfers.close)
        pool = allocate_pool("shm", LAYOUT, NUM_BLOCKS, folder, "importer", 1)
        stack.callback(pool.close)
        control = GrpcKVControl("importer", 1, LAYOUT, host, TOKEN, PROTOCOL_VERSION)
        stack.push_async_callback(control.close)
        raw = None
        if transport == "tcp":
            raw = RawSocket()
            stack.callback(raw.stop)
            make_tls_files(folder, "bench", make_authority(folder))
        ways = {}
        for name, tls in (("data_path", None), ("data_path_tls", folder))[: 2 if raw else 1]:
            exporter = Exporter(transport, folder, tls)
            stack.callback(exporter.stop)
            importers = make_importers(transport, pool, transport_settings(folder, tls))
            imports = Imports(pool, importers, transfers, control, host)
            stack.push_async_callback(imports.close)
            peer, _ = await control.hello(exporter.endpoint)
            ways[name] = Way(exporter, importers[transport], peer)
            if tls is None:
                plain = imports
        data_path = {}
        for size in SIZES:
            offers = {name: way.exporter.offer(list(range(size))) for name, way in ways.items()}
            for offer in offers.values():
                key = LeaseKey.of(offer)
                verdict = await control.claim(offer.endpoint, key, range(size), transport)
                assert verdict is LeaseVerdict.OK, verdict
            calls = {name: way.fetching(offers[name]) for name, way in ways.items()}
            call = partial(measure_size, calls, size, raw)
            data_path[str(size)] = await asyncio.wrap_future(transfers.submit(call))
            for offer in offers.values():
                verdict = await control.settle(offer.endpoint, LeaseKey.of(offer))
                assert verdict is LeaseVerdict.OK, verdict
        one_block = await end_to_end(ways["data_path"].exporter, plain)
    return {
        "transport": transport,
        "block_bytes": LAYOUT.block_bytes,
        "data_path": data_path,
        "one_block_end_to_end": one_block,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    transport = parser.parse_args().transport
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        result = asyncio.run(measure(transport, Path(folder)))
    print(json.dumps(json.loads(json.dumps(result), parse_float=lambda x: round(float(x), 3))))


if __name__ == "__main__":
    main()
