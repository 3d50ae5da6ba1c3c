"""Packed weights on disk: packed once, mapped by all workers of the machine.

Beside an entry's weights lies a folder ``packed-<quantization>-<key>`` with one file of bare
numbers for each kind of array; those in ``layers`` hold all layers, one after the other. `INDEX`
names them all with dtype and shape, so that a folder of which something is missing is known for
what it is. Whoever needs it and finds none packs the weights, a layer at a time, and renames the
folder into place; two at once take turns. Where the entry cannot be written, the weights are packed
into the process's own memory.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import BatonError, ModelError
from engine.kernels.cpu import packing, tiles
from engine.kernels.cpu.kernels import check_model
from engine.models import llama, packed, weights
from engine.models.config import ModelEntry, read_entry
from engine.models.llama import OpenWeights, open_weights
from engine.models.packed import (
    Arrays,
    PackedModel,
    layer_arrays,
    model_of,
    other_arrays,
    pack_model,
)

log = logging.getLogger(__name__)

# Name, dtype and shape of each array, by path.
INDEX = "index.json"
_LAYERS = "layers"
# Of each quantization: that of this code, and one of another that shares the cache.
_FOLDERS_KEPT = 2


def load_packed(entry: ModelEntry, quantization: str) -> PackedModel:
    """Maps what is packed, and packs it first where nobody did. Raises ModelError."""
    try:
        return _packed_files(entry, quantization)
    except OSError as error:
        log.info("weights are packed in memory, since the entry takes no file: %s", error.strerror)
    with _fp32(entry) as opened:
        return pack_model(opened, quantization)


def prepare(directory: Path, quantization: str) -> None:
    """Packs an entry's weights before anyone serves them, if the model can be compiled. SystemExit
    with one line where they are no good; says on stderr where they cannot be written."""
    try:
        entry = read_entry(directory)
        check_model(entry.config, torch.float32, torch.device("cpu"))
        _packed_files(entry, quantization)
    except ModelError as error:
        raise SystemExit(error.message) from None
    except (BatonError, OSError) as error:
        sys.stderr.write(f"baton: weights are not packed: {error}\n")


def _packed_files(entry: ModelEntry, quantization: str) -> PackedModel:
    """Raises ModelError, and OSError where they can be neither read nor written."""
    folder = entry.directory / f"packed-{quantization}-{_key(entry)}"
    mapped = _mapped(folder)
    if mapped is not None:
        return mapped
    with (entry.directory / ".packed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mapped = _mapped(folder)
        if mapped is None:
            _write(folder, entry, quantization)
            mapped = _mapped(folder)
    if mapped is None:
        raise OSError(None, "what was written cannot be read")
    return mapped


def _mapped(folder: Path) -> PackedModel | None:
    """None where something is missing or not as the index says."""
    layers: Arrays = {}
    others: Arrays = {}
    try:
        index = json.loads((folder / INDEX).read_text())
        for path, (dtype, shape) in index.items():
            array = np.memmap(folder / path, dtype, mode="r", shape=tuple(shape)).view(np.ndarray)
            if array.nbytes != (folder / path).stat().st_size:
                return None
            part, _, name = path.rpartition("/")
            (layers if part == _LAYERS else others)[name] = array
        (num_layers,) = {len(array) for array in layers.values()}
        each = [{name: array[i] for name, array in layers.items()} for i in range(num_layers)]
        return model_of(others, each)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(folder: Path, entry: ModelEntry, quantization: str) -> None:
    """A folder is whole or not there."""
    beside = entry.directory
    for left in beside.glob(f".packed-{quantization}-*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = beside / f".{folder.name}.tmp"
    (temporary / _LAYERS).mkdir(parents=True)
    try:
        with _fp32(entry) as opened:
            _write_arrays(temporary, opened, entry.config.num_layers, quantization)
        if folder.exists():  # and not whole
            folder.rename(beside / f".{folder.name}.old")
        temporary.rename(folder)
    finally:
        for left in beside.glob(f".packed-{quantization}-*"):
            shutil.rmtree(left, ignore_errors=True)
    _remove_older(beside, quantization)


def _write_arrays(folder: Path, opened: OpenWeights, num_layers: int, quantization: str) -> None:
    """All of it, then the index."""
    index: dict[str, tuple[str, list[int]]] = {}
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}

        def write(path: str, array: NDArray[np.generic], shape: Sequence[int]) -> None:
            if path not in files:
                index[path] = (array.dtype.str, list(shape))
                files[path] = stack.enter_context((folder / path).open("wb"))
            files[path].write(array.data)

        for layer in opened.layers:
            for name, array in layer_arrays(layer, quantization).items():
                write(f"{_LAYERS}/{name}", array, (num_layers, *array.shape))
        for name, array in other_arrays(opened, quantization).items():
            write(name, array, array.shape)
        for file in files.values():
            # A file whose pages were lost with the power would read as zeros.
            file.flush()
            os.fsync(file.fileno())
    (folder / INDEX).write_text(json.dumps(index))


def _remove_older(beside: Path, quantization: str) -> None:
    """By renaming first, since somebody may be about to map it; at the next write if not now."""
    folders = sorted(beside.glob(f"packed-{quantization}-*"), key=lambda path: path.stat().st_mtime)
    for older in folders[:-_FOLDERS_KEPT]:
        with suppress(OSError):
            hidden = older.rename(beside / f".{older.name}.old")
            shutil.rmtree(hidden, ignore_errors=True)


def _fp32(entry: ModelEntry) -> AbstractContextManager[OpenWeights]:
    return open_weights(entry, torch.float32, torch.device("cpu"))


def _key(entry: ModelEntry) -> str:
    """Of whatever makes other bytes: the code that reads and packs, the config and the weights."""
    digest = hashlib.sha256()
    for source in (llama, weights, packing, tiles, packed, sys.modules[__name__]):
        digest.update(Path(str(source.__file__)).read_bytes())
    for path in (entry.directory / "config.json", *entry.weight_files):
        try:
            stat = path.stat()
        except OSError as error:
            raise ModelError("model", f"cannot read {path}: {error.strerror}") from None
        digest.update(json.dumps([stat.st_size, stat.st_mtime_ns]).encode())
    return digest.hexdigest()[:12]
