"""The two-rank group of a pair, and the store in which its two ends find each other."""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
from torch import distributed

from common.errors import PeerLost
from kv_transfer.dist.bell import STALL_S

EXPORTER, IMPORTER = 0, 1

# Rows, uint8 [block_bytes] each, that gloo is given together, so that it need not wait for the
# other end at each; a fetch can be called off between them.
_GLOO_ROWS_AT_ONCE = 8

# Its stubs know other signatures than it has.
c10d: Any = distributed
Store: TypeAlias = Any


class PairGroup(Protocol):
    """One end of a group of two. Every call of one end meets one of the other, with as many rows.
    They raise RuntimeError or OSError once the other end is gone or silent for `STALL_S`."""

    rows_at_once: int

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        """Returns when ``rows``, uint8 ``[block_bytes]`` each, may be written again."""

    def receive(self, rows: Sequence[torch.Tensor]) -> None:
        """Returns when ``rows`` are there. When it raises nothing is written to them any more."""

    def abort(self) -> None:
        """From any thread: nothing more is sent. Idempotent."""


class GlooGroup:
    """Joins when made, within `STALL_S`; ``host`` is the local address it listens on."""

    rows_at_once = _GLOO_ROWS_AT_ONCE

    def __init__(self, store: Store, rank: int, host: str) -> None:
        gloo = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=STALL_S)
        options._devices = [gloo.create_device(hostname=host)]
        self._group: Any = gloo(store, rank, 2, options)
        self._peer = 1 - rank

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        _wait([self._living().send([row], self._peer, 0) for row in rows])

    def receive(self, rows: Sequence[torch.Tensor]) -> None:
        _wait([self._living().recv([row], self._peer, 0) for row in rows])

    def abort(self) -> None:
        """Gloo has no way to end what is under way, which ends with its rows or with the time. The
        last reference hangs up on the other end."""
        self._group = None

    def _living(self) -> Any:
        if self._group is None:
            raise RuntimeError("the group was aborted")
        return self._group


def _wait(works: list[Any]) -> None:
    try:
        for work in works:
            work.wait()
    finally:
        works.clear()  # a traceback must not keep them, and with them the connection


def serve_store(host: str) -> tuple[Store, int]:
    """A store that listens on ``host`` alone, and its port. It ends with the last reference."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = _store(host, port, is_master=True, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int) -> Store:
    """Raises RuntimeError where nobody serves it."""
    return _store(host, port, is_master=False)


def named(store: Store, name: bytes) -> Store:
    """What two ends share who know the name: a stranger at the port does not."""
    return c10d.PrefixStore(name.hex(), store)


def _store(host: str, port: int, **options: Any) -> Store:
    make = c10d.TCPStore
    timeout = timedelta(seconds=STALL_S)
    return make(host, port, None, timeout=timeout, wait_for_workers=False, **options)


@contextlib.contextmanager
def losing_peer(message: str) -> Iterator[None]:
    """Whatever torch or a socket says, the conclusion is the same."""
    try:
        yield
    except (OSError, EOFError, RuntimeError):
        raise PeerLost(message) from None
