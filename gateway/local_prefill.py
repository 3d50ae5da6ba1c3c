"""Whether a decode worker computes a prompt itself, or gets its KV from a prefill worker.

With room promised on a decode worker, both ways are estimated in seconds:

::

    here   (queued + n) / rate                              n: tokens not cached on this worker
    there  (queued + m) / rate  +  blocks * block bytes / transfer rate  +  HAND_OFF_S
                                                            m: the best prefill worker's

Rates are what the workers measured and report. The streams that run here wait n / rate as well, all
at the same time, in the steps that compute the prompt; therefore ``here`` must be cheaper by
`_MARGIN`, and is only considered for short work, or for a prompt most of which is cached here (the
next turn of a chat): long prompts stay away from running streams whatever the estimate says.

A threshold set by hand takes the place of all this. Every decision has a reason, in the trace and
in a counter.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from common.types import LocalPrefill, Role
from common.wire import layout_from_proto
from gateway.registry import WorkerEntry, WorkerRegistry
from gateway.router import Router
from gateway.run import Run

# Two requests over NATS, accept and ticket; claim and settle are in the measured transfer rate.
HAND_OFF_S = 0.002
_MARGIN = 1.5
# Work of so many blocks is short.
_SHORT_BLOCKS = 2


class Reason(StrEnum):
    """Why a prompt is computed where it is."""

    ALWAYS = "always"
    BELOW_THRESHOLD = "below_threshold"
    CHEAPER_HERE = "cheaper_here"
    ABOVE_THRESHOLD = "above_threshold"
    NEVER = "never"
    NO_PREFILL_WORKER = "no_prefill_worker"
    LONG = "long"
    UNMEASURED = "unmeasured"
    CHEAPER_THERE = "cheaper_there"

    @property
    def is_local(self) -> bool:
        return self in (Reason.ALWAYS, Reason.BELOW_THRESHOLD, Reason.CHEAPER_HERE)


@dataclass(slots=True)
class LocalPrefillRule:
    """``threshold``: tokens left to compute up to which a worker that may does it itself."""

    registry: WorkerRegistry
    router: Router
    threshold: int | None
    counts: Counter[str] = field(default_factory=Counter)

    def decide(self, run: Run, worker_id: str) -> Reason:
        """For a decode worker that has promised room. Counted."""
        entry = self.registry.entries.get(worker_id)
        reason = Reason.NEVER if entry is None else self._reason(run, entry)
        self.counts[reason.value] += 1
        return reason

    def _reason(self, run: Run, entry: WorkerEntry) -> Reason:
        if entry.computes_all_prompts:
            return Reason.ALWAYS
        if entry.report.local_prefill != LocalPrefill.AUTO:
            return Reason.NEVER
        if not self.registry.ready(Role.PREFILL):
            return Reason.NO_PREFILL_WORKER
        num_uncached = self.router.num_uncached(run, entry.worker_id)
        if self.threshold is not None:
            below = num_uncached <= self.threshold
            return Reason.BELOW_THRESHOLD if below else Reason.ABOVE_THRESHOLD
        is_short = num_uncached <= _SHORT_BLOCKS * self.registry.block_size
        if not is_short and num_uncached > run.num_tokens / 2:
            return Reason.LONG
        there_s = self._there_s(run, entry)
        rate = entry.report.load.prefill_tokens_per_s or self._prefill_rate()
        if there_s is None or not rate:
            return Reason.UNMEASURED
        here_s = self.router.cost(run, entry) / rate
        return Reason.CHEAPER_HERE if here_s * _MARGIN < there_s else Reason.CHEAPER_THERE

    def _there_s(self, run: Run, decode: WorkerEntry) -> float | None:
        """Until the KV of the run lies on the decode worker; None while nothing was measured."""
        seconds = [
            self.router.cost(run, entry) / entry.report.load.prefill_tokens_per_s
            for entry in self.registry.ready(Role.PREFILL)
            if entry.report.load.prefill_tokens_per_s
        ]
        if not seconds:
            return None
        block_size = self.registry.block_size
        num_blocks = -(-run.num_tokens // block_size) - self.router.num_held(run, decode.worker_id)
        rate = decode.report.load.transfer_bytes_per_s
        block_bytes = layout_from_proto(decode.report.layout).block_bytes
        return min(seconds) + (num_blocks * block_bytes / rate if rate else 0.0) + HAND_OFF_S

    def _prefill_rate(self) -> float:
        """Of the fastest prefill worker: what to expect of a worker that has computed no prompt."""
        rates = (e.report.load.prefill_tokens_per_s for e in self.registry.ready(Role.PREFILL))
        return max(rates, default=0.0)
