"""Bugs to plant: each takes away one guard of the protocol."""

import asyncio
from collections.abc import Callable

import pytest

from common.wire import worker as wire
from decode_worker.reservations import Reservations
from engine.engine import Engine
from gateway import prefill_dispatch
from gateway.attempt import Attempt
from gateway.prefill_dispatch import PrefillDispatch
from gateway.run import Arrival, Run
from gateway.sequence_state import sequence_state


def no_attempt_fence(patch: pytest.MonkeyPatch) -> None:
    """Whatever speaks of an older attempt is taken for the current one."""

    def current(self: Run, attempt_number: int) -> Attempt | None:
        return self.attempt

    patch.setattr(Run, "current", current)


def resume_forgets_a_token(patch: pytest.MonkeyPatch) -> None:
    """A later attempt starts from one output token less than the client has, and numbers its
    tokens as if it had them all."""

    def shortened(run: Run, attempt: Attempt, now_s: float) -> wire.SequenceState:
        state = sequence_state(run, attempt, now_s)
        if attempt.number > 1 and len(state.output_ids) > 1:
            del state.output_ids[0]
        return state

    patch.setattr(prefill_dispatch, "sequence_state", shortened)


def every_asker_owns(patch: pytest.MonkeyPatch) -> None:
    """An attempt is granted to whoever asks, the last one owns it, and any ticket is taken."""
    accept = PrefillDispatch.accept

    def granting(self: PrefillDispatch, request: wire.AcceptRequest) -> wire.AcceptReply:
        found = self._runs.current(request.request_id, request.attempt)
        if found is not None:
            found[1].owner = None
            found[1].ticket = None
        return accept(self, request)

    patch.setattr(PrefillDispatch, "accept", granting)


def promises_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservations, "unreserve", lambda *args: None)


def freed_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    """Blocks of an aborted import go back while the copy into them still runs."""
    abort, drop = Engine.abort, Engine.drop_import

    def abort_at_once(self: Engine, seq_id: object) -> None:
        abort(self, seq_id)  # type: ignore[arg-type]
        if seq_id in self._quarantined:
            drop(self, seq_id)  # type: ignore[arg-type]

    def drop_once(self: Engine, seq_id: object) -> None:
        if seq_id in self._sequences or seq_id in self._quarantined:
            drop(self, seq_id)  # type: ignore[arg-type]

    patch.setattr(Engine, "abort", abort_at_once)
    patch.setattr(Engine, "drop_import", drop_once)


def a_lost_attempt_is_not_retried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attempt, "lose", lambda self, lost: None)


def tokens_wake_nobody(patch: pytest.MonkeyPatch) -> None:
    """They are found when something else wakes their request."""
    receive = Run.receive

    def quiet(self: Run, arrival: Arrival) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        receive(self, arrival)
        self._changed = changed

    patch.setattr(Run, "receive", quiet)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    plant.__name__: plant
    for plant in (
        no_attempt_fence,
        resume_forgets_a_token,
        every_asker_owns,
        promises_not_given_back,
        freed_under_a_copy,
        a_lost_attempt_is_not_retried,
        tokens_wake_nobody,
    )
}
