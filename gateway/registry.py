"""Which workers there are, by what they say of themselves each second.

1. A report comes in on NATS: `WorkerReport`, from every worker each second and at each change.
2. A report that cannot be paired (I8) puts the worker on the refused list, with the field that
   differs; it is never routed to.
3. Silence for ``worker_timeout_s`` of this process' clock ends the entry, unless our own NATS link
   was down meanwhile, or (decode) a live stream to it says otherwise.
4. A worker whose engine has not finished a step for `HUNG_ENGINE_S` is as good as gone.
5. An attempt granted to a prefill worker and missing in two of its reports in a row has no owner.
   One started on a decode worker and missing in all of its reports for ``worker_timeout_s`` was
   forgotten there: what is on its way over the stream, either way, has long arrived by then.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.config import PROTOCOL_VERSION
from common.errors import LayoutMismatch
from common.types import LocalPrefill, Role
from common.wire import worker as wire

# A live event loop over an engine that has not finished a step for this long is a dead worker.
HUNG_ENGINE_S = 15.0


@dataclass(slots=True)
class WorkerEntry:
    """The last report of one worker and when it came."""

    report: wire.WorkerReport
    heard_s: float
    first_s: float

    @property
    def worker_id(self) -> str:
        return self.report.worker_id

    @property
    def ready(self) -> bool:
        return self.report.state == "ready"

    @property
    def computes_all_prompts(self) -> bool:
        """Role `both`: a decode worker that needs no prefill worker."""
        return self.report.local_prefill == LocalPrefill.ALWAYS


@dataclass(frozen=True, slots=True)
class Expected:
    """What a worker must agree with: fixed by the gateway's own model entry, or by the first
    worker heard while there is none."""

    fingerprint: str
    vocab_size: int


@dataclass(slots=True)
class _Granted:
    worker_id: str
    since_s: float
    # To be computed there.
    num_tokens: int
    num_missed: int = 0


@dataclass(slots=True)
class _Started:
    """``missing_since_s``: since when no report has it, None while they do."""

    worker_id: str
    missing_since_s: float | None = None


@dataclass(slots=True)
class WorkerRegistry:
    """``on_join`` is called for every new worker, ``on_report`` for each report of one that is in
    the entries, ``on_leave`` with the id of one that is gone and whether it died, and ``on_orphan``
    with (request id, attempt) of granted work that its owner no longer knows, ``on_forgotten`` with
    the same of started work."""

    worker_timeout_s: float
    clock: Callable[[], float]
    on_join: Callable[[WorkerEntry], None]
    on_leave: Callable[[str, bool], None]
    on_orphan: Callable[[str, int], None]
    on_report: Callable[[wire.WorkerReport], None] = lambda report: None
    on_forgotten: Callable[[str, int], None] = lambda request_id, attempt: None
    expected: Expected | None = None
    entries: dict[str, WorkerEntry] = field(default_factory=dict)
    refused: dict[str, tuple[str, LayoutMismatch, float]] = field(default_factory=dict)
    _granted: dict[tuple[str, int], _Granted] = field(default_factory=dict)
    _started: dict[tuple[str, int], _Started] = field(default_factory=dict)
    _paused_s: float | None = None

    # ------------------------------------------------------------ reports

    def report(self, report: wire.WorkerReport) -> None:
        known = self.entries.get(report.worker_id)
        if known is not None and report.epoch < known.report.epoch:
            return
        hangs = report.load.step_age_s > HUNG_ENGINE_S
        if report.state == "gone" or hangs:
            self._leave(report.worker_id, died=hangs)
            return
        mismatch = self._mismatch(report)
        if mismatch is not None:
            self._leave(report.worker_id, died=False)
            self.refused[report.worker_id] = (report.role, mismatch, self.clock())
            return
        self.refused.pop(report.worker_id, None)
        if known is not None and report.epoch > known.report.epoch:
            self._leave(report.worker_id, died=True)
            known = None
        now = self.clock()
        entry = WorkerEntry(report, now, known.first_s if known else now)
        self.entries[report.worker_id] = entry
        if known is None:
            self.on_join(entry)
        self.on_report(report)
        self._check_owned(report)
        self._check_started(report)

    def _mismatch(self, report: wire.WorkerReport) -> LayoutMismatch | None:
        if report.protocol_version != PROTOCOL_VERSION:
            return LayoutMismatch(
                "protocol_version", str(PROTOCOL_VERSION), str(report.protocol_version)
            )
        model = report.model
        expected = self.expected
        if expected is not None:
            if model.fingerprint != expected.fingerprint:
                return LayoutMismatch("model.fingerprint", expected.fingerprint, model.fingerprint)
            if model.vocab_size != expected.vocab_size:
                return LayoutMismatch(
                    "model.vocab_size", str(expected.vocab_size), str(model.vocab_size)
                )
        peer = next((e for e in self.entries.values() if e.worker_id != report.worker_id), None)
        if peer is None:
            return None
        if expected is None and model.fingerprint != peer.report.model.fingerprint:
            return LayoutMismatch(
                "model.fingerprint", peer.report.model.fingerprint, model.fingerprint
            )
        if peer.report.layout == report.layout:
            return None
        for name in wire.KVLayout.DESCRIPTOR.fields_by_name:
            ours, theirs = getattr(peer.report.layout, name), getattr(report.layout, name)
            if ours != theirs:
                return LayoutMismatch(f"layout.{name}", str(ours), str(theirs))
        return None

    # ------------------------------------------------------------ life and death

    def granted(self, request_id: str, attempt: int, worker_id: str, num_tokens: int) -> None:
        self._granted[request_id, attempt] = _Granted(worker_id, self.clock(), num_tokens)

    def settled(self, request_id: str, attempt: int) -> None:
        """The attempt needs its owner no more: ticket taken, or given up."""
        self._granted.pop((request_id, attempt), None)

    def _check_owned(self, report: wire.WorkerReport) -> None:
        owned = {(item.request_id, item.attempt) for item in report.load.owned}
        orphans = []
        # A report that was made before the grant may come after it, and twice.
        known_s = self.clock() - self.worker_timeout_s
        for key, granted in self._granted.items():
            if granted.worker_id != report.worker_id or granted.since_s > known_s:
                continue
            granted.num_missed = 0 if key in owned else granted.num_missed + 1
            if granted.num_missed >= 2:
                orphans.append(key)
        self._orphan(orphans)

    def started(self, request_id: str, attempt: int, worker_id: str) -> None:
        """A decode worker was told to go on with it."""
        self._started[request_id, attempt] = _Started(worker_id)

    def ended(self, request_id: str, attempt: int) -> None:
        self._started.pop((request_id, attempt), None)

    def _check_started(self, report: wire.WorkerReport) -> None:
        owned = {(item.request_id, item.attempt) for item in report.load.owned}
        now_s = self.clock()
        for key, started in list(self._started.items()):
            if started.worker_id != report.worker_id:
                continue
            if key in owned:
                started.missing_since_s = None
            elif started.missing_since_s is None:
                started.missing_since_s = now_s
            elif now_s - started.missing_since_s >= self.worker_timeout_s:
                del self._started[key]
                self.on_forgotten(*key)

    def _orphan(self, keys: Iterable[tuple[str, int]]) -> None:
        for key in list(keys):
            self._granted.pop(key, None)
            self.on_orphan(*key)

    def _leave(self, worker_id: str, died: bool) -> None:
        if self.entries.pop(worker_id, None) is None:
            return
        self._orphan([key for key, g in self._granted.items() if g.worker_id == worker_id])
        self.on_leave(worker_id, died)

    def pause(self) -> None:
        """Our own NATS link is down: nobody's silence means anything until it is back."""
        if self._paused_s is None:
            self._paused_s = self.clock()

    def resume(self) -> None:
        if self._paused_s is None:
            return
        self.excuse(self.clock() - self._paused_s)
        self._paused_s = None

    def excuse(self, gap_s: float) -> None:
        """We stood still for so long ourselves, and have not read yet what was said meanwhile."""
        for entry in self.entries.values():
            entry.heard_s += gap_s

    def expire(self, alive: Callable[[str], bool]) -> None:
        """Ends entries that were silent too long; ``alive`` knows of workers with a live stream.
        Where all are silent, and one of them has such a stream, it is NATS that is."""
        if self._paused_s is not None:
            return
        limit = self.clock() - self.worker_timeout_s
        silent = all(entry.heard_s < limit for entry in self.entries.values())
        if silent and any(map(alive, self.entries)):
            return
        for worker_id, entry in list(self.entries.items()):
            if entry.heard_s < limit and not alive(worker_id):
                self._leave(worker_id, died=True)
        self._orphan(
            key
            for key, granted in self._granted.items()
            if granted.worker_id not in self.entries and granted.since_s < limit
        )
        for worker_id, (_, _, heard_s) in list(self.refused.items()):
            if heard_s < limit:
                del self.refused[worker_id]

    # ------------------------------------------------------------ questions

    def queued_tokens(self, entry: WorkerEntry) -> int:
        """Of prompts that a worker still has to compute, by our own grants or by its report, which
        is up to a second old: it has gone on at its rate since."""
        granted = (g.num_tokens for g in self._granted.values() if g.worker_id == entry.worker_id)
        load = entry.report.load
        done = load.prefill_tokens_per_s * (self.clock() - entry.heard_s)
        return max(0, int(load.queued_tokens - done), sum(granted))

    def ready(self, role: Role) -> list[WorkerEntry]:
        return [e for e in self.entries.values() if e.report.role == role and e.ready]

    def any_free_prefill_slot(self) -> bool:
        return any(e.report.load.free_slots > 0 for e in self.ready(Role.PREFILL))

    def largest_pool(self, role: Role) -> int:
        """Blocks of the largest ready pool of a role, 0 without one."""
        return max((e.report.load.blocks.total for e in self.ready(role)), default=0)

    def smallest_pool(self, role: Role) -> int:
        return min((e.report.load.blocks.total for e in self.ready(role)), default=0)

    @property
    def block_size(self) -> int:
        entry = next(iter(self.entries.values()), None)
        return entry.report.layout.block_size if entry else 0

    @property
    def fingerprint(self) -> str:
        entry = next(iter(self.entries.values()), None)
        return entry.report.model.fingerprint if entry else ""
