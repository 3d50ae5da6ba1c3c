"""The pool's books are checked while it works: a lost block shows when it is lost, not at the end.

A check walks the whole pool (about 20 ms for 100,000 blocks), so it is made at the end of a step
after which the engine has nothing to do, not more often than every `IDLE_S`; under load that never
pauses, every `BUSY_S`.
"""

import logging
from collections.abc import Callable, Set

from engine.block_pool import BlockPool, CorruptPool

log = logging.getLogger(__name__)

IDLE_S = 30.0
BUSY_S = 300.0


class SelfCheck:
    """``owners`` tells the ids under which the engine holds blocks. ``raises``: a fault raises
    CorruptPool, which ends the engine (tests); else it is logged and counted, since the sequences
    that run are not to blame (production)."""

    def __init__(
        self,
        pool: BlockPool,
        owners: Callable[[], Set[int]],
        clock: Callable[[], float],
        raises: bool,
    ) -> None:
        self.num_faults = 0
        self._pool = pool
        self._owners = owners
        self._clock = clock
        self._raises = raises
        self._checked_s = clock()

    def after_step(self, has_work: bool) -> None:
        now_s = self._clock()
        if now_s - self._checked_s >= (BUSY_S if has_work else IDLE_S):
            self._checked_s = now_s
            self.check()

    def check(self) -> None:
        try:
            self._pool.check()
            if num_leaked := self._pool.num_leaked(self._owners()):
                raise CorruptPool(f"{num_leaked} references belong to nobody that runs")
        except CorruptPool:
            if self._raises:
                raise
            self.num_faults += 1
            log.exception("the books of the KV pool are wrong")
