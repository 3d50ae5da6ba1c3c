"""The memory of one worker's KV pool, plain or shared, and what dead owners left behind.

The life of a shared pool file::

    1. sweep      files of dead owners are unlinked: those whose lock can be had
    2. create     O_EXCL, mode 0600, locked exclusively for the owner's life; all its pages are
                  allocated now, so that a full tmpfs is an error here and no SIGBUS later
    3. serve      peers open it read-only by a name they build themselves; they never change it
    4. close      the name is unlinked, the file never truncated: peers may still be reading

The lock, not a process id, tells that an owner lives: it ends with the owner however it dies, and
is seen across PID namespaces.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import ConfigError
from common.types import Epoch, KVLayout, WorkerId
from kv_transfer.cuda.device import Device
from kv_transfer.layout import NO_CHECKSUM, pool_bytes

log = logging.getLogger(__name__)

POOL_PREFIX = "baton-kv-"
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

PoolKind = Literal["plain", "shm", "cuda"]


@dataclass(slots=True)
class PoolMemory:
    """One allocated pool, zeroed; block ids are ``0 .. num_blocks - 1``, the null block included.

    ``tensor``: ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`` of the
    layout's dtype. ``raw``: the same bytes, ``[num_blocks, block_bytes]``, and ``rows``: them again
    for numpy, without a row where they lie on a GPU. ``path`` is that of a shared pool's file,
    ``device`` the GPU of one on a GPU. Views keep host memory alive after ``close``.
    """

    layout: KVLayout
    num_blocks: int
    worker_id: WorkerId
    epoch: Epoch
    tensor: torch.Tensor
    raw: torch.Tensor
    rows: NDArray[np.uint8]
    path: Path | None = None
    lock_fd: int | None = None
    device: Device | None = None

    def close(self) -> None:
        """Unlinks the file and lets the lock go, or gives device memory back. Idempotent."""
        if self.device is not None:
            self.device.free(self.raw)
        if self.path is not None and self.lock_fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self.lock_fd)
            self.lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def allocate_pool(
    kind: PoolKind,
    layout: KVLayout,
    num_blocks: int,
    pool_dir: Path,
    worker_id: WorkerId,
    epoch: Epoch,
    device: Device | None = None,
) -> PoolMemory:
    """A pool that peers can map (``shm``), that only this process sees (``plain``), or on
    ``device`` (``cuda``).

    Raises ConfigError where the folder or the GPU cannot be used or has no room for the pool.
    """
    size = pool_bytes(layout, num_blocks)
    if kind == "cuda":
        assert device is not None
        raw = device.allocate(num_blocks, layout.block_bytes)
        pool = _pool(layout, num_blocks, worker_id, epoch, raw)
        pool.device = device
        return pool
    if kind == "plain":
        rows = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        return _pool(layout, num_blocks, worker_id, epoch, rows)
    path = pool_path(pool_dir, worker_id, epoch)
    fd = _create_locked(path)
    try:
        os.posix_fallocate(fd, 0, size)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        path.unlink()
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise
        raise ConfigError(
            "pool_dir", f"{pool_dir} has no room for a KV pool of {size} bytes; lower num_blocks"
        ) from None
    rows = torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, layout.block_bytes)
    pool = _pool(layout, num_blocks, worker_id, epoch, rows)
    pool.path, pool.lock_fd = path, fd
    return pool


def _pool(
    layout: KVLayout, num_blocks: int, worker_id: WorkerId, epoch: Epoch, raw: torch.Tensor
) -> PoolMemory:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    tensor = raw.view(dtype).view(num_blocks, *layout.block_shape)
    rows = (raw if raw.device.type == "cpu" else raw[:0].cpu()).numpy()
    return PoolMemory(layout, num_blocks, worker_id, epoch, tensor, raw, rows)


def device_without_checksums(pool: PoolMemory, transport: str) -> Device:
    """The GPU of a pool for a transport between GPUs. Raises ConfigError for another pool."""
    if pool.device is None:
        raise ConfigError("transport", f"{transport} needs the KV pool on a GPU")
    if pool.layout.checksum != NO_CHECKSUM:
        raise ConfigError("transport", f"{transport} carries no checksums; the layout wants them")
    return pool.device


def pool_path(pool_dir: Path, worker_id: WorkerId, epoch: Epoch) -> Path:
    """Both ends build the name by themselves; a peer's id cannot lead out of the folder."""
    if not _WORKER_ID.fullmatch(worker_id) or epoch < 0:
        raise ConfigError(
            "worker_id", "must be 1 to 128 of A-Z a-z 0-9 . _ - and start with a letter or digit"
        )
    return pool_dir / f"{POOL_PREFIX}{worker_id}-{epoch:x}"


def _create_locked(path: Path) -> int:
    """A new file under an exclusive lock. A sweeper can have locked and unlinked it in between:
    then the name is gone again, and another try makes another file."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ConfigError("pool_dir", f"cannot create {path}: {reason}") from None
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def sweep_dead_pools(pool_dir: Path) -> int:
    """Unlinks this user's pool files whose owner is gone; returns how many."""
    num_swept = 0
    for path in sorted(pool_dir.glob(f"{POOL_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                num_swept += 1
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    if num_swept:
        log.info("unlinked %d KV pools of dead workers", num_swept)
    return num_swept
