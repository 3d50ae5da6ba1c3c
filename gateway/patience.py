"""How long a request that has begun waits for a pool that is gone."""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import Unavailable


@dataclass(slots=True)
class Patience:
    """One for all that an attempt waits for in turn (its place in a queue, a worker, a slot): those
    who wait behind others must not wait one after the other for workers that are gone. Only the
    time in which ``is_up`` was false counts."""

    pool: str
    is_up: Callable[[], bool]
    limit_s: float
    clock: Callable[[], float]
    _last_s: float = field(init=False)
    _without_s: float = 0.0

    def __post_init__(self) -> None:
        self._last_s = self.clock()

    def look(self) -> None:
        """To be called now and then. Raises Unavailable once the pool was gone for too long."""
        now_s = self.clock()
        waited_s, self._last_s = now_s - self._last_s, now_s
        if self.is_up():
            return
        self._without_s += waited_s
        if self._without_s >= self.limit_s:
            raise Unavailable(f"no {self.pool} worker is up", pool=self.pool)

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self._without_s)
