"""What workers are told of a request."""

import pytest

from common.types import SamplingParams
from gateway.request import Request
from gateway.run import Counters, Run
from gateway.sequence_state import sequence_state


@pytest.mark.parametrize(("tenant", "priority"), [("", -5), ("research", 0)])
def test_a_tenants_priority_is_no_matter_of_the_workers(tenant: str, priority: int) -> None:
    params = SamplingParams(max_tokens=4, seed=0)
    request = Request("r", "", (1, 2), params, 10.0, tenant=tenant, priority=-5)
    run = Run(request, 0.0, Counters())
    state = sequence_state(run, run.new_attempt(), 1.0)
    assert (state.tenant, state.priority, state.remaining_ms) == (tenant, priority, 9000)
