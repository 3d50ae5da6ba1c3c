"""What a phase of the soak is given: a seed, a time to end, a folder, and where figures go."""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from faults.figures import Figures
from faults.history import History


@dataclass
class Stage:
    """``until_s`` on the loop's clock."""

    seed: int
    until_s: float
    folder: Path
    figures: Figures
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def goes_on(self, count: str, goal: int) -> bool:
        """Whether there is time, and something left to do."""
        in_time = asyncio.get_running_loop().time() < self.until_s
        return in_time and self.figures.counts[count] < goal

    def judge(self, histories: Iterable[History], what: str) -> None:
        """Counts requests, tokens, what was wrong and how they ended."""
        counts = self.figures.counts
        for history in histories:
            counts["requests"] += 1
            counts["tokens"] += len(history.token_ids)
            if history.refusal is not None:
                counts[f"ended {type(history.refusal).__name__}"] += 1
                self.figures.example(f"seed {self.seed}: {what}: {history.refusal}")
            elif history.attempts > 1:
                counts["moved"] += 1
                self.figures.sample("pause_s", history.longest_pause_s)
            if faults := history.faults():
                counts["wrong"] += 1
                self.figures.example(f"seed {self.seed}: {what}: {', '.join(faults)}")
