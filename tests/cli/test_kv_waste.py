"""kv-waste: the allocators, the replay against a slot-by-slot reference, traces, the command."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.kv_waste.allocators import BlockPool, Buddy, FirstFit
from cli.kv_waste.distributions import DISTRIBUTIONS, generate
from cli.kv_waste.policies import Paged, PagedSharing, Policy, policies
from cli.kv_waste.replay import KINDS, Outcome, Replay
from cli.kv_waste.workload import Request, Workload, bounded, read_trace
from cli.main import main
from common.errors import ConfigError

SAMPLE = Path(__file__).parents[2] / "bench/data/mooncake_sample.jsonl"
# OPT-13B's 15.7K slots of 12 GB (PagedAttention, table 1).
SLOTS = (12 << 30) // 819200


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.randoms(use_true_random=False))
def test_contiguous_allocators_never_overlap_and_get_everything_back(
    num_slots: int, draw: random.Random
) -> None:
    for memory, sizes in (
        (FirstFit(num_slots), range(1, 40)),
        (Buddy(num_slots), [1 << n for n in range(6)]),
    ):
        taken: list[tuple[int, int]] = []
        for _ in range(60):
            if taken and draw.random() < 0.45:
                memory.release(*taken.pop(draw.randrange(len(taken))))
            else:
                size = draw.choice(sizes)
                start = memory.allocate(size)
                if start is not None:
                    taken.append((start, size))
            slots = [slot for start, size in taken for slot in range(start, start + size)]
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < num_slots for slot in slots)
            assert memory.num_free == num_slots - len(slots)
        for region in taken:
            memory.release(*region)
        largest = num_slots if isinstance(memory, FirstFit) else memory.largest
        assert memory.allocate(largest) is not None  # all merged again


def test_first_fit_takes_the_lowest_hole_and_fragments() -> None:
    memory = FirstFit(100)
    assert [memory.allocate(20) for _ in range(5)] == [0, 20, 40, 60, 80]
    memory.release(20, 20)
    memory.release(60, 20)
    assert memory.num_free == 40 and memory.allocate(21) is None  # enough, but in two pieces
    memory.release(40, 20)
    assert memory.allocate(60) == 20


def test_buddies_split_and_merge() -> None:
    memory = Buddy(24)  # 16 at 0, 8 at 16
    assert memory.largest == 16
    assert memory.allocate(8) == 16 and memory.allocate(4) == 0 and memory.allocate(4) == 4
    assert memory.allocate(16) is None and memory.num_free == 8
    memory.release(0, 4)
    assert memory.allocate(8) == 8  # 0..4 is free, its buddy is not
    memory.release(8, 8)
    memory.release(4, 4)
    assert memory.allocate(16) == 0


def test_the_block_pool_gives_all_or_nothing() -> None:
    pool = BlockPool(70, 16)  # 4 blocks, 6 slots too few for a fifth
    first = pool.allocate(3)
    assert first is not None and pool.allocate(2) is None and pool.num_free_blocks == 1
    pool.release(first)
    assert sorted(pool.allocate(4) or []) == [0, 1, 2, 3] and pool.num_free_blocks == 0
    vast = BlockPool(1 << 60, 16)
    assert vast.allocate(2) == [0, 1] and vast.num_free_blocks == (1 << 56) - 2


# ----------------------------------------------------------------------------------------- replay


class SlotBySlot:
    """The replay's model again, one step and one slot at a time: slow, plain, and sharing nothing
    with it but the policies."""

    def __init__(self, workload: Workload, policy: Policy) -> None:
        self.segment, self.policy = workload.segment_tokens, policy
        self.coming = list(workload.requests)
        self.queue: list[list[Any]] = []  # request, done
        self.running: list[list[Any]] = []  # request, done, holding; the youngest last
        self.full: list[dict[str, float]] = []
        self.relaxed: list[dict[str, float]] = []

    def run(self) -> dict[str, float]:
        step = 0
        while self.coming or self.queue or self.running:
            self._end_and_grow()
            while self.coming and self.coming[0].arrival <= step:
                self.queue.append([self.coming.pop(0), 0])
            while self.queue:
                request, done = self.queue[0]
                held = request.num_prompt + done
                holding = self.policy.admit(request, held, not self.running)
                if holding is None:
                    break
                self.running.append([request, done, holding])
                self.queue.pop(0)
            if self.running:
                (self.full if self.queue else self.relaxed).append(self._look())
            for entry in self.running:
                entry[1] += 1
            step += 1
        rows = self.full or self.relaxed
        return {kind: sum(row[kind] for row in rows) / len(rows) for kind in (*KINDS, "running")}

    def _end_and_grow(self) -> None:
        for entry in [e for e in self.running if e[1] == e[0].num_output]:
            self.running.remove(entry)
            self.policy.release(entry[2])
        for entry in list(self.running):
            while entry in self.running and entry[0].num_prompt + entry[1] > entry[2].room:
                if not self.policy.grow(entry[2]):
                    request, done, holding = self.running.pop()
                    self.policy.release(holding)
                    self.queue.insert(0, [request, done])

    def _look(self) -> dict[str, float]:
        distinct: set[tuple[object, int]] = set()
        stored = room = never = 0
        for request, done, holding in self.running:
            held = request.num_prompt + done
            shared = len(request.prefix_ids) * self.segment
            for position in range(held):
                owner = request.prefix_ids[position // self.segment] if position < shared else None
                distinct.add((id(request) if owner is None else ("prefix", owner), position))
            stored, room = stored + held, room + holding.room
            never += max(0, holding.room - request.num_stored)
        copies = stored - self.policy.num_shared
        free = self.policy.num_slots - self.policy.num_allocated
        is_lost = (
            bool(self.queue)
            and self.policy.num_missing(
                self.queue[0][0], self.queue[0][0].num_prompt + self.queue[0][1]
            )
            <= free
        )
        counts = {
            "used": len(distinct),
            "duplication": copies - len(distinct),
            "reserved": self.policy.num_allocated - copies - never,
            "internal": never,
            "external": free if is_lost else 0,
            "free": 0 if is_lost else free,
        }
        shares = {kind: count / self.policy.num_slots for kind, count in counts.items()}
        return {**shares, "running": len(self.running)}


def small_workload(draw: random.Random, segment: int) -> Workload:
    requests = []
    for _ in range(draw.randrange(1, 25)):
        num_prompt, num_output = draw.randrange(1, 40), draw.randrange(1, 25)
        family = draw.randrange(3)
        ids = tuple(100 * family + i for i in range(min(3, num_prompt // segment)))
        requests.append(Request(draw.randrange(60), num_prompt, num_output, ids))
    return bounded("small", requests, 64, segment)


@pytest.mark.parametrize("make", policies(4), ids=["contiguous", "buddy", "paged", "sharing"])
@pytest.mark.parametrize("segment", [8, 6])
def test_the_replay_equals_a_slot_by_slot_reference(
    make: Callable[[int, Workload], Policy], segment: int
) -> None:
    num_waited = 0
    for seed in range(30):
        draw = random.Random(seed)
        workload = small_workload(draw, segment)
        num_slots = draw.randrange(64, 300)
        outcome = Replay(workload, make(num_slots, workload)).run()
        expected = SlotBySlot(workload, make(num_slots, workload)).run()
        for kind in KINDS:
            assert outcome.shares[kind] == pytest.approx(expected[kind], abs=1e-12), (seed, kind)
        assert outcome.mean_running == pytest.approx(expected["running"])
        assert sum(outcome.shares.values()) == pytest.approx(1)
        assert min(outcome.shares.values()) >= 0
        num_waited += outcome.is_full
    assert num_waited > 5


def replayed(workload: Workload, num_slots: int) -> list[Outcome]:
    return [Replay(workload, make(num_slots, workload)).run() for make in policies(16)]


def test_chat_gives_the_published_figures() -> None:
    """PagedAttention, figure 2 (Orca (Max) and vLLM) and figure 13a (requests at once)."""
    contiguous, buddy, paged, _ = replayed(generate("chat", 0, SLOTS, None, 0), SLOTS)
    published = {"used": 0.204, "reserved": 0.133, "internal": 0.573, "external": 0.089}
    for kind, share in published.items():
        assert contiguous.shares[kind] == pytest.approx(share, abs=0.03), kind
    assert contiguous.mean_running == pytest.approx(7.00)
    assert buddy.mean_running == pytest.approx(9.81, rel=0.1)
    assert paged.mean_running == pytest.approx(30.42, rel=0.1)
    assert paged.waste < 0.04 and paged.shares["used"] > 0.96


def test_sharing_removes_the_duplication_and_nothing_else_does() -> None:
    outcomes = replayed(generate("chat", 0, SLOTS, None, 512), SLOTS)
    *_, paged, sharing = outcomes
    assert all(outcome.shares["duplication"] > 0.15 for outcome in outcomes[:3])
    assert sharing.shares["duplication"] == 0
    assert sharing.mean_running > 1.8 * paged.mean_running


def test_a_prefix_that_ends_inside_a_block_shares_its_whole_blocks_only() -> None:
    requests = [Request(0, 20, 4, (7,)), Request(0, 20, 4, (7,))]
    workload = bounded("two", requests, 32, 10)
    policy = PagedSharing(64, workload, 4)
    holdings = [policy.admit(request, 20, False) for request in requests]
    # 10 common tokens are two whole blocks; the third holds two of them and is each one's own.
    assert policy.num_shared == 8 and policy.num_allocated == 20 + 12
    for holding in holdings:
        assert holding is not None
        policy.release(holding)
    assert policy.num_shared == 0 and policy.num_allocated == 0


def test_a_paged_admission_leaves_one_block_unless_it_runs_alone() -> None:
    request = Request(0, 16, 9)
    workload = bounded("one", [request], 32, 1)
    assert Paged(32, workload, 8).admit(request, 32, is_alone=False) is None
    assert Paged(32, workload, 8).admit(request, 32, is_alone=True) is not None
    assert Paged(40, workload, 8).admit(request, 32, is_alone=False) is not None


def test_memory_for_one_request_serves_all_one_after_the_other() -> None:
    workload = bounded("few", [Request(0, 30, 34) for _ in range(5)], 64, 1)
    for outcome in replayed(workload, 64):
        assert outcome.peak_running >= 1 and outcome.peak_slots <= 64


# --------------------------------------------------------------------------------------- workload


def test_the_same_seed_gives_the_same_requests_and_another_does_not() -> None:
    for name in DISTRIBUTIONS:
        assert generate(name, 3, SLOTS, None, 0) == generate(name, 3, SLOTS, None, 0)
        assert generate(name, 3, SLOTS, None, 0) != generate(name, 4, SLOTS, None, 0)


def test_distributions_have_the_published_figures() -> None:
    chat = generate("chat", 0, SLOTS, 10**6, 0).requests
    assert sum(r.num_prompt for r in chat) / len(chat) == pytest.approx(161.31, rel=0.06)
    assert sum(r.num_output for r in chat) / len(chat) == pytest.approx(337.99, rel=0.06)
    for name, prompt, output in (("summarisation", 7059, 208), ("code", 1500, 13)):
        requests = generate(name, 0, SLOTS, 10**6, 0).requests
        middle = len(requests) // 2
        assert sorted(r.num_prompt for r in requests)[middle] == pytest.approx(prompt, rel=0.06)
        assert sorted(r.num_output for r in requests)[middle] == pytest.approx(output, rel=0.1)


def line(**fields: object) -> str:
    return json.dumps({"input_length": 600, "output_length": 5, **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ("{oops", "line 1: not JSON"),
        ("[1]", "line 1: not a JSON object"),
        ("[" * 100_000, "line 1: not JSON"),
        ("\xff\xfe", "line 1: not JSON"),
        ('{"output_length": 5}', "line 1: input_length is missing"),
        ('{"input_length": 5}', "line 1: output_length is missing"),
        (line() + "\n\n" + line(input_length=-1), "line 3: input_length is -1"),
        (line(output_length=0), "line 1: output_length is 0"),
        (line(output_length=2.5), "line 1: output_length is 2.5"),
        (line(output_length=True), "line 1: output_length is True"),
        (line(output_length="9"), "line 1: output_length is '9'"),
        (line(input_length=10**9), "line 1: input_length is 1000000000, not a whole number from 1"),
        (line(input_length=10**30), "line 1: input_length is far too large"),
        (line(timestamp=-1), "line 1: timestamp is -1"),
        (line(timestamp=float("nan")), "line 1: timestamp is nan"),
        (line(timestamp="noon"), "line 1: timestamp is 'noon'"),
        (line(hash_ids=[1]), "line 1: 1 hash_ids, but a prompt of 600 tokens has 2 segments"),
        (line(hash_ids=[1, 1]), "line 1: hash_ids names one segment twice"),
        (line(hash_ids="12"), "line 1: hash_ids is '12', not a list"),
        (line(hash_ids=[[], 1]), "line 1: hash_ids is [[], 1], not a list"),
    ],
)
def test_a_broken_trace_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="trace") as error:
        read_trace(path, None)
    assert message in error.value.message


def test_a_trace_is_sorted_by_time_and_cut_at_max_len(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lengths = [(90, 1), (40, 10**4), (41, 3)]
    path.write_text("\n".join(line(timestamp=t, output_length=n) for t, n in lengths))
    workload = read_trace(path, 2048)
    assert workload.num_refused == 1
    assert [(r.arrival, r.num_output) for r in workload.requests] == [(2, 3), (3, 1)]
    assert read_trace(path, None).max_len == 16384
    with pytest.raises(ConfigError, match="less than the shortest request, 601"):
        read_trace(path, 600)


# ---------------------------------------------------------------------------------------- command

Baton = Callable[..., tuple[int, str, str]]


@pytest.fixture
def baton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Baton:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", "kv-waste", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run


def test_the_sample_of_the_real_trace(baton: Baton) -> None:
    arguments = ("--trace", str(SAMPLE), "--max-len", "16384", "--memory", "48GiB", "--json")
    code, out, err = baton(*arguments)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["workload"]["requests"] + report["workload"]["refused"] == 3894
    by_name = {entry["name"]: entry for entry in report["allocators"]}
    assert list(by_name) == ["contiguous", "buddy", "paged", "paged + sharing"]
    for entry in by_name.values():
        assert sum(entry["shares"].values()) == pytest.approx(1, abs=1e-5)
        assert 0 < entry["peak_bytes"] <= report["memory_bytes"]
    assert by_name["contiguous"]["waste"] > 0.5 > 0.04 > by_name["paged + sharing"]["waste"]
    assert by_name["paged"]["shares"]["duplication"] > 0.01
    assert baton(*arguments)[1] == out  # deterministic


def test_the_table_fits_a_terminal(baton: Baton) -> None:
    code, out, _ = baton()
    assert code == 0 and "requests at once" in out
    table = out.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 80
    assert "figure 11a" in out and "5 longer requests were refused" in out


def test_plot_writes_a_picture(baton: Baton, tmp_path: Path) -> None:
    code, _, err = baton("--plot", str(tmp_path / "waste.png"), "--json")
    assert (code, err) == (0, "")
    assert (tmp_path / "waste.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(
    baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = baton("--plot", str(tmp_path / "waste.png"))
    assert code == 2 and out == ""
    assert "matplotlib is not installed; pip install 'baton-serve[plot]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "/nowhere.jsonl"], "trace: cannot read /nowhere.jsonl"),
        (["--trace", str(SAMPLE)], "memory: 15728 tokens fit, in pieces of at most 15728"),
        (["--trace", str(SAMPLE), "--distribution", "chat"], "distribution: give either"),
        (["--trace", str(SAMPLE), "--shared-prefix", "9"], "shared-prefix: a trace names"),
        (["--distribution", "poetry"], "distribution: 'poetry' is none of chat, summarisation"),
        (["--memory", "12 apples"], "memory: '12 apples' is not a size"),
        (["--memory", "5B"], "memory: 5 bytes hold no token"),
        (["--memory", "1GiB"], "memory: 1310 tokens fit, in pieces of at most 1310 (contiguous)"),
        (["--max-len", "3000", "--memory", "2.4GiB"], "(buddy), but a request of up to 3000"),
        (["--model", "/nowhere"], "model: cannot read /nowhere"),
        (["--plot", "/nowhere/x.png"], "plot: /nowhere is no folder"),
        (["--plot", "x.gif"], "plot: x.gif must end in .png"),
    ],
)
def test_what_cannot_be_is_one_line_on_stderr(
    baton: Baton, arguments: list[str], message: str
) -> None:
    code, out, err = baton(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
