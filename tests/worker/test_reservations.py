"""The ledger of promises: never over its limit, first come first served, fenced by attempt."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from decode_worker.reservations import Answer, Occupancy, RefusalReason, Reservations, StreamId

ONE, TWO = StreamId(1), StreamId(2)
FAR = 1e9


def idle(total: int) -> Occupancy:
    return Occupancy(total=total, in_use=0, importing=0, running=0)


def test_grants_up_to_the_limit_and_then_in_order_of_asking():
    ledger = Reservations(total_blocks=8, lookahead=1.25)
    for number, stream in enumerate((ONE, TWO, ONE, TWO)):
        assert ledger.reserve(stream, f"r{number}", 1, 4, FAR) is None
    granted = ledger.grant(idle(8))
    assert [answer.request_id for answer in granted] == ["r0", "r1"]
    assert ledger.promised_blocks == 8
    assert ledger.grant(idle(8)) == []
    ledger.unreserve(ONE, "r0", 1)
    assert [answer.request_id for answer in ledger.grant(idle(8))] == ["r2"]


def test_a_smaller_request_does_not_overtake():
    ledger = Reservations(total_blocks=8, lookahead=1.0)
    ledger.reserve(ONE, "big", 1, 7, FAR)
    ledger.reserve(TWO, "small", 1, 1, FAR)
    assert ledger.grant(Occupancy(total=8, in_use=4, importing=0, running=1)) == []
    assert [a.request_id for a in ledger.grant(idle(8))] == ["big"]


def test_what_never_fits_is_refused_at_once():
    ledger = Reservations(total_blocks=8, lookahead=1.0)
    answer = ledger.reserve(ONE, "r", 1, 8, FAR)
    assert answer == Answer(ONE, "r", 1, RefusalReason.TOO_LARGE)


def test_a_started_sequence_counts_until_it_has_landed():
    ledger = Reservations(total_blocks=8, lookahead=1.0)
    ledger.reserve(ONE, "r", 1, 5, FAR)
    ledger.grant(idle(8))
    assert ledger.start(ONE, "r", 1)
    assert not ledger.start(ONE, "r", 1)
    ledger.drop_stream(ONE)
    assert ledger.promised_blocks == 5
    ledger.landed(ONE, "r", 1)
    assert ledger.promised_blocks == 0


def test_a_higher_attempt_takes_the_promise_over_and_a_lower_one_is_refused():
    ledger = Reservations(total_blocks=8, lookahead=1.0)
    ledger.reserve(ONE, "r", 1, 5, FAR)
    ledger.grant(idle(8))
    ledger.reserve(TWO, "other", 1, 2, FAR)
    assert ledger.reserve(ONE, "r", 3, 4, FAR) == Answer(ONE, "r", 3)
    stale = ledger.reserve(ONE, "r", 2, 4, FAR)
    assert stale == Answer(ONE, "r", 2, RefusalReason.STALE_ATTEMPT)
    ledger.unreserve(ONE, "r", 2)
    assert ledger.promised_blocks == 4
    assert not ledger.start(ONE, "r", 1)
    assert ledger.start(ONE, "r", 3)
    assert ledger.statistics().stale == 3


def test_a_promise_that_grows_asks_again_before_all_others():
    ledger = Reservations(total_blocks=8, lookahead=1.0)
    ledger.reserve(ONE, "r", 1, 3, FAR)
    ledger.grant(idle(8))
    ledger.reserve(TWO, "other", 1, 4, FAR)
    assert ledger.reserve(ONE, "r", 2, 6, FAR) is None
    assert [(a.request_id, a.attempt) for a in ledger.grant(idle(8))] == [("r", 2)]


def test_deadline_takes_promises_and_waiting_ones_back():
    ledger = Reservations(total_blocks=8, lookahead=1.0)
    ledger.reserve(ONE, "held", 1, 5, 10.0)
    ledger.grant(idle(8))
    ledger.reserve(TWO, "waits", 1, 5, 5.0)
    assert ledger.next_deadline_s() == 5.0
    assert ledger.expire(5.0) == [Answer(TWO, "waits", 1, RefusalReason.DEADLINE)]
    assert ledger.expire(10.0) == [Answer(ONE, "held", 1, RefusalReason.DEADLINE)]
    assert ledger.promised_blocks == 0


def test_drain_keeps_promises_and_refuses_the_rest():
    ledger = Reservations(total_blocks=8, lookahead=1.0)
    ledger.reserve(ONE, "held", 1, 5, FAR)
    ledger.grant(idle(8))
    ledger.reserve(TWO, "waits", 1, 5, FAR)
    assert ledger.drain() == [Answer(TWO, "waits", 1, RefusalReason.DRAINING)]
    late = ledger.reserve(TWO, "late", 1, 1, FAR)
    assert late == Answer(TWO, "late", 1, RefusalReason.DRAINING)
    assert ledger.start(ONE, "held", 1)


class Ledger(RuleBasedStateMachine):
    """Random gateways on one worker, whose pool takes blocks only for sequences that started."""

    TOTAL, LOOKAHEAD = 16, 1.25

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Reservations(self.TOTAL, self.LOOKAHEAD)
        self.in_use: dict[tuple[StreamId, str, int], int] = {}
        self.asked: dict[tuple[StreamId, str, int], int] = {}
        self.now_s = 0.0

    @property
    def pool(self) -> Occupancy:
        held = sum(self.in_use.values())
        return Occupancy(self.TOTAL, held, 0, len(self.in_use))

    streams = st.sampled_from([ONE, TWO])
    requests = st.sampled_from(["a", "b", "c", "d"])
    attempts = st.integers(1, 4)

    @rule(stream=streams, request=requests, attempt=attempts, blocks=st.integers(1, 18),
          life_s=st.integers(1, 20))  # fmt: skip
    def reserve(self, stream, request, attempt, blocks, life_s):
        self.asked[stream, request, attempt] = blocks
        self.ledger.reserve(stream, request, attempt, blocks, self.now_s + life_s)

    @rule()
    def grant(self):
        before = self.pool
        if self.ledger.grant(before):
            held = before.in_use + before.watermark + self.ledger.promised_blocks
            assert held <= self.TOTAL * self.LOOKAHEAD

    @rule(stream=streams, request=requests, attempt=attempts)
    def start(self, stream, request, attempt):
        if self.ledger.start(stream, request, attempt):
            # The engine has room some time later; here at once, and never more than there is.
            key = (stream, request, attempt)
            self.in_use[key] = min(self.asked.get(key, 1), self.TOTAL - self.pool.in_use)
            self.ledger.landed(stream, request, attempt)

    @rule(stream=streams, request=requests, attempt=attempts)
    def unreserve(self, stream, request, attempt):
        self.ledger.unreserve(stream, request, attempt)

    @rule(stream=streams)
    def drop(self, stream):
        self.ledger.drop_stream(stream)

    @rule()
    def finish_one(self):
        if self.in_use:
            self.in_use.pop(next(iter(self.in_use)))

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds):
        self.now_s += seconds
        self.ledger.expire(self.now_s)
        due_s = self.ledger.next_deadline_s()
        assert due_s is None or due_s > self.now_s

    @invariant()
    def promises_stay_within_the_limit(self):
        assert 0 <= self.ledger.promised_blocks <= self.TOTAL * self.LOOKAHEAD - 1


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12))
@settings(deadline=None)
def test_every_request_is_granted_in_the_end(sizes):
    ledger = Reservations(total_blocks=8, lookahead=1.25)
    for number, num_blocks in enumerate(sizes):
        assert ledger.reserve(ONE, f"r{number}", 1, num_blocks, FAR) is None
    order: list[str] = []
    for _ in sizes:
        for answer in ledger.grant(idle(8)):
            order.append(answer.request_id)
            ledger.unreserve(ONE, answer.request_id, 1)
    assert order == [f"r{number}" for number in range(len(sizes))]
    assert ledger.promised_blocks == 0
