"""Packed weights on disk: packed once, mapped by all workers of the machine.

Beside an entry's weights lies a folder ``packed-<quantization>-<key>`` with one ``.npy`` file for
each kind of array; those in ``layers`` hold all layers, one after the other. Whoever needs it and
finds none packs the weights, a layer at a time, and renames the folder into place; two at once take
turns. Where the entry cannot be written, the weights are packed into the process's own memory.
"""

import fcntl
import hashlib
import json
import logging
import shutil
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import ConfigError, ModelError
from engine.kernels.cpu import packing, tiles
from engine.kernels.cpu.kernels import check_model
from engine.models import packed
from engine.models.config import ModelEntry, read_entry
from engine.models.llama import OpenWeights, open_weights
from engine.models.packed import PackedModel, layer_arrays, model_of, other_arrays, pack_model

log = logging.getLogger(__name__)


def load_packed(entry: ModelEntry, quantization: str) -> PackedModel:
    """Maps what is packed, and packs it first where nobody did. Raises ModelError."""
    folder = entry.directory / f"packed-{quantization}-{_key(entry)}"
    mapped = _mapped(folder)
    if mapped is not None:
        return mapped
    try:
        with (entry.directory / ".packed.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists() or _mapped(folder) is None:
                _write(folder, entry, quantization)
        mapped = _mapped(folder)
    except OSError as error:
        log.info("weights are packed in memory, since the entry takes no file: %s", error.strerror)
    if mapped is not None:
        return mapped
    with _fp32(entry) as weights:
        return pack_model(weights, quantization)


def prepare(directory: Path, quantization: str) -> None:
    """Packs an entry's weights before anyone serves them, if it is CPUs that will and the model can
    be compiled. SystemExit with one line where the weights are no good."""
    entry = read_entry(directory)
    try:
        check_model(entry.config, torch.float32, torch.device("cpu"))
        if not torch.cuda.is_available():
            load_packed(entry, quantization)
    except ModelError as error:
        raise SystemExit(error.message) from None
    except ConfigError as error:
        log.info("weights are not packed: %s", error.message)


def _mapped(folder: Path) -> PackedModel | None:
    """None where there is none that can be read whole."""
    try:
        others = {path.stem: _map(path) for path in folder.glob("*.npy")}
        stacked = {path.stem: _map(path) for path in (folder / "layers").glob("*.npy")}
        num_layers = min((len(array) for array in stacked.values()), default=0)
        layers = [{name: stacked[name][index] for name in stacked} for index in range(num_layers)]
        return model_of(others, layers)
    except (OSError, ValueError, EOFError, KeyError):
        return None


def _map(path: Path) -> NDArray[np.generic]:
    array: NDArray[np.generic] = np.load(path, mmap_mode="r").view(np.ndarray)
    return array


def _write(folder: Path, entry: ModelEntry, quantization: str) -> None:
    """A folder is whole or not there; those of other kernels or other weights go."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "layers").mkdir(parents=True)
    try:
        with _fp32(entry) as weights, ExitStack() as files:
            opened: dict[str, BinaryIO] = {}
            for layer in weights.layers:
                for name, array in layer_arrays(layer, quantization).items():
                    if name not in opened:
                        path = temporary / "layers" / f"{name}.npy"
                        opened[name] = files.enter_context(path.open("wb"))
                        shape = (entry.config.num_layers, *array.shape)
                        _write_header(opened[name], array.dtype, shape)
                    opened[name].write(array.data)
            for name, array in other_arrays(weights, quantization).items():
                np.save(temporary / f"{name}.npy", array)
        for older in folder.parent.glob(f"packed-{quantization}-*"):
            shutil.rmtree(older)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_header(file: BinaryIO, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
    """Data begins at a multiple of 64 bytes, by the format."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape,
    }  # fmt: skip
    np.lib.format.write_array_header_1_0(file, header)


def _fp32(entry: ModelEntry) -> AbstractContextManager[OpenWeights]:
    return open_weights(entry, torch.float32, torch.device("cpu"))


def _key(entry: ModelEntry) -> str:
    """Of whatever makes other bytes: the code that packs, the config and the weights."""
    digest = hashlib.sha256()
    for source in (packing, tiles, packed, sys.modules[__name__]):
        digest.update(Path(str(source.__file__)).read_bytes())
    digest.update((entry.directory / "config.json").read_bytes())
    stats = [path.stat() for path in entry.weight_files]
    digest.update(json.dumps([(stat.st_size, stat.st_mtime_ns) for stat in stats]).encode())
    return digest.hexdigest()[:12]
