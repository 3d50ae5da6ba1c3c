"""Weights from safetensors files, memory-mapped, each name checked for presence and shape.

A tensor whose dtype is the model's stays a view of the mapped file, which all processes of the
machine share; others are converted copies, as are tensors that are merged.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ModelError

_DTYPES = ("F32", "F16", "BF16")


class WeightFiles:
    """The tensors of a checkpoint by name. Raises ModelError, one line, for whatever is wrong."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._unused: dict[str, tuple[Path, Any]] = {}
        for path in files:
            opened = _open(path)
            names: list[str] = opened.keys()
            self._unused.update((name, (path, opened)) for name in names)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called ``name``, which must have this shape; once only."""
        if name not in self._unused:
            raise ModelError("model", f"weights lack {name}")
        path, opened = self._unused.pop(name)
        stored = opened.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            found = list(stored.get_shape())
            raise ModelError("model", f"{name} has shape {found}, config.json says {list(shape)}")
        if stored.get_dtype() not in _DTYPES:
            raise ModelError("model", f"{name} is {stored.get_dtype()}, not {', '.join(_DTYPES)}")
        try:
            tensor: Tensor = opened.get_tensor(name)
        except _safetensors().SafetensorError as error:
            raise ModelError("model", f"cannot read {name} from {path}: {error}") from None
        return tensor.to(self._device, self._dtype)

    def merge(self, *parts: tuple[str, tuple[int, ...]]) -> Tensor:
        """Several tensors, by name and shape, put one after the other along their first axis."""
        return torch.cat([self.take(name, *shape) for name, shape in parts])

    def ignore(self, *names: str) -> None:
        """Drops what some checkpoints hold and no model needs."""
        for name in names:
            self._unused.pop(name, None)

    def finish(self) -> None:
        """Everything must have been taken: a leftover means another architecture."""
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError("model", f"weights hold {names[0]}{more}, which the model has not")


def _open(path: Path) -> Any:
    try:
        return _safetensors().safe_open(path, framework="pt")
    except OSError as error:
        raise ModelError("model", f"cannot read {path}: {error}") from None
    except _safetensors().SafetensorError as error:
        raise ModelError("model", f"{path} is truncated or corrupt: {error}") from None


def _safetensors() -> Any:
    """Imported where files are read alone: models of random weights run without the package."""
    return import_module("safetensors")
