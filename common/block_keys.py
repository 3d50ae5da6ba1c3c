"""Keys of KV blocks: a SHA-256 chain over the tokens that lead to a block.

::

    root = H(model fingerprint, tenant, cache salt)
    key of block 0 = H(root, ids of block 0),  key of block i = H(key of block i-1, ids of block i)

So equal keys mean equal model, salt and whole prefix. Python's ``hash()`` is never used: on ints it
is unkeyed, and a client could make collisions. Only full blocks have a key. The block pool, the
gateway's router and the tests compute the same keys with this module.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence

from common.types import TokenId

BlockKey = bytes


def quantized_fingerprint(fingerprint: str, quantization: str) -> str:
    """Of a model whose weights are quantised at load: another model, whose KV is not that of the
    first. ``none`` changes nothing."""
    if quantization == "none":
        return fingerprint
    return hashlib.sha256(f"{fingerprint}:{quantization}".encode()).hexdigest()


def root_key(model_fingerprint: str, tenant: str, cache_salt: str) -> BlockKey:
    """Start of the chain. The fields are length-prefixed, so that no two triples run together."""
    digest = hashlib.sha256()
    for field in (model_fingerprint, tenant, cache_salt):
        encoded = field.encode()
        digest.update(struct.pack("<Q", len(encoded)))
        digest.update(encoded)
    return digest.digest()


def tenant_key(tenant: str) -> int:
    """64 bits that stand for a tenant where its name would take too much room."""
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "little")


def key_prefix(key: BlockKey) -> int:
    """The first 8 bytes of a block key, big-endian. Enough to route by: a collision only sends a
    request to a worker that then finds less cached than was hoped."""
    return int.from_bytes(key[:8], "big")


def pack_ids(token_ids: Sequence[TokenId]) -> bytes:
    """Token ids as 4 bytes each: what is hashed, and what is compared on a hit."""
    return array("I", token_ids).tobytes()


def block_key(parent: BlockKey, packed_ids: bytes) -> BlockKey:
    """Key of a full block whose ids are ``packed_ids``; ``parent`` is the previous block's key, or
    the root."""
    return hashlib.sha256(parent + packed_ids).digest()


def chain_keys(root: BlockKey, token_ids: Sequence[TokenId], block_size: int) -> list[BlockKey]:
    """Keys of all full blocks of ``token_ids``."""
    keys: list[BlockKey] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_key(parent, pack_ids(token_ids[end - block_size : end]))
        keys.append(parent)
    return keys
