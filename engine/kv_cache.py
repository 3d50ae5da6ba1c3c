"""The KV pool as a model sees it: block-major memory, written by slot, read by block.

The storage ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`` comes from outside
(shared memory or a plain tensor) and is one array of *token rows*, each the keys or the values of
one token in one layer. Block b holds 2 x num_layers runs of block_size rows::

    row = b * (2 * num_layers * block_size)    where block b starts
        + (2 * layer) * block_size             keys of the layer; + block_size for its values
        + offset                               position of the token % block_size

A *slot* here is the row of a token's keys in layer 0. A view of the storage that starts where a
layer's first keys do makes the same slots valid for that layer, with no arithmetic a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerPool:
    """One layer as GPU kernels address it. ``keys`` ``[num_blocks, block_size, num_kv_heads,
    head_size]`` is a view of the pool, only its last axis contiguous; the values of a token lie
    ``value_offset`` elements behind its keys."""

    keys: Tensor
    value_offset: int

    @classmethod
    def of(cls, storage: Tensor, layer: int) -> "LayerPool":
        assert storage.stride(-1) == 1
        return cls(storage[:, layer, 0], storage.stride(2))

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]


class KVCache:
    """Reads and writes the pool for one model. Holds no state but the views."""

    def __init__(self, storage: Tensor) -> None:
        _, num_layers, two, block_size, num_heads, head_size = storage.shape
        assert two == 2
        assert storage.is_contiguous()
        self.block_size = block_size
        self.dtype = storage.dtype
        self.device = storage.device
        self.layers = [LayerPool.of(storage, layer) for layer in range(num_layers)]
        self.rows_per_block = 2 * num_layers * block_size
        self.block_bytes = storage[0].numel() * storage.element_size()
        self.num_bytes = storage.numel() * storage.element_size()
        self.storage = storage
        self._runs_per_block = 2 * num_layers
        rows = storage.view(-1, num_heads, head_size)
        runs = storage.view(-1, block_size, num_heads, head_size)
        # Of run i of each block: 2 * layer for keys, 2 * layer + 1 for values.
        self._rows = [rows[i * block_size :] for i in range(2 * num_layers)]
        self._runs = [runs[i:] for i in range(2 * num_layers)]

    @property
    def num_layers(self) -> int:
        return self._runs_per_block // 2

    @property
    def address(self) -> int:
        """Of the pool, for compiled kernels."""
        address: int = self.storage.data_ptr()
        return address

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> list[int]:
        """Slots of the positions ``start`` to ``end - 1`` of a sequence with this block table."""
        size, stride = self.block_size, self.rows_per_block
        return [
            block_ids[position // size] * stride + position % size for position in range(start, end)
        ]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values ``[n, num_kv_heads, head_size]`` of n tokens into their slots ``[n]``."""
        self._rows[2 * layer].index_copy_(0, slots, keys)
        self._rows[2 * layer + 1].index_copy_(0, slots, values)

    def runs(self, block_ids: Sequence[int]) -> Tensor:
        """What ``read`` takes: where the blocks ``[n]`` start, counted in runs."""
        starts = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        return starts * self._runs_per_block

    def read(self, layer: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of n whole blocks, copied in order:
        ``[n * block_size, num_kv_heads, head_size]`` each."""
        keys = self._runs[2 * layer].index_select(0, runs)
        values = self._runs[2 * layer + 1].index_select(0, runs)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def copy_block(self, source: int, target: int) -> None:
        self.storage[target].copy_(self.storage[source])
