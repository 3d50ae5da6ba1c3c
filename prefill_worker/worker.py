"""The prefill worker: owns jobs one by one, computes their prompts, hands over their KV.

The life of a job here:

1. It is pulled from the shared queue, or sent by name (intake.py); either takes a slot.
2. *Asked for*: the gateway grants each attempt once, to the first worker that asks, with what is
   left of its time. Refused or no answer: forgotten. Either way the delivery is acked at once.
3. *Computed*: the engine runs the prompt in chunks and samples the first token.
4. *Offered*: the prompt's blocks go under a lease; the engine holds them until the lease ends.
5. *Answered* with a ticket. Not taken, or no answer: the offer is released. Whatever ended the job
   before (failure, deadline, drain) is answered with a ticket too; a cancelled one with nothing.

From 2 to 5 the reports list the attempt as owned: when it is missing, the gateway has it done
again.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict

from common.bus import Bus
from common.config import PrefillSettings
from common.telemetry import Telemetry
from common.types import EngineEvent, StepRecord
from common.wire import worker as wire
from engine.engine import Engine
from kv_transfer.exports import Exports
from prefill_worker.intake import Intake
from prefill_worker.job import JobEnd
from prefill_worker.jobs import Jobs
from prefill_worker.metrics import exposition
from prefill_worker.slots import Slots
from prefill_worker.statistics import PrefillStatistics
from worker.drain import Phase
from worker.introspection import Json, to_json
from worker.kv_events import KvEventPublisher
from worker.metrics import StepMeter
from worker.rates import PrefillRates
from worker.registration import Registration
from worker.report import WorkerFacts, WorkerState, make_load, make_report
from worker.runtime import MakeRuntime
from worker.snapshot import EngineSnapshot

log = logging.getLogger(__name__)


class PrefillWorker:
    """Everything but the process around it; made and used inside the running event loop."""

    def __init__(
        self,
        facts: WorkerFacts,
        settings: PrefillSettings,
        bus: Bus,
        exports: Exports,
        make_runtime: MakeRuntime,
        telemetry: Telemetry,
    ) -> None:
        self._facts = facts
        self._exports = exports
        self._meter = StepMeter(facts.costs)
        self._runtime = make_runtime(self._on_events)
        self._snapshot = EngineSnapshot(self._runtime, self._refreshed)
        self._kv_events = KvEventPublisher(bus, facts.identity, self._runtime)
        self._prefill_rates = PrefillRates(facts.step_tokens)
        self._jobs = Jobs(
            facts,
            Slots(settings.max_num_seqs, facts.step_tokens),
            bus,
            exports,
            self._runtime,
            self._snapshot,
            telemetry,
            self._changed,
        )
        self._intake = Intake(bus, facts.identity.worker_id, self._jobs)
        self._registration = Registration(bus, facts.identity.worker_id, self.describe)
        self._state = WorkerState.STARTING
        self._told_free_slot = False

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        await self._runtime.start()
        await self._snapshot.start()
        await self._exports.start()
        self._state = WorkerState.READY
        self._jobs.accepting = True

    async def run(self) -> None:
        """Takes jobs and reports, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._snapshot.run(), name="snapshot")
            group.create_task(self._intake.run(), name="intake")
            group.create_task(self._registration.run(), name="registration")
            group.create_task(self._kv_events.run(), name="kv events")

    async def stop_intake(self) -> None:
        self._state = WorkerState.DRAINING
        self._jobs.accepting = False
        self._intake.stop()
        await self._registration.report()

    async def finish_jobs(self) -> None:
        await self._jobs.wait_idle()

    async def hand_back_jobs(self) -> None:
        """The gateway has them done elsewhere."""
        self._jobs.end_all(JobEnd.DRAINED)
        await self._jobs.wait_idle()

    async def serve_offers(self) -> None:
        await self._exports.wait_none()

    async def leave(self) -> None:
        self._state = WorkerState.GONE
        await self._registration.report()

    async def stop(self) -> None:
        """Ends what still runs. The bus, the pool and telemetry stay the caller's."""
        await self._jobs.stop()
        await self._exports.close()
        await self._runtime.stop()

    def drain_phases(self) -> list[Phase]:
        return [
            Phase("stop intake", self.stop_intake),
            Phase("finish jobs", self.finish_jobs, until=0.7),
            Phase("hand back jobs", self.hand_back_jobs, until=0.8),
            Phase("serve offers", self.serve_offers, until=0.95),
            Phase("leave", self.leave),
        ]

    # ------------------------------------------------------------ what others see

    def is_ready(self) -> bool:
        return self._state is WorkerState.READY

    def describe(self) -> wire.WorkerReport:
        load = make_load(
            self._snapshot.current,
            self._runtime.step_age_s(),
            owned=(job.key for job in self._jobs),
            bytes_moved=self._exports.statistics().num_bytes,
            kv_events=self._kv_events.number,
            free_slots=int(self._jobs.has_free_slot),
            queued_tokens=self._jobs.num_queued_tokens,
            prefill_tokens_per_s=self._prefill_rates.per_s,
            full_step_tokens_per_s=self._prefill_rates.full_per_s,
        )
        return make_report(self._facts, self._state, load)

    def statistics(self) -> PrefillStatistics:
        return PrefillStatistics(
            state=self._state,
            jobs=len(self._jobs),
            free_slots=int(self._jobs.has_free_slot),
            malformed=self._intake.num_malformed,
            engine=self._snapshot.current,
            exports=self._exports.statistics(),
            **asdict(self._jobs.counters),
        )

    def metrics(self) -> str:
        return exposition(self._facts, self.statistics(), self._meter)

    def debug_statistics(self) -> Json:
        return to_json(self.statistics())

    def debug_steps(self) -> Json:
        return to_json(list(self._snapshot.steps))

    async def debug_kv(self) -> Json:
        """The ledger, and who its owners are."""
        ledger = await self._runtime.call(Engine.ledger)
        return {
            "ledger": to_json(ledger),
            "sequences": {
                str(job.spec.seq_id): {
                    "request_id": job.spec.request_id,
                    "attempt": job.spec.attempt,
                }
                for job in self._jobs
            },
            "leases": to_json(self._exports.leases()),
        }

    # ------------------------------------------------------------ changes

    def _changed(self) -> None:
        """A job has come, gone or begun."""
        self._update_slot()
        self._registration.changed()

    def _refreshed(self) -> None:
        self._update_slot()
        self._kv_events.changed()

    def _update_slot(self) -> None:
        # Told each time: the intake looks for itself too, and may have seen what lay in between.
        self._intake.slot_changed()
        if self._jobs.has_free_slot != self._told_free_slot:
            self._told_free_slot = self._jobs.has_free_slot
            self._registration.changed()

    def _on_events(self, events: Sequence[EngineEvent], record: StepRecord | None) -> None:
        self._jobs.on_events(events, record)
        if record is not None:
            self._measure(record)

    def _measure(self, record: StepRecord) -> None:
        try:
            self._meter.add(record)
            self._prefill_rates.add(record)
        except Exception:
            log.exception("a bug in the figures of a step")
