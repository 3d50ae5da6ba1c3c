"""Two processes that hand blocks over, and the pipes that their parent talks to them by.

Control is JSON: nothing that a process says can run anything in another.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from bench.gpu.imports import allow_nothing_else

FOLDER_PREFIX = "baton-gpu-check-"
_TIMEOUT_S = 240.0

Job = TypeVar("Job")


class Control:
    """One end of a pipe. ``process`` is the one at the other end, in the parent."""

    def __init__(self, pipe: Connection, process: Any = None) -> None:
        self._pipe = pipe
        self.process = process

    def send(self, message: dict[str, Any]) -> None:
        self._pipe.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Raises RuntimeError for an error at the other end, TimeoutError for silence."""
        if not self._pipe.poll(_TIMEOUT_S):
            raise TimeoutError("a process of the hand-over does not answer")
        message: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        if "error" in message:
            raise RuntimeError(message["error"])
        return message

    def wait_for_the_end(self) -> None:
        """Until the parent hangs up."""
        self._pipe.poll(_TIMEOUT_S)

    def close(self) -> None:
        self._pipe.close()


@contextmanager
def two_processes(
    export: Callable[[Job, Control], None], import_: Callable[[Job, Control], None], job: Job
) -> Iterator[tuple[Control, Control]]:
    """Runs both beside each other, and ends both."""
    context = multiprocessing.get_context("spawn")
    controls: list[Control] = []
    try:
        for entry in (export, import_):
            here, there = context.Pipe()
            child = context.Process(target=_child, args=(entry, job, there), daemon=True)
            child.start()
            there.close()
            controls.append(Control(here, child))
        exporter, importer = controls
        yield exporter, importer
    finally:
        for control in controls:
            control.close()
        for control in controls:
            control.process.join(10)
            control.process.kill()


def _child(entry: Callable[[Job, Control], None], job: Job, pipe: Connection) -> None:
    allow_nothing_else()
    torch.set_num_threads(1)
    control = Control(pipe)
    try:
        entry(job, control)
    except Exception as error:
        control.send({"error": f"{type(error).__name__}: {error}"})
        raise
