"""Where a request goes: costs of prefill workers, the choice of a decode worker, local prefill."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_keys import chain_keys, key_prefix, root_key
from common.types import Role, SamplingParams
from common.wire import worker as wire
from gateway.decode_link import DecodeLink
from gateway.decode_pool import DecodePool
from gateway.local_prefill import LocalPrefillRule, Reason
from gateway.prefix_index import PrefixIndex
from gateway.registry import WorkerRegistry
from gateway.request import Request
from gateway.router import Router
from gateway.run import Counters, Run, Runs

BLOCK = 16


class Fleet:
    """Workers as one gateway knows them; the clock is set by hand."""

    def __init__(self, mode: str = "auto", threshold: int | None = None) -> None:
        self.now_s = 0.0
        self.index = PrefixIndex()
        self.registry = WorkerRegistry(
            3.0,
            lambda: self.now_s,
            on_join=lambda entry: None,
            on_leave=lambda worker_id, died: self.index.leave(worker_id),
            on_orphan=lambda request_id, attempt: None,
            on_report=lambda report: self.index.report(report.worker_id, report.epoch, 0),
        )
        self.router = Router(mode, self.registry, self.index, seed="s")  # type: ignore[arg-type]
        self.rule = LocalPrefillRule(self.registry, self.router, threshold)

    def worker(
        self,
        worker_id: str,
        role: str = "prefill",
        *,
        local_prefill: str = "auto",
        held: tuple[int, ...] = (),
        epoch: int = 1,
        **load: float,
    ) -> None:
        """One report; ``held``: ids of a prompt that it has cached."""
        layout = wire.KVLayout(
            num_layers=1, block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float32"
        )
        self.registry.report(
            wire.WorkerReport(
                worker_id=worker_id,
                role=role,
                epoch=epoch,
                protocol_version=1,
                model=wire.ModelDescription(fingerprint="f", vocab_size=10, max_model_len=9999),
                layout=layout,
                state="ready",
                local_prefill=local_prefill if role == "decode" else "",
                load=wire.WorkerLoad(**load),
            )
        )
        if held:
            keys = chain_keys(root_key("f", "", ""), held, BLOCK)
            number = self.index._caches[worker_id].number + 1
            stored = map(key_prefix, keys)
            self.index.events(worker_id, wire.KvEvents(epoch=epoch, number=number, stored=stored))


def make_run(num_tokens: int, prompt_logprobs: int | None = None) -> Run:
    params = SamplingParams(max_tokens=9, seed=0, prompt_logprobs=prompt_logprobs)
    return Run(Request("r", "", prompt(num_tokens), params, 9.0), 0.0, Counters())


def prompt(num_tokens: int) -> tuple[int, ...]:
    return tuple(i % 7 for i in range(num_tokens))


def test_the_worker_that_has_most_to_reuse_is_asked_first() -> None:
    fleet = Fleet()
    fleet.worker("a")
    fleet.worker("b", held=prompt(32))
    fleet.worker("c", held=prompt(64))
    assert fleet.router.targets(make_run(100)) == ["c", "b"]
    assert fleet.router.num_uncached(make_run(100), "c") == 36
    assert fleet.router.num_uncached(make_run(64), "c") == 1
    # Its log-probabilities are computed, whatever is cached; then any worker will do.
    assert fleet.router.targets(make_run(100, prompt_logprobs=1)) == []


@pytest.mark.fault("F12")
def test_a_worker_that_lost_the_kv_is_not_asked_again_while_there_is_another() -> None:
    fleet = Fleet()
    fleet.worker("a", held=prompt(64))
    fleet.worker("b")
    run = make_run(100)
    run.excluded_prefill.add("a")
    assert fleet.router.avoids_some(run)
    assert fleet.router.targets(run) == ["b"]
    run.excluded_prefill.add("b")
    assert not fleet.router.avoids_some(run)
    assert fleet.router.targets(run) == ["a", "b"]


def test_a_queue_longer_than_what_is_saved_sends_it_elsewhere() -> None:
    fleet = Fleet()
    fleet.worker("a", queued_tokens=47)
    fleet.worker("b", held=prompt(48), queued_tokens=100)
    assert fleet.router.targets(make_run(100)) == ["a", "b"]
    fleet.worker("b", queued_tokens=94)
    assert fleet.router.targets(make_run(100)) == ["b", "a"]


def test_own_grants_count_until_they_are_settled_or_the_epoch_ends() -> None:
    fleet = Fleet()
    fleet.worker("a")
    fleet.worker("b")
    fleet.registry.granted("x", 1, "a", num_tokens=50)
    assert fleet.router.targets(make_run(10)) == ["b", "a"]
    fleet.worker("a", queued_tokens=20)
    assert fleet.registry.queued_tokens(fleet.registry.entries["a"]) == 50
    fleet.registry.settled("x", 1)
    fleet.registry.settled("x", 1)
    assert fleet.registry.queued_tokens(fleet.registry.entries["a"]) == 20
    fleet.registry.granted("y", 1, "a", num_tokens=50)
    fleet.worker("a", epoch=2)
    assert fleet.registry.queued_tokens(fleet.registry.entries["a"]) == 0


def test_a_queue_that_was_reported_is_worked_off_meanwhile() -> None:
    fleet = Fleet()
    fleet.worker("a", queued_tokens=100, prefill_tokens_per_s=80.0)
    fleet.worker("b", queued_tokens=60)
    assert fleet.router.targets(make_run(10)) == ["b", "a"]
    fleet.now_s = 1.0
    assert fleet.router.targets(make_run(10)) == ["a", "b"]
    assert fleet.registry.queued_tokens(fleet.registry.entries["a"]) == 20
    fleet.now_s = 2.0
    assert fleet.registry.queued_tokens(fleet.registry.entries["a"]) == 0


def test_what_was_sent_to_a_worker_is_expected_there_until_events_had_time_to_come() -> None:
    fleet = Fleet()
    fleet.worker("p")
    fleet.worker("d", "decode")
    run = make_run(40)
    fleet.router.sent(run, "p")
    run.output_ids = list(prompt(100)[40:])
    fleet.router.sent(run, "d")
    again = make_run(100)
    assert (fleet.router.num_held(again, "p"), fleet.router.num_held(again, "d")) == (2, 6)
    assert fleet.router.num_held(make_run(16), "x") == 0
    fleet.now_s = 1.9
    fleet.worker("d", "decode", held=prompt(48))
    assert fleet.router.num_held(again, "d") == 6
    fleet.now_s = 2.0
    assert (fleet.router.num_held(again, "p"), fleet.router.num_held(again, "d")) == (0, 3)
    for mode in ("load", "random"):
        other = Fleet(mode)
        other.worker("p")
        other.router.sent(run, "p")
        assert other.router.num_held(again, "p") == 0


def test_without_events_load_alone_decides() -> None:
    for mode, lost in (("load", False), ("auto", True)):
        fleet = Fleet(mode)
        fleet.worker("a", queued_tokens=5)
        fleet.worker("b", held=prompt(64), queued_tokens=6)
        if lost:
            fleet.index.lose_step()
        assert fleet.router.targets(make_run(64)) == ["a", "b"]


def test_workers_that_are_all_the_same_take_it_from_the_shared_queue() -> None:
    fleet = Fleet()
    assert fleet.router.targets(make_run(10)) == []
    fleet.worker("a", held=prompt(16))
    assert fleet.router.targets(make_run(20)) == []
    fleet.worker("b", held=prompt(16))
    assert fleet.router.targets(make_run(20)) == []


def test_a_worker_that_has_not_reported_is_not_asked_by_name() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.worker(name, queued_tokens=9)
    fleet.worker("c")
    fleet.now_s = 2.0
    for name in ("a", "b"):
        fleet.worker(name, queued_tokens=9 + (name == "b"))
    assert fleet.router.targets(make_run(10)) == ["a", "b"]


def test_ties_and_random_routing_spread_evenly_and_repeat_by_seed() -> None:
    def choices(mode: str) -> list[str]:
        fleet = Fleet(mode)
        for name in "abc":
            fleet.worker(name)
        fleet.worker("d", queued_tokens=1)
        return [fleet.router.targets(make_run(10))[0] for _ in range(300)]

    for mode, names in (("auto", "abc"), ("random", "abcd")):
        counts = Counter(choices(mode))
        assert set(counts) == set(names)
        assert min(counts.values()) > 300 / len(names) / 2
        assert choices(mode) == choices(mode)


@settings(max_examples=100, deadline=None)
@given(
    workers=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 200)), min_size=2, max_size=5),
    num_tokens=st.integers(1, 140),
)
def test_the_first_target_has_the_least_cost(
    workers: list[tuple[int, int]], num_tokens: int
) -> None:
    fleet = Fleet()
    for number, (num_held, queued) in enumerate(workers):
        fleet.worker(f"p{number}", held=prompt(BLOCK * num_held), queued_tokens=queued)
    costs = {
        f"p{number}": max(1, num_tokens - BLOCK * min(num_held, num_tokens // BLOCK)) + queued
        for number, (num_held, queued) in enumerate(workers)
    }
    targets = fleet.router.targets(make_run(num_tokens))
    if targets:
        assert [costs[name] for name in targets] == sorted(costs.values())[:2]
    else:
        assert len(set(costs.values())) == 1


# ---------------------------------------------------------------- decode placement


async def test_decode_placement_weighs_room_and_running_sequences_and_prefix() -> None:
    fleet = Fleet()
    pool = DecodePool(
        "gw",
        Runs(),
        fleet.registry,
        fleet.router,
        3.0,
        lambda entry: None,
        lambda: None,  # type: ignore[arg-type,return-value]
    )
    fleet.worker("a", "decode", running=10)
    fleet.worker("b", "decode", running=4)
    fleet.worker("c", "decode", running=9, held=prompt(64))
    for name, free in (("a", 100), ("b", 90), ("c", 90)):
        link = DecodeLink(name, "gw", Runs(), 3.0, lambda: None)
        link.num_blocks, link.blocks_free, link.connected = 100, free, True
        pool.links[name] = link

    def order(run: Run) -> list[str]:
        return [link.worker_id for link in pool.candidates(run, prefer_local=False)]

    # 100 - 10, 90 - 4, 90 - 9 + eight times the blocks held.
    assert order(make_run(10)) == ["a", "b", "c"]
    assert order(make_run(16)) == ["a", "c", "b"]
    assert order(make_run(32)) == ["c", "a", "b"]
    pool.links["a"].blocks_free = 20
    assert order(make_run(16)) == ["c", "b", "a"]
    # Who has no room for it comes last, whatever is cached there.
    pool.links["c"].blocks_free = 3
    assert order(make_run(64)) == ["b", "a", "c"]
    await asyncio.sleep(0)


# ---------------------------------------------------------------- local prefill

MEASURED = {"prefill_tokens_per_s": 1000.0}


@pytest.mark.parametrize(
    ("mode", "num_tokens", "prefill", "decode", "held", "reason"),
    [
        ("always", 500, {}, {}, 0, Reason.ALWAYS),
        ("never", 5, MEASURED, MEASURED, 0, Reason.NEVER),
        ("auto", 5, None, MEASURED, 0, Reason.NO_PREFILL_WORKER),
        ("auto", 5, {}, {}, 0, Reason.UNMEASURED),
        # 5 ms here, 7 ms there: not by enough, until there is a queue of 1 ms there.
        ("auto", 5, MEASURED, MEASURED, 0, Reason.CHEAPER_THERE),
        ("auto", 5, MEASURED | {"queued_tokens": 1}, MEASURED, 0, Reason.CHEAPER_HERE),
        ("auto", 3, MEASURED, MEASURED, 0, Reason.CHEAPER_HERE),
        ("auto", 3, MEASURED, MEASURED | {"queued_tokens": 9}, 0, Reason.CHEAPER_THERE),
        # A worker that has computed no prompt yet is taken to be as fast as the others.
        ("auto", 3, MEASURED, {}, 0, Reason.CHEAPER_HERE),
        # Long, whatever the queues are; but most of it may be here.
        ("auto", 100, MEASURED | {"queued_tokens": 9999}, MEASURED, 0, Reason.LONG),
        ("auto", 100, MEASURED, MEASURED, 4, Reason.CHEAPER_HERE),
        # 4 bytes x 2 x 16 a block: 7 blocks of 128 bytes take 7 ms.
        ("auto", 9, MEASURED, MEASURED, 0, Reason.CHEAPER_THERE),
        ("auto", 9, MEASURED, MEASURED | {"transfer_bytes_per_s": 128 / 3e-3}, 0,
         Reason.CHEAPER_HERE),
    ],
)  # fmt: skip
def test_local_prefill_where_it_is_clearly_cheaper(
    mode: str,
    num_tokens: int,
    prefill: dict[str, float] | None,
    decode: dict[str, float],
    held: int,
    reason: Reason,
) -> None:
    fleet = Fleet()
    if prefill is not None:
        fleet.worker("p", **prefill)
    fleet.worker("d", "decode", local_prefill=mode, held=prompt(held * BLOCK), **decode)
    assert fleet.rule.decide(make_run(num_tokens), "d") is reason
    assert fleet.rule.counts == {reason.value: 1}
    local = {Reason.ALWAYS, Reason.BELOW_THRESHOLD, Reason.CHEAPER_HERE}
    assert reason.is_local == (reason in local)


def test_a_threshold_takes_the_place_of_the_estimate() -> None:
    fleet = Fleet(threshold=20)
    fleet.worker("p")
    fleet.worker("d", "decode", held=prompt(48))
    assert fleet.rule.decide(make_run(20), "d") is Reason.BELOW_THRESHOLD
    assert fleet.rule.decide(make_run(68), "d") is Reason.BELOW_THRESHOLD
    assert fleet.rule.decide(make_run(69), "d") is Reason.ABOVE_THRESHOLD
    fleet.worker("never", "decode", local_prefill="never")
    assert fleet.rule.decide(make_run(1), "never") is Reason.NEVER
    assert fleet.rule.decide(make_run(1), "gone") is Reason.NEVER
    assert len(fleet.registry.ready(Role.DECODE)) == 2
