"""What `baton up` is doing while it starts, on stderr: one changing line on a terminal, else a
line for each thing; nothing for programs."""

from rich.console import Console
from rich.status import Status


class Progress:
    def __init__(self, console: Console, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._status: Status | None = None

    def __call__(self, text: str) -> None:
        if self._quiet:
            return
        if not self._console.is_terminal:
            self._console.print(f"baton: {text}")
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def end(self) -> None:
        """Takes the line away; to be called whatever happens."""
        if self._status is not None:
            self._status.stop()
            self._status = None
