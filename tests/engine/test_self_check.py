"""The pool checks its books while the engine works; a fault is raised here, else counted."""

import logging
from dataclasses import replace

import pytest
from support.engines import GREEDY, Rig, StepClock, prefill_for_hand_off, prompt_of, spec_of

from engine.block_pool import BlockPool, CorruptPool, RefKind
from engine.prefix_cache import PrefixCache
from engine.self_check import BUSY_S, IDLE_S, SelfCheck


class Setup:
    def __init__(self, raises: bool) -> None:
        self.pool = BlockPool(9, 4, "m", PrefixCache(9))
        self.clock = StepClock()
        self.owners: set[int] = set()
        self.check = SelfCheck(self.pool, lambda: self.owners, self.clock, raises)

    def lose_a_block(self) -> None:
        self.pool.allocate(self.pool.hold(RefKind.SEQUENCE, 7), 1)


def test_a_reference_that_belongs_to_nobody_is_raised() -> None:
    setup = Setup(raises=True)
    setup.lose_a_block()
    setup.owners = {7}
    setup.check.check()
    setup.owners = set()
    with pytest.raises(CorruptPool, match="1 references belong to nobody"):
        setup.check.check()


def test_or_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(raises=False)
    setup.pool._refs[3] = 1
    with caplog.at_level(logging.ERROR):
        setup.check.check()
    assert setup.check.num_faults == 1
    assert "books" in caplog.text


@pytest.mark.parametrize(("has_work", "after_s"), [(False, IDLE_S), (True, BUSY_S)])
def test_it_is_made_when_it_is_due(has_work: bool, after_s: float) -> None:
    setup = Setup(raises=False)
    setup.lose_a_block()
    setup.clock.now_s = after_s - 1
    setup.check.after_step(has_work)
    assert setup.check.num_faults == 0
    setup.clock.now_s = after_s + 1
    setup.check.after_step(has_work)
    setup.check.after_step(has_work)
    assert setup.check.num_faults == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_checks_itself_and_knows_all_owners(depth: int) -> None:
    rig = Rig(async_depth=depth)
    rig.run(spec_of(prompt_of(1, 9), GREEDY))
    first = prefill_for_hand_off(rig, spec_of(prompt_of(2, 9), GREEDY))
    handed = spec_of(prompt_of(3, 9), GREEDY, (1,))
    rig.engine.add_import(handed)
    rig.step()
    rig.engine.abort(handed.seq_id)
    running = spec_of(prompt_of(4, 9), replace(GREEDY, max_tokens=5))
    rig.engine.add(running)
    rig.step()
    assert rig.engine.ledger().leaked == 0
    rig.engine.abort(running.seq_id)
    assert rig.engine.ledger().leaked == 0
    rig.clock.now_s += BUSY_S + 1
    rig.run()
    rig.engine.drop_import(handed.seq_id)
    rig.engine.release_lease(first.seq_id)
    assert rig.engine.ledger().leaked == 0
    assert rig.engine.statistics().ledger_faults == 0
    rig.assert_idle()


def test_an_engine_finds_what_it_lost() -> None:
    rig = Rig()
    rig.pool.allocate(rig.pool.hold(RefKind.SEQUENCE, 12345), 2)
    assert rig.engine.ledger().leaked == 2
    rig.clock.now_s += IDLE_S + 1
    with pytest.raises(CorruptPool):
        rig.run(spec_of(prompt_of(1, 9), GREEDY))
