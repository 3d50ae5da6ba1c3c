"""The cache of prepared model entries.

The life of an entry:

1. its folder's name is made from the model's name and a key over the source's files (path, size,
   time of change) and the format's version: a changed source is a new entry;
2. under the entry's lock, a finished folder is used as it is;
3. else it is built in a folder of its own beside it, fingerprinted once, and renamed into place: an
   entry is complete or absent, also when two prepare at once or one is killed.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from cli.model_source import EntryFacts, ModelSource, Progress
from common.errors import ConfigError, ModelError

# Raised whenever what an entry holds for the same source changes.
FORMAT = 1
_CHUNK_BYTES = 1 << 22


def default_cache_dir() -> Path:
    """``BATON_CACHE``, or ``baton`` in the user's cache folder."""
    if path := os.environ.get("BATON_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def prepare_entry(source: ModelSource, cache_dir: Path, progress: Progress) -> Path:
    """The folder of the prepared entry. Raises ModelError when the source cannot be served and
    ConfigError when the cache cannot be written."""
    key = _source_key(source)
    entry = cache_dir / "models" / f"{_file_name(source.name)}-{key[:12]}"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.parent / f".{entry.name}.lock"):
            if not _complete(entry):
                _build(source, entry, progress)
    except OSError as error:
        raise ConfigError("cache_dir", f"cannot write {entry}: {error.strerror}") from None
    return entry


def _build(source: ModelSource, entry: Path, progress: Progress) -> None:
    temporary = entry.parent / f".{entry.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        facts = source.write(temporary, progress)
        _check_tokenizer(temporary / "tokenizer.json", facts.config["vocab_size"])
        fingerprint = _fingerprint(temporary, facts, progress)
        baton = {
            "name": source.name,
            "fingerprint": fingerprint,
            "eos_token_ids": list(facts.eos_token_ids),
            "default_sampling": dict(facts.default_sampling),
            "template_variables": dict(facts.template_variables),
            "weight_files": list(facts.weight_files),
        }
        _write_json(temporary / "config.json", {**facts.config, "baton": baton})
        shutil.rmtree(entry, ignore_errors=True)
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fingerprint(directory: Path, facts: EntryFacts, progress: Progress) -> str:
    """SHA-256 over normalised config, tokenizer and weights."""
    digest = hashlib.sha256(json.dumps(facts.config, sort_keys=True).encode())
    paths = [directory / "tokenizer.json", *(directory / name for name in facts.weight_files)]
    total = sum(path.stat().st_size for path in paths)
    done = 0
    for path in paths:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress("fingerprint", done, total)
    return digest.hexdigest()


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError("model", f"tokenizer.json cannot be used: {error}") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise ModelError(
            "model", f"tokenizer.json has ids up to {largest}, the model {vocab_size} embeddings"
        )


def _complete(entry: Path) -> bool:
    """Whether the entry is there and the weights that it links to still are."""
    try:
        baton = json.loads((entry / "config.json").read_text())["baton"]
        return all((entry / name).exists() for name in baton["weight_files"])
    except (OSError, ValueError, KeyError):
        return False


def _source_key(source: ModelSource) -> str:
    parts: list[Any] = [FORMAT, source.name]
    for path in source.files:
        stat = path.stat()
        parts.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "model"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
