"""Copying and sealing blocks of pools whose bytes this process can see.

A block is hashed where it arrived, right after its copy, while it is still in the cache.
"""

import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, wait
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.errors import ChecksumMismatch, TransferCancelled
from common.failpoints import CORRUPT, DROP, hit
from common.types import BlockRef
from kv_transfer.base import BlockCopy, CancelFlag, FetchResult
from kv_transfer.checksum import Hasher
from kv_transfer.layout import require_in_pool

# Pool bytes, [num_blocks, block_bytes].
Rows = NDArray[np.uint8]

# Fewer blocks than this are copied by one thread: on a busy machine, waiting for another to be
# given a core costs more than it brings.
MIN_BLOCKS_TO_SPLIT = 64


def seal_rows(rows: Rows, blocks: Sequence[BlockRef], hash_bytes: Hasher | None) -> tuple[int, ...]:
    """Checksums of our own blocks as they lie there now; () without a hash function."""
    if hash_bytes is None:
        return ()
    return tuple(hash_bytes(rows[block.block_id].data) for block in blocks)


def copy_rows(
    source: Rows,
    target: Rows,
    copies: Sequence[BlockCopy],
    hash_bytes: Hasher | None,
    cancel: CancelFlag,
    transport: str,
    helper: Executor | None = None,
) -> FetchResult:
    """Copies from a peer's pool into ours; ``helper``'s thread joins in where there is much to do.
    Both take the next block from one iterator, so that neither waits for the other's share.

    Returns or raises only after both threads have stopped writing. Raises TransferError for a
    block outside the peer's pool, ChecksumMismatch, or TransferCancelled.
    """
    start_s = time.monotonic()
    for copy in copies:
        require_in_pool(copy.source.block_id, len(source))
    run = partial(_copy, source, target, hash_bytes, cancel)
    if helper is None or len(copies) < MIN_BLOCKS_TO_SPLIT:
        run(copies)
    else:
        shared = iter(copies)
        other = helper.submit(run, shared)
        try:
            run(shared)
        finally:
            if not other.cancel():
                wait((other,))
        if not other.cancelled():
            other.result()
    return FetchResult(
        num_blocks=len(copies),
        num_bytes=len(copies) * source.shape[1],
        duration_s=time.monotonic() - start_s,
        transport=transport,
    )


def check_row(row: Rows, copy: BlockCopy, hash_bytes: Hasher | None) -> None:
    """Raises ChecksumMismatch unless ``row``, ``[block_bytes]``, is what was offered."""
    if hit("transfer.corrupt_block") == CORRUPT:
        row[random.randrange(len(row))] ^= 1 << random.randrange(8)
    wanted = copy.checksum
    if wanted is not None and hit("transfer.corrupt_checksum") == CORRUPT:
        wanted ^= 1
    if hash_bytes is not None and hash_bytes(row.data) != wanted:
        raise ChecksumMismatch(copy.index)


def go_on(cancel: CancelFlag) -> None:
    if cancel.is_set():
        raise TransferCancelled("the copy is no longer wanted")


def _copy(
    source: Rows,
    target: Rows,
    hash_bytes: Hasher | None,
    cancel: CancelFlag,
    copies: Iterable[BlockCopy],
) -> None:
    for copy in copies:
        go_on(cancel)
        row = target[copy.target.block_id]
        if hit("decode.copy_block") != DROP:
            np.copyto(row, source[copy.source.block_id])
        check_row(row, copy, hash_bytes)
