"""The default model's prepared entry, in the user's cache, where `make demo` puts it too."""

from functools import cache
from pathlib import Path

from cli.model_cache import default_cache_dir, prepare_entry
from cli.prepare import DEFAULT_MODEL, find_source


@cache
def default_entry() -> Path:
    """Prepared by the first call ever (a few seconds), found by all others."""
    return prepare_entry(find_source(DEFAULT_MODEL), default_cache_dir(), lambda *_: None)
