"""From what ``--model`` says to what a serving process reads."""

import asyncio
import json
import sys
from pathlib import Path

from common.errors import ModelError

WITHOUT_FILES = ("oracle", "null")


async def prepared(model: str) -> str:
    """A prepared entry's folder, or the name of a model that has no files. Preparing may import
    transformers, so it is done by a child. Raises ModelError with the child's one line."""
    if model in WITHOUT_FILES or is_entry(Path(model)):
        return model
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", "prepare", "--json", "--model", model,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["prepare failed"]
        raise ModelError("model", lines[-1].removeprefix("error: ").removeprefix("model: "))
    return str(json.loads(output)["model"])


def is_entry(path: Path) -> bool:
    """Whether ``path`` is a prepared entry already."""
    try:
        return "baton" in json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
