"""Hand-off by NVIDIA's NIXL, which knows RDMA, NVLink, shared memory and TCP: `baton[nixl]`.

The life of a way::

    1. register   once per worker and epoch: the whole pool, with the worker's NIXL agent
    2. offer      the agent's metadata and where the pool starts travel in Hello's answer, as bytes
                  and numbers, to whoever showed the run's token
    3. connect    the importer's agent takes up the exporter's, once per epoch
    4. fetch      it reads blocks of the peer's memory into its own, some at a time; the exporter
                  has no part in it
    5. forget     when the peer's epoch has ended

NIXL's own progress thread never rests, a core for each agent. So an importer drives its reads by
itself, and an exporter helps only while leases are claimed: connections are made then, and where no
hardware reads memory for them, blocks are sent.

A read that has been posted cannot be called off: a fetch waits for it also when nobody wants it any
more. Nor is one over that NIXL has released: a peer that stood still and goes on may yet write what
was asked for (seen with NIXL 1.5.1 over TCP). So where a read fails, or brings nothing for
`STALL_S`, the importer takes down its agent, which ends all that it asked for, and starts another.

NIXL's connections know no proof and no encryption: off loopback both ends refuse unless settings
say that the network is trusted. In host memory blocks carry checksums, on a GPU they do not.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from common.errors import ConfigError, PeerLost
from common.failpoints import DROP, hit
from common.types import BlockRef, Epoch, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    FetchResult,
    KVExporter,
    KVImporter,
    LeaseProof,
    NixlAddress,
    Peer,
    TransportSettings,
)
from kv_transfer.checksum import Hasher, required_hasher
from kv_transfer.copying import check_row, go_on, seal_rows
from kv_transfer.dist.backend import require_trusted
from kv_transfer.layout import require_compatible, require_in_pool
from kv_transfer.memory import PoolMemory, device_without_checksums

NAME = "nixl"
# The wheels are one for each CUDA; either does where there is no GPU.
_PACKAGES = {"12": "nixl_cu12", "13": "nixl_cu13"}
_BACKEND = "UCX"

# A peer whose memory gives nothing for so long is dead (timers of docs/design.md).
STALL_S = 3.0
# How many blocks one read takes: a fetch can be called off between reads.
_BLOCKS_AT_ONCE = 64
_POLL_S = 50e-6
_HELP_S = 200e-6


class _Agent:
    """One NIXL agent with one registered pool. Raises ConfigError where the library is missing or
    cannot work here."""

    def __init__(self, pool: PoolMemory, settings: TransportSettings, purpose: str) -> None:
        require_trusted(settings.host, settings.insecure, NAME)
        self.hash: Hasher | None = None
        if pool.device is None:
            self.hash = required_hasher(pool.layout.checksum, NAME)
            self.memory, self.device_index = "DRAM", 0
        else:
            device = device_without_checksums(pool, NAME)
            self.memory, self.device_index = "VRAM", device.index
        self.base_address = pool.raw.data_ptr()
        self._block_bytes = pool.layout.block_bytes
        api, self.errors = _library()
        name = f"{pool.worker_id}-{pool.epoch:x}-{purpose}"
        try:
            config = api.nixl_agent_config(False, False, 0, backends=[_BACKEND])
            self.nixl: Any = api.nixl_agent(name, config)
            region = (self.base_address, pool.raw.nbytes, self.device_index, "")
            self._registered = self.nixl.register_memory([region], mem_type=self.memory)
        except self.errors as error:
            raise ConfigError("transport", f"nixl does not work here: {error}") from None

    def blocks(self, base: int, block_ids: Sequence[int], memory: str, device_index: int) -> Any:
        """NIXL's list of blocks of a pool that starts at ``base``."""
        size = self._block_bytes
        places = [(base + block_id * size, size, device_index) for block_id in block_ids]
        return self.nixl.get_xfer_descs(places, mem_type=memory)

    def close(self) -> None:
        """Its last reference goes here: then nothing that it asked for is written any more."""
        if self.nixl is not None:
            with contextlib.suppress(*self.errors):
                self.nixl.deregister_memory(self._registered)
            self.nixl = None


