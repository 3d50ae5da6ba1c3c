"""The transports from GPU to GPU, each between two processes: what arrives, what is refused by
name, and that an importer outlives an exporter that is killed while it copies.

cuda_ipc runs on the device, and over a `FileDevice` where there is none. NCCL takes no two ranks on
one GPU: its control code always runs over two of those, with gloo in NCCL's place, and NCCL itself
where there are two GPUs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.gpu.file_device import FileDevice
from bench.gpu.processes import FOLDER_PREFIX, Control, two_processes
from bench.gpu.report import Figure, Machine, NotRun, Outcome
from common.errors import TransferError
from common.types import BlockRef, Epoch, KVLayout, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    CudaIpcAddress,
    DistAddress,
    KVExporter,
    KVImporter,
    LeaseProof,
    Peer,
    TransportAddress,
    TransportSettings,
)
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.lease import LEASE_ID_BYTES, SECRET_BYTES
from kv_transfer.memory import PoolMemory, allocate_pool

CUDA_IPC, NCCL = "cuda_ipc", "nccl"
_ENDS = {
    CUDA_IPC: ("kv_transfer.cuda.ipc", "CudaIpcExporter", "CudaIpcImporter"),
    NCCL: ("kv_transfer.dist", "NcclExporter", "NcclImporter"),
}
_LAYOUT = KVLayout(2, 16, 2, 64, "float32", "random", checksum=NO_CHECKSUM)
_NUM_BLOCKS = 33
_POISON = 0xA5
_PROOF = LeaseProof("5a" * LEASE_ID_BYTES, bytes(range(SECRET_BYTES)))
_KILL_AFTER_S = 0.2
_COPY_FOR_S = 1.0


@dataclass(frozen=True)
class Job:
    """``devices``: torch's names of the exporter's and the importer's GPU; UUIDs of stand-ins."""

    transport: str
    real: bool
    devices: tuple[str, str]
    folder: str


def check_cuda_ipc(machine: Machine) -> Outcome:
    device = "cuda" if machine.has_gpu else "FILE-0"
    return _check(CUDA_IPC, machine.has_gpu, (device, device))


def check_nccl_control(machine: Machine) -> Outcome:
    return _check(NCCL, real=False, devices=("FILE-0", "FILE-1"))


def check_nccl(machine: Machine) -> Outcome:
    num_gpus = torch.cuda.device_count() if machine.has_gpu else 0
    if num_gpus < 2:
        raise NotRun(f"NCCL takes no two ranks on one GPU, and this machine has {num_gpus}")
    return _check(NCCL, real=True, devices=("cuda:0", "cuda:1"))


def _check(transport: str, real: bool, devices: tuple[str, str]) -> Outcome:
    with TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        job = Job(transport, real, devices, folder)
        with two_processes(_export, _import, job) as (exporter, importer):
            importer.send(exporter.receive())
            result = importer.receive()
            time.sleep(_KILL_AFTER_S)
            exporter.process.kill()
            survived = importer.receive()["survived"]
    return Outcome(
        [
            Figure("blocks that arrived wrong", result["num_wrong"], "1", 0),
            Figure("blocks changed that nobody asked for", result["num_changed"], "1", 0),
            Figure("faults that were not refused by name", result["num_not_refused"], "1", 0),
            Figure("importers lost with an exporter killed", 0 if survived else 1, "1", 0),
        ]
    )


# ------------------------------------------------------------ the two processes


def _export(job: Job, control: Control) -> None:
    with _pool(job, 0) as pool:
        for block in range(_NUM_BLOCKS):
            pool.raw[block] = _content(block, pool.raw.device)
        exporter: KVExporter = _end(job, 0)(pool, TransportSettings(pool_dir=Path(job.folder)))
        blocks = [BlockRef(block, 1) for block in range(1, _NUM_BLOCKS)]
        exporter.seal(blocks)
        exporter.send(_PROOF, blocks)
        control.send(_told(exporter.address()))
        control.wait_for_the_end()
        exporter.close()


