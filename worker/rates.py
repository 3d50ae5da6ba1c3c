"""How fast this worker has lately been at something, for the gateways' estimates."""

from common.types import StepRecord

# Halved whenever it is full: what is older than about twice this much work has no say.
_WINDOW_S = 10.0
_NEWEST_WEIGHT = 0.1
# Of a step's time that its prompt tokens count for at least: the two times differ by chance, too.
_LEAST_SHARE = 0.1


class Rate:
    """Units per second of work. Idle time is not work, so a quiet worker is not a slow one."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount += amount
        self._seconds += seconds
        if self._seconds > _WINDOW_S:
            self._amount /= 2
            self._seconds /= 2

    @property
    def per_s(self) -> float:
        """0: nothing measured yet."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class PrefillRates:
    """Tokens of prompts per second that they made steps longer: of a step that decodes as well, the
    time that a step without prompts takes is the running streams' own (a decode step waits for
    memory, and a few tokens more ride along). ``full_per_s`` is of the whole time of those steps
    alone that had at least half of the tokens that a step may have: short ones tell the time of a
    step, and nothing of what a queue of prompts would take."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._full_tokens = max_num_batched_tokens / 2
        self._added = Rate()
        self._full = Rate()
        self._decode_step_s = 0.0

    def add(self, record: StepRecord) -> None:
        seconds = record.end_s - record.start_s
        if not record.num_prefill_tokens:
            self._decode_step_s += _NEWEST_WEIGHT * (seconds - self._decode_step_s)
            return
        own_s = self._decode_step_s if record.num_decode_tokens else 0.0
        self._added.add(record.num_prefill_tokens, max(seconds - own_s, _LEAST_SHARE * seconds))
        if record.num_prefill_tokens >= self._full_tokens:
            self._full.add(record.num_prefill_tokens, seconds)

    @property
    def per_s(self) -> float:
        return self._added.per_s

    @property
    def full_per_s(self) -> float:
        return self._full.per_s
