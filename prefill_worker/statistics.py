"""What a prefill worker tells about itself: one frozen snapshot."""

from dataclasses import dataclass

from engine.statistics import EngineStatistics
from kv_transfer.exports import ExportStatistics
from worker.report import WorkerState


@dataclass(slots=True)
class Counters:
    """Jobs since the start. ``dropped``: nobody took the ticket."""

    granted: int = 0
    refused: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class PrefillStatistics:
    state: WorkerState
    jobs: int
    free_slots: int
    granted: int
    refused: int
    succeeded: int
    failed: int
    cancelled: int
    dropped: int
    malformed: int
    engine: EngineStatistics
    exports: ExportStatistics