class NixlExporter(KVExporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._agent = _Agent(pool, settings, "exporter")
        self._address = NixlAddress(
            self._agent.nixl.get_agent_metadata(),
            self._agent.base_address,
            self._agent.memory,
            self._agent.device_index,
        )
        self._claimed: set[str] = set()
        self._change = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._help, name="kv-nixl", daemon=True)
        self._thread.start()

    def address(self) -> NixlAddress:
        return self._address

    def seal(self, blocks: Sequence[BlockRef]) -> tuple[int, ...]:
        if self._pool.device is not None:
            self._pool.device.synchronize()
        return seal_rows(self._pool.rows, blocks, self._agent.hash)

    def send(self, proof: LeaseProof, blocks: Sequence[BlockRef]) -> None:
        with self._change:
            self._claimed.add(proof.lease_id)
            self._change.notify()

    def revoke(self, lease_id: str) -> None:
        with self._change:
            self._claimed.discard(lease_id)

    def close(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()
        self._agent.close()

    def _help(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._claimed or self._closing)
                if self._closing:
                    return
            self._agent.nixl.get_new_notifs()
            time.sleep(_HELP_S)


class NixlImporter(KVImporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._agent = _Agent(pool, settings, "importer")
        # The name of each peer's agent, and where its pool is.
        self._peers: dict[tuple[WorkerId, Epoch], tuple[str, NixlAddress]] = {}

    def connect(self, peer: Peer) -> None:
        require_compatible(self._pool.layout, peer.layout)
        if (peer.worker_id, peer.epoch) in self._peers:
            return
        address = self._address(peer)
        try:
            name = self._agent.nixl.add_remote_agent(address.agent).decode()
        except self._agent.errors as error:
            raise PeerLost(f"nixl of {peer.worker_id} cannot be reached: {error}") from None
        self._peers[peer.worker_id, peer.epoch] = (name, address)

    def fetch(
        self, peer: Peer, proof: LeaseProof, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        start_s = time.monotonic()
        self.connect(peer)
        for copy in copies:
            require_in_pool(copy.source.block_id, peer.num_blocks)
        for start in range(0, len(copies), _BLOCKS_AT_ONCE):
            some = copies[start : start + _BLOCKS_AT_ONCE]
            failure = self._read(self._peers[peer.worker_id, peer.epoch], some, cancel)
            if failure is not None:
                self._start_anew()
                raise PeerLost(f"a read by nixl failed: {failure}")
            if self._agent.hash is not None:
                for copy in some:
                    check_row(self._pool.rows[copy.target.block_id], copy, self._agent.hash)
        go_on(cancel)
        return FetchResult(
            num_blocks=len(copies),
            num_bytes=len(copies) * self._pool.layout.block_bytes,
            duration_s=time.monotonic() - start_s,
            transport=NAME,
        )

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        known = self._peers.pop((worker_id, epoch), None)
        if known is not None:
            self._agent.nixl.remove_remote_agent(known[0])

    def close(self) -> None:
        for worker_id, epoch in list(self._peers):
            self.forget(worker_id, epoch)
        self._agent.close()

    # ------------------------------------------------------------ inside

    def _address(self, peer: Peer) -> NixlAddress:
        for address in peer.addresses:
            if isinstance(address, NixlAddress):
                break
        else:
            raise PeerLost(f"{peer.worker_id} does not offer {NAME}")
        if address.memory != self._agent.memory:
            raise PeerLost(
                f"the pool of {peer.worker_id} is {address.memory}, ours {self._agent.memory}"
            )
        return address

    def _read(
        self, known: tuple[str, NixlAddress], copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> str | None:
        """None, or why it failed. That is not raised: a traceback would keep the agent alive."""
        kept = []
        for copy in copies:
            go_on(cancel)
            if hit("decode.copy_block") != DROP:
                kept.append(copy)
        go_on(cancel)
        agent, (name, address) = self._agent, known
        ours = [copy.target.block_id for copy in kept]
        theirs = [copy.source.block_id for copy in kept]
        try:
            read = agent.nixl.initialize_xfer(
                "READ",
                agent.blocks(agent.base_address, ours, agent.memory, agent.device_index),
                agent.blocks(address.base_address, theirs, address.memory, address.device_index),
                name,
            )
            try:
                _finish(agent.nixl, read)
            finally:
                read.release()
        except agent.errors as error:
            return str(error)
        return None

    def _start_anew(self) -> None:
        """Peers are connected again when next fetched from."""
        self._peers.clear()
        self._agent.close()
        self._agent = _Agent(self._pool, self._settings, "importer")


def _finish(nixl: Any, read: Any) -> None:
    """Until the read has ended. Raises what NIXL raises, TimeoutError after `STALL_S`."""
    deadline_s = time.monotonic() + STALL_S
    state = nixl.transfer(read)
    while state == "PROC":
        if time.monotonic() > deadline_s:
            raise TimeoutError("no progress")
        time.sleep(_POLL_S)
        state = nixl.check_xfer_state(read)
    if state != "DONE":
        raise ConnectionError(f"it ended as {state}")


def _library() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's Python module, and what it raises, which has no base class of its own."""
    cuda = (torch.version.cuda or "").partition(".")[0]
    for name in [_PACKAGES[cuda]] if cuda in _PACKAGES else _PACKAGES.values():
        try:
            api, bindings = import_module(f"{name}._api"), import_module(f"{name}._bindings")
        except ImportError:
            continue
        logger = logging.getLogger("nixl")  # its own handler writes to stdout
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type)]
        errors = [kind for kind in kinds if issubclass(kind, Exception)]
        return api, (*errors, RuntimeError, OSError)
    raise ConfigError("transport", "nixl is not installed: pip install 'baton-serve[nixl]'")
