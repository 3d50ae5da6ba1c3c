"""Gives a model without compute the pace of a real one."""

import time
from collections.abc import Callable


class Pace:
    """Steps end at least ``delay_s`` apart, and that long after their launch. ``sleep`` blocks."""

    def __init__(
        self,
        delay_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._delay_s = delay_s
        self._clock = clock
        self._sleep = sleep
        self._last_end_s = 0.0

    def launch(self) -> float:
        """When the step launched now is to end."""
        self._last_end_s = max(self._last_end_s, self._clock()) + self._delay_s
        return self._last_end_s

    def wait(self, end_s: float) -> None:
        remaining_s = end_s - self._clock()
        if self._delay_s and remaining_s > 0:
            self._sleep(remaining_s)
