"""A team of threads that run one compiled function together: this thread and its helpers.

Helpers wait in a queue between steps, so an idle worker burns nothing. Inside the function they
take items of work from each other (sync.py); one that has not begun when all is done is called off.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.kernels.cpu.sync import WORDS


class Team:
    """``num_phases``: phases with items that a function may have."""

    def __init__(self, num_threads: int, num_phases: int) -> None:
        self.num_threads = num_threads
        self._words: NDArray[np.int64] = np.zeros(WORDS * num_phases, dtype=np.int64)
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), thread_name_prefix="kernels")

    @property
    def words(self) -> int:
        """Address of the words that the threads share."""
        return self._words.ctypes.data

    def run(self, function: Callable[..., None], *args: object) -> None:
        """``function(thread, num_threads, *args)`` in every thread; returns when none is in it."""
        self._words[:] = 0
        others = [
            self._helpers.submit(function, thread, self.num_threads, *args)
            for thread in range(1, self.num_threads)
        ]
        function(0, self.num_threads, *args)
        for other in others:
            if not other.cancel():
                other.result()
