"""Gives a model without compute the pace of a real one."""

import time
from collections.abc import Callable, Sequence

from engine.batch import BatchRow


class Pace:
    """Steps end at least ``delay_s`` apart, and that long after their launch, and ``token_delay_s``
    later for each token of a row beyond its first: decoding waits for memory, a prompt for
    compute. ``sleep`` blocks."""

    def __init__(
        self,
        delay_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        token_delay_s: float = 0.0,
    ) -> None:
        self._delay_s = delay_s
        self._token_delay_s = token_delay_s
        self._clock = clock
        self._sleep = sleep
        self._last_end_s = 0.0

    def launch(self, rows: Sequence[BatchRow]) -> float:
        """When the step launched now is to end."""
        num_more = sum(len(row.token_ids) - 1 for row in rows) if self._token_delay_s else 0
        delay_s = self._delay_s + num_more * self._token_delay_s
        self._last_end_s = max(self._last_end_s, self._clock()) + delay_s
        return self._last_end_s

    def wait(self, end_s: float) -> None:
        remaining_s = end_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
