"""The two interfaces of a KV hand-off. They know blocks, a layout, tensors; no request, no token.

Who calls what, when, how often::

    exporter side (prefill worker)                 importer side (decode worker)
    ------------------------------                 -----------------------------
    addresses()   once, for Hello                  connect(peer)   once per peer and epoch
    seal(blocks)  once per offer, before the
                  ticket leaves: checksums
    send(...)     on every claim (no-op for        fetch(...)      once per claim, blocking, on a
                  pull transports)                                 transfer thread
    close()       once                             forget(...)     when the peer's epoch ended

Around a fetch stands the lease (kv_transfer/lease.py): the importer claims before it copies, and
may use what it copied only after the exporter answered its settle with OK.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from common.tls import TlsFiles
from common.types import BlockRef, Epoch, KVLayout, WorkerId


@dataclass(frozen=True, slots=True)
class ShmAddress:
    """The pool file's name is built from these by the reader itself, in its own directory."""

    transport: ClassVar[str] = "shm"

    worker_id: WorkerId
    epoch: Epoch
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TcpAddress:
    transport: ClassVar[str] = "tcp"

    host: str
    port: int
    tls: bool = False


@dataclass(frozen=True, slots=True)
class LoopbackAddress:
    """A pool of the same process; never on a wire."""

    transport: ClassVar[str] = "loopback"

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class DistAddress:
    """Where to ask for blocks by torch.distributed: ``transport`` is gloo or nccl.
    ``device_uuid``: of the pool's GPU, "" in host memory."""

    transport: str
    host: str
    port: int
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class CudaIpcAddress:
    """The whole pool of one epoch. ``handle``: cudaIpcMemHandle_t, which opens it for whoever has
    it; so it is never logged, and travels only where the run's token was shown."""

    transport: ClassVar[str] = "cuda_ipc"

    device_uuid: str
    handle: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NixlAddress:
    """``agent``: what NIXL calls the metadata of an agent: its ways to be reached and the key to
    the pool's memory; so it is never logged. ``memory`` is NIXL's name: DRAM or VRAM."""

    transport: ClassVar[str] = "nixl"

    agent: bytes = field(repr=False)
    base_address: int
    memory: str
    device_index: int = 0


TransportAddress = (
    ShmAddress | TcpAddress | LoopbackAddress | DistAddress | CudaIpcAddress | NixlAddress
)


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """What two ends compare to learn whether they can share memory."""

    boot_id: str
    hostname: str
    device_uuids: tuple[str, ...] = ()

    def shares_memory_with(self, other: "HostIdentity") -> bool:
        """One kernel, since one boot. Whether the pool's folder is shared a probe must tell."""
        return bool(self.boot_id) and self.boot_id == other.boot_id


@dataclass(frozen=True, slots=True)
class Peer:
    """An exporting worker as its Hello described it."""

    worker_id: WorkerId
    epoch: Epoch
    layout: KVLayout
    num_blocks: int
    addresses: tuple[TransportAddress, ...]

    def offers(self, transport: str) -> bool:
        return any(address.transport == transport for address in self.addresses)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block of a fetch: the offer's ``index``-th, from the peer's ``source`` into the local
    block ``target``; the copy must hash to ``checksum`` (None where the layout says none)."""

    index: int
    source: BlockRef
    target: BlockRef
    checksum: int | None


@dataclass(frozen=True, slots=True)
class LeaseProof:
    """What a push or tcp transport shows to the exporter; never logged."""

    lease_id: str
    secret: bytes


@dataclass(frozen=True, slots=True)
class FetchResult:
    num_blocks: int
    num_bytes: int
    duration_s: float
    transport: str


class CancelFlag:
    """Set from any thread; a fetch looks at it between blocks and raises TransferCancelled."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()


# Pools of one process by worker and epoch: what loopback has instead of a network.
LoopbackHub = dict[tuple[WorkerId, Epoch], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What transports are told at start; each uses its own part.

    shm: ``pool_dir``. tcp: listens on ``host``, a free port, and is dialled as ``advertise_host``;
    off loopback it is under ``tls``, or refuses unless ``insecure`` says that the network is
    trusted. gloo, nccl: the same, without TLS. nixl: off loopback ``insecure`` alone.
    loopback: both ends are given the same ``loopback_hub``.
    """

    pool_dir: Path = Path("/dev/shm")
    host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    insecure: bool = False
    tls: TlsFiles | None = None
    loopback_hub: LoopbackHub = field(default_factory=dict)


class KVExporter(ABC):
    """Owns nothing but the way to its pool; blocks and leases belong to others."""

    name: str

    @abstractmethod
    def address(self) -> TransportAddress:
        """What peers need to reach this pool."""

    @property
    def num_strangers(self) -> int:
        """Connections to a data port that were hung up on: no proof, or asking out of bounds."""
        return 0

    @abstractmethod
    def seal(self, blocks: Sequence[BlockRef]) -> tuple[int, ...]:
        """Checksums of the blocks as they lie in the pool now, () where the layout says none."""

    @abstractmethod
    def send(self, proof: LeaseProof, blocks: Sequence[BlockRef]) -> None:
        """Starts pushing the claimed blocks. Does nothing where the peer reads the pool itself.
        (tcp: from now on the data port serves these blocks to the holder of the proof.)"""

    @abstractmethod
    def revoke(self, lease_id: str) -> None:
        """The lease has ended, whichever way: nothing more is served or pushed under it."""

    @abstractmethod
    def close(self) -> None: ...


class KVImporter(ABC):
    """Copies blocks of peers into the local pool. All methods but ``close`` run on one transfer
    thread; ``fetch`` blocks it."""

    name: str

    @abstractmethod
    def connect(self, peer: Peer) -> None:
        """Raises PeerLost or LayoutMismatch. Idempotent for the same worker and epoch."""

    @abstractmethod
    def fetch(
        self,
        peer: Peer,
        proof: LeaseProof,
        copies: Sequence[BlockCopy],
        cancel: CancelFlag,
    ) -> FetchResult:
        """Copies all blocks, which are the claim's in the claim's order, checking each right after
        its copy. Raises ChecksumMismatch, PeerLost or TransferCancelled; the targets' content is
        then undefined and must not be used."""

    @abstractmethod
    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """The peer's epoch has ended: drop mappings and connections."""

    @abstractmethod
    def close(self) -> None: ...
