"""From the wire to the engine: a SequenceState as the SequenceSpec of one run."""

import itertools

from common.types import SequenceId, SequenceSpec
from common.wire import inference, sampling_from_proto
from common.wire import worker as wire


class SequenceIds:
    """Names for sequences, unique for the life of one engine."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def new(self) -> SequenceId:
        return SequenceId(next(self._next))


def spec_from_state(
    state: wire.SequenceState, seq_id: SequenceId, arrival_s: float, *, prefill_only: bool
) -> SequenceSpec:
    return SequenceSpec(
        seq_id=seq_id,
        request_id=state.request_id,
        attempt=state.attempt,
        prompt_ids=tuple(state.prompt_ids),
        output_ids=tuple(state.output_ids),
        params=sampling_from_proto(state.sampling),
        tenant=state.tenant,
        cache_salt=state.cache_salt,
        priority=state.priority,
        arrival_s=arrival_s,
        prefill_only=prefill_only,
        speculate=state.speculation != inference.SPECULATION_OFF,
    )
