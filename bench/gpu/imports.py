"""An import hook: a GPU machine may have nothing but Python, torch, triton and what those need."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OURS = {"bench", "common", "engine", "kv_transfer"}
_GIVEN = {"numpy", "torch", "torchgen", "triton", "nvidia", "cuda"}
# Requirements of torch itself.
_OF_TORCH = {
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy",
    "typing_extensions",
}  # fmt: skip
ALLOWED = frozenset(_OURS | _GIVEN | _OF_TORCH) | sys.stdlib_module_names

# Of Python itself, and of installs in place.
_PREFIXES = ("_sysconfigdata_", "__editable__")


class _OnlyAllowed(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top in ALLOWED or top.startswith(_PREFIXES):
            return None
        raise ModuleNotFoundError(f"{name} is not allowed in gpu_check", name=name)


def allow_nothing_else() -> None:
    """Every import from now on that is not in ``ALLOWED`` fails as if it were not installed."""
    sys.meta_path.insert(0, _OnlyAllowed())
