"""Safetensors files: written tensor by tensor, and checked without reading their data.

A file is eight bytes (length of the header), the header as JSON, and the tensors one after another.
The library's own writer wants all tensors in memory at once.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from common.errors import ModelError

Shape = tuple[int, ...]
_ALIGNMENT = 8


def write_float32(
    path: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, NDArray[np.float32]]],
) -> Iterator[int]:
    """Writes ``tensors``, which come in the order of ``shapes``; yields bytes after each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, tensor in tensors:
            assert tensor.shape == shapes[name] and tensor.dtype == np.float32, name
            file.write(np.ascontiguousarray(tensor).data)
            yield tensor.nbytes


def read_shapes(files: Sequence[Path]) -> dict[str, Shape]:
    """Names and shapes of all tensors. Raises ModelError for a truncated or corrupt file."""
    shapes: dict[str, Shape] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError("model", f"{path.name} is truncated or corrupt: {error}") from None
    return shapes
