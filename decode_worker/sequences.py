"""The sequences of this worker: by stream and request, and by their name in the engine."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from common.types import Offer, RequestId, SequenceId, SequenceSpec
from decode_worker.link import GatewayLink
from decode_worker.reservations import StreamId
from decode_worker.spans import SequenceSpans


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """``offer``: to be fetched, and released by whoever ends the sequence before; None from the
    moment that the fetch owns it, and for a local prefill. ``fetching``: claim to settle."""

    link: GatewayLink
    spec: SequenceSpec
    spans: SequenceSpans
    offer: Offer | None
    # Its prompt is computed here.
    is_local: bool
    deadline: asyncio.TimerHandle | None = None
    fetching: asyncio.Task[None] | None = None
    # Its promise is no longer needed.
    landed: bool = False
    transfer_s: float = 0.0
    told_usage: bool = False

    @property
    def key(self) -> tuple[StreamId, RequestId]:
        return (self.link.stream, self.spec.request_id)


class SequenceTable:
    def __init__(self) -> None:
        self._by_key: dict[tuple[StreamId, RequestId], DecodeSequence] = {}
        self._by_seq: dict[SequenceId, DecodeSequence] = {}

    def __len__(self) -> int:
        return len(self._by_seq)

    def __contains__(self, sequence: object) -> bool:
        return (
            isinstance(sequence, DecodeSequence)
            and self._by_seq.get(sequence.spec.seq_id) is sequence
        )

    def __iter__(self) -> Iterator[DecodeSequence]:
        return iter(list(self._by_seq.values()))

    def add(self, sequence: DecodeSequence) -> None:
        self._by_key[sequence.key] = sequence
        self._by_seq[sequence.spec.seq_id] = sequence

    def remove(self, sequence: DecodeSequence) -> bool:
        """False where it was gone already."""
        if self._by_seq.pop(sequence.spec.seq_id, None) is None:
            return False
        del self._by_key[sequence.key]
        return True

    def of_request(self, stream: StreamId, request_id: RequestId) -> DecodeSequence | None:
        return self._by_key.get((stream, request_id))

    def of_engine(self, seq_id: SequenceId) -> DecodeSequence | None:
        return self._by_seq.get(seq_id)

    def of_stream(self, stream: StreamId) -> list[DecodeSequence]:
        return [sequence for sequence in self if sequence.link.stream == stream]
