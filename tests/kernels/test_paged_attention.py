"""Paged decode and prefill attention, interpreted, against plain torch in fp32."""

import random
from dataclasses import dataclass

import pytest
import torch
from support.kv_pools import TOLERANCE, Pool, filled_pool, random_queries

from engine.kernels.paged_decode import (
    EMPTY_LSE,
    launch_splits,
    num_decode_splits,
    paged_decode,
)
from engine.kernels.paged_prefill import PrefillPlan, paged_prefill
from engine.kernels.span import Span, block_tables
from engine.kernels.tuning import prefill_tuning

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16]


@dataclass(frozen=True)
class Shape:
    head_size: int
    group: int
    block_size: int
    contexts: tuple[int, ...]
    num_kv_heads: int = 1
    strided: bool = False

    def pool(self, dtype: torch.dtype) -> Pool:
        return filled_pool(
            list(self.contexts),
            self.num_kv_heads,
            self.head_size,
            self.block_size,
            dtype,
            self.strided,
        )

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


def random_shape(seed: int) -> Shape:
    rng = random.Random(seed)
    return Shape(
        head_size=rng.choice([64, 80, 96, 128, 256]),
        group=rng.randint(1, 16),
        block_size=rng.choice([16, 32, 64]),
        contexts=tuple(rng.choice([0, 1, rng.randint(2, 90)]) for _ in range(3)),
        num_kv_heads=rng.randint(1, 2),
        strided=rng.random() < 0.5,
    )


DECODES = [
    Shape(64, 1, 16, (1,)),
    Shape(80, 3, 16, (16,)),  # exactly one block
    Shape(96, 4, 32, (33, 0, 5)),  # one over; an empty row; ragged
    Shape(128, 8, 64, (64, 65), strided=True),
    Shape(256, 16, 16, (17, 1, 40)),
    Shape(64, 7, 32, (0,)),
    Shape(128, 4, 16, (70, 128, 129), num_kv_heads=2),
    *(random_shape(seed) for seed in range(3)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DECODES, ids=str)
def test_decode(shape: Shape, dtype: torch.dtype) -> None:
    pool = shape.pool(dtype)
    queries = random_queries(len(shape.contexts), shape.num_heads, shape.head_size, dtype)
    spans = [
        Span(i, 1, context - 1, table)
        for i, (context, table) in enumerate(zip(pool.contexts, pool.tables, strict=True))
    ]
    tables = block_tables(spans, shape.block_size)
    contexts = torch.tensor(pool.contexts, dtype=torch.int32)
    filled = [span for span in spans if span.context > 0]
    expected = torch.zeros(queries.shape)
    if filled:
        everywhere = pool.expected(filled, queries)
        for span in filled:
            expected[span.first] = everywhere[span.first]
    for num_splits in (1, 4):
        output = paged_decode(queries, pool.layer, tables, contexts, num_splits)
        torch.testing.assert_close(output.float(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_decode_of_some_rows_leaves_the_others_alone() -> None:
    pool = filled_pool([20, 3], 1, 64, 16, torch.float32)
    queries = random_queries(5, 2, 64, torch.float32)
    spans = [Span(4, 1, 19, pool.tables[0]), Span(1, 1, 2, pool.tables[1])]
    output = torch.full(queries.shape, 7.0)
    rows = torch.tensor([4, 1], dtype=torch.int32)
    contexts = torch.tensor(pool.contexts, dtype=torch.int32)
    paged_decode(queries, pool.layer, block_tables(spans, 16), contexts, 2, rows, output)
    expected = pool.expected(spans, queries)
    torch.testing.assert_close(output[rows], expected[rows], rtol=0, atol=2e-6)
    assert torch.equal(output[[0, 2, 3]], torch.full((3, 2, 64), 7.0))


def test_an_empty_split_is_zeros_and_a_log_sum_exp_of_minus_1e30() -> None:
    pool = filled_pool([5, 0], 1, 64, 16, torch.float32)
    queries = random_queries(2, 3, 64, torch.float32)
    tables = block_tables([Span(0, 1, 4, pool.tables[0]), Span(1, 1, -1, [])], 16)
    partials = torch.full((4, 2, 3, 64), float("nan"))
    sums = torch.full((4, 2, 3), float("nan"))
    contexts = torch.tensor([5, 0], dtype=torch.int32)
    launch_splits(queries, pool.layer, tables, contexts, partials, sums)
    assert (sums[1:, 0] == EMPTY_LSE).all() and (sums[:, 1] == EMPTY_LSE).all()
    assert (partials[1:, 0] == 0).all() and (partials[:, 1] == 0).all()
    keys, _ = pool.truth.read(1, pool.truth.runs(pool.tables[0]))
    scores = queries[0] @ keys[:5, 0].T / 8
    torch.testing.assert_close(sums[0, 0], scores.logsumexp(1))


def test_splits_follow_from_the_batch_and_the_device_alone() -> None:
    assert num_decode_splits(64, 8, 132) == 1
    assert num_decode_splits(1, 8, 132) == 32
    assert num_decode_splits(8, 8, 132) == 8
    assert num_decode_splits(256, 8, 132) == 1


PREFILLS = [
    (Shape(64, 1, 16, (1,)), (1,)),
    (Shape(64, 2, 16, (16,)), (16,)),  # exactly one block, no prefix
    (Shape(80, 3, 16, (17, 40)), (17, 5)),  # one over; a chunk behind a prefix
    (Shape(96, 4, 32, (33, 1, 70)), (2, 1, 64)),  # mixed with a decode
    (Shape(128, 5, 64, (130,), strided=True), (3,)),
    (Shape(256, 16, 16, (20, 7)), (9, 7)),
    (Shape(128, 4, 16, (50, 90), num_kv_heads=2), (50, 1)),
]


def random_prefill(seed: int) -> tuple[Shape, tuple[int, ...]]:
    shape = random_shape(100 + seed)
    contexts = tuple(max(1, context) for context in shape.contexts)
    rng = random.Random(seed)
    new = tuple(rng.randint(1, context) for context in contexts)
    fields = (shape.head_size, shape.group, shape.block_size, contexts)
    return Shape(*fields, shape.num_kv_heads, shape.strided), new


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "num_new"), [*PREFILLS, *(random_prefill(seed) for seed in range(3))], ids=str
)
def test_prefill(shape: Shape, num_new: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = shape.pool(dtype)
    spans, first = [], 0
    for new, context, table in zip(num_new, pool.contexts, pool.tables, strict=True):
        spans.append(Span(first, new, context - new, table))
        first += new
    queries = random_queries(first, shape.num_heads, shape.head_size, dtype)
    block_m = prefill_tuning(shape.head_size, queries.element_size(), CPU).block_m
    plan = PrefillPlan.of(spans, shape.group, block_m, shape.block_size, CPU)
    output = torch.full(queries.shape, float("nan"), dtype=dtype)
    paged_prefill(queries, pool.layer, plan, output)
    expected = pool.expected(spans, queries)
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=TOLERANCE[dtype])
