"""Where compiled kernels lie, and filling that place before anything serves; packing weights too.

Every source of the kernels has a folder of its own: numba's index names classes of the source that
wrote it, and reading it with another one fails.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cli.model_cache import default_cache_dir
from common.errors import ModelError

_WARM_UP = "from engine.models.warm_up import compile_kernels; compile_kernels()"
_PACK = """
import pathlib, sys
from engine.models.packed_files import prepare
prepare(pathlib.Path(sys.argv[1]), sys.argv[2])
"""
_ROOT = Path(__file__).parents[1]


def kernel_cache() -> Mapping[str, str]:
    """What numba reads of a child's environment: kernels are compiled once for all processes.
    Empty where the environment names a folder itself, or there is no numba."""
    version = _numba_version()
    if version is None or "NUMBA_CACHE_DIR" in os.environ:
        return {}
    return {"NUMBA_CACHE_DIR": str(default_cache_dir() / "kernels" / _key(version))}


def fill_kernel_cache() -> None:
    """Compiles all kernels (about 10 s) where that was not done yet, in a child, since numba reads
    its environment once. Without numba it does nothing: a worker then computes with torch."""
    if _numba_version() is None:
        return
    environment = {**os.environ, **kernel_cache()}
    folder = Path(environment["NUMBA_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "complete"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        subprocess.run([sys.executable, "-c", _WARM_UP], cwd=_ROOT, env=environment, check=True)
        done.touch()


def pack_weights(entry: Path, quantization: str) -> None:
    """Puts an entry's weights into the order that compiled kernels read (a few seconds), in a
    child, for workers that may not write there. Without numba it does nothing. Raises ModelError
    for weights that cannot be used; what it says else goes on to stderr."""
    if _numba_version() is None:
        return
    packed = subprocess.run(
        [sys.executable, "-c", _PACK, str(entry.resolve()), quantization],
        cwd=_ROOT, env={**os.environ, **kernel_cache()},
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    last = packed.stderr.strip().rpartition("\n")[2]
    if packed.returncode:
        setting, _, text = last.partition(": ")
        raise ModelError(*(
            (setting, text) if text else ("model", f"packing ended with {packed.returncode}")
        ))  # fmt: skip
    if last:
        sys.stderr.write(f"{last}\n")


def _numba_version() -> str | None:
    try:
        return importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        return None


def _key(version: str) -> str:
    """Of whatever makes another machine code: numba's cache itself minds the kind of CPU."""
    digest = hashlib.sha256(version.encode())
    for path in sorted((_ROOT / "engine" / "kernels" / "cpu").glob("*.py")):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