def _import(job: Job, control: Control) -> None:
    with _pool(job, 1) as pool:
        pool.raw.fill_(_POISON)
        importer: KVImporter = _end(job, 1)(pool, TransportSettings(pool_dir=Path(job.folder)))
        address = _address(control.receive())
        peer = Peer(WorkerId("exporter"), Epoch(1), _LAYOUT, _NUM_BLOCKS, (address,))
        # Backwards, so that ids must be translated; block 0 is nobody's target.
        copies = [
            BlockCopy(block - 1, BlockRef(block, 1), BlockRef(_NUM_BLOCKS - block, 1), None)
            for block in range(1, _NUM_BLOCKS)
        ]
        num_not_refused = sum(
            not _is_refused(importer, faulty, copies) for faulty in _faulty(peer, job, pool)
        )
        num_changed = int((pool.raw != _POISON).any(dim=1).sum())
        importer.fetch(peer, _PROOF, copies, CancelFlag())
        result = {
            "num_wrong": _num_wrong(pool, copies),
            "num_changed": num_changed + int((pool.raw[0] != _POISON).any()),
            "num_not_refused": num_not_refused,
        }
        control.send(result)
        control.send({"survived": _survives(importer, peer, copies, pool)})
        importer.close()


def _faulty(peer: Peer, job: Job, pool: PoolMemory) -> list[Peer]:
    """Peers from which nothing may be fetched, each unlike the good one in one thing."""
    (address,) = peer.addresses
    other_layout = replace(peer, layout=replace(_LAYOUT, block_size=32))
    if isinstance(address, CudaIpcAddress):
        addresses: Sequence[TransportAddress] = (
            replace(address, device_uuid="of no device"),
            replace(address, handle=b"~" * len(address.handle)),
        )
    else:
        assert isinstance(address, DistAddress) and pool.device is not None
        addresses = (replace(address, device_uuid=pool.device.uuid), replace(address, port=1))
    peers = [other_layout, *(replace(peer, addresses=(other,)) for other in addresses)]
    return [
        replace(faulty, worker_id=WorkerId(f"faulty-{number}"))
        for number, faulty in enumerate(peers)
    ]


def _is_refused(importer: KVImporter, peer: Peer, copies: Sequence[BlockCopy]) -> bool:
    try:
        importer.fetch(peer, _PROOF, copies, CancelFlag())
    except TransferError:
        return True
    return False


def _survives(
    importer: KVImporter, peer: Peer, copies: Sequence[BlockCopy], pool: PoolMemory
) -> bool:
    """Copies on while the exporter is killed. Only the named error of a lost peer may come of it,
    and the importer's own memory works on."""
    end_s = time.monotonic() + _COPY_FOR_S
    while time.monotonic() < end_s:
        try:
            importer.fetch(peer, _PROOF, copies, CancelFlag())
        except TransferError:
            break
    importer.forget(peer.worker_id, peer.epoch)
    pool.raw.fill_(_POISON)
    return bool((pool.raw == _POISON).all())


def _num_wrong(pool: PoolMemory, copies: Sequence[BlockCopy]) -> int:
    return sum(
        not torch.equal(
            pool.raw[copy.target.block_id], _content(copy.source.block_id, pool.raw.device)
        )
        for copy in copies
    )


def _content(block: int, device: torch.device) -> torch.Tensor:
    """Another in every block: uint8 ``[block_bytes]``."""
    numbers = torch.arange(_LAYOUT.block_bytes, device=device) * 7 + block * 31
    return (numbers % 251).to(torch.uint8)


def _end(job: Job, index: int) -> Callable[[PoolMemory, TransportSettings], Any]:
    module, *names = _ENDS[job.transport]
    end: Callable[[PoolMemory, TransportSettings], Any] = getattr(
        import_module(module), names[index]
    )
    return end


def _pool(job: Job, index: int) -> PoolMemory:
    name, folder = job.devices[index], Path(job.folder)
    device: Any = FileDevice(folder, name)
    if job.real:
        device = import_module("kv_transfer.cuda.device").open_device(name)
    worker_id = WorkerId(("exporter", "importer")[index])
    return allocate_pool("cuda", _LAYOUT, _NUM_BLOCKS, folder, worker_id, Epoch(1), device)


def _told(address: TransportAddress) -> dict[str, Any]:
    """As JSON carries it."""
    told = asdict(address)
    if isinstance(address, CudaIpcAddress):
        told["handle"] = address.handle.hex()
    return told


def _address(told: dict[str, Any]) -> TransportAddress:
    if "handle" in told:
        return CudaIpcAddress(told["device_uuid"], bytes.fromhex(told["handle"]))
    return DistAddress(**told)
