"""What a decode worker tells about itself: one frozen snapshot."""

from dataclasses import dataclass

from decode_worker.reservations import ReservationStatistics
from engine.statistics import EngineStatistics
from kv_transfer.imports import ImportStatistics
from worker.report import WorkerState


@dataclass(slots=True)
class Counters:
    """Since the start. ``fenced``: messages of an attempt that is not, or no longer, the one."""

    started: int = 0
    finished: int = 0
    aborted: int = 0
    kv_lost: int = 0
    failed: int = 0
    fenced: int = 0


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    state: WorkerState
    streams: int
    outbox_bytes: int
    sequences: int
    started: int
    finished: int
    aborted: int
    kv_lost: int
    failed: int
    fenced: int
    reservations: ReservationStatistics
    engine: EngineStatistics
    imports: ImportStatistics
