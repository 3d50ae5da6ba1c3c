"""One checksum a block: xxh3-64 over its bytes, by the xxhash package where it is installed.

It finds corruption, not tampering; secrets and the settle verdict are for that. Of the checksums
tried on two cores only xxh3 leaves most of the copy rate (28 GB/s; crc32 3.4, SHA-256 1.6).
"""

from collections.abc import Callable
from typing import TypeAlias

from common.errors import ConfigError
from kv_transfer.layout import NO_CHECKSUM

XXH3_64 = "xxh3_64"
Hasher: TypeAlias = Callable[[memoryview], int]


def available_checksum() -> str:
    """What a layout made on this machine says."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return NO_CHECKSUM
    return XXH3_64


def checksum_on(device: str) -> str:
    """What the layout of a pool on ``device`` says: no host reads a GPU's blocks to hash them."""
    return XXH3_64 if device == "cpu" else NO_CHECKSUM


def hasher(name: str) -> Hasher | None:
    """The function behind a layout's ``checksum``; None where it says none."""
    if name == NO_CHECKSUM:
        return None
    if name != XXH3_64:
        raise ConfigError("checksum", f"{name!r} is not one of {XXH3_64}, {NO_CHECKSUM}")
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        raise ConfigError("checksum", f"{XXH3_64} needs the package xxhash") from None
    return xxh3_64_intdigest


def required_hasher(name: str, transport: str) -> Hasher:
    """For a transport through host memory, which refuses to run without."""
    found = hasher(name)
    if found is None:
        raise ConfigError("transport", f"{transport} needs checksums: install xxhash")
    return found
