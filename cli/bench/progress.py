"""What a user sees while a benchmark runs: on stderr, so that stdout holds the result alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.bench.load import OnEnd


class Steps:
    """A bar on a terminal; elsewhere a line a step."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar

    @contextmanager
    def step(self, text: str, num_requests: int) -> Iterator[OnEnd]:
        """One part of the work; what it gives is to be called at the end of each request."""
        if not self._console.is_terminal:
            self._console.print(text, markup=False)
        task = self._bar.add_task(text, total=num_requests)
        try:
            yield lambda _: self._bar.advance(task)
        finally:
            self._bar.remove_task(task)


@contextmanager
def progress() -> Iterator[Steps]:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        yield Steps(console, bar)
