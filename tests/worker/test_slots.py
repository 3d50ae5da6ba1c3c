"""When a prefill worker takes another job."""

import pytest

from common.types import StepRecord
from prefill_worker.slots import Slots


def step(start_s: float) -> StepRecord:
    return StepRecord(1, start_s, start_s + 1, 0, 0, 0)


def test_nothing_else_is_taken_while_a_gateway_is_asked():
    slots = Slots(8, 100)
    slots.take("a", 10, 3)
    assert not slots.is_free(50)
    slots.added("a", 0.0)
    assert slots.is_free(50)
    slots.take("b", 10, 3)
    assert not slots.is_free(50)
    slots.drop("b")
    assert slots.is_free(50)


def test_a_gateway_that_did_not_answer_once_is_not_waited_for():
    slots = Slots(3, 100)
    slots.take("silent", 1000, 30)
    slots.asked_in_vain("silent")
    assert slots.is_free(50)
    assert not slots.is_free(29)
    slots.take("b", 60, 4)
    assert not slots.is_free(50)
    slots.added("b", 0.0)
    assert slots.is_free(50)
    # Granted after all, it counts as any other.
    slots.added("silent", 1.0)
    assert not slots.is_free(50)
    slots.computed("silent", 100)
    slots.computed("b", 60)
    slots.take("also silent", 10, 3)
    slots.asked_in_vain("also silent")
    assert not slots.is_free(50)


def test_jobs_share_the_next_step_as_far_as_its_tokens_and_blocks_go():
    slots = Slots(8, 100)
    slots.take("a", 60, 4)
    slots.added("a", 0.0)
    assert slots.is_free(50)
    assert not slots.is_free(3)
    slots.take("b", 60, 4)
    slots.added("b", 0.0)
    assert not slots.is_free(50)
    slots.computed("a", 60)
    slots.computed("b", 40)
    assert slots.is_free(50)


def test_a_job_passed_over_by_a_step_is_the_only_one_held():
    slots = Slots(8, 100)
    slots.take("a", 10, 3)
    slots.added("a", 5.0)
    slots.step_done(step(4.0))
    assert slots.is_free(50)
    slots.step_done(step(6.0))
    assert not slots.is_free(50)
    slots.computed("a", 10)
    assert slots.is_free(50)


def test_a_long_running_prompt_leaves_room_for_one_more():
    slots = Slots(8, 100)
    slots.take("long", 1000, 60)
    slots.added("long", 0.0)
    slots.computed("long", 100)
    assert slots.is_free(50)
    slots.take("next", 10, 3)
    slots.added("next", 1.0)
    assert not slots.is_free(50)


@pytest.mark.fault("F13")
def test_no_more_jobs_than_sequences():
    slots = Slots(1, 100)
    slots.take("a", 10, 3)
    slots.added("a", 0.0)
    slots.computed("a", 10)
    assert not slots.is_free(50)
