"""The sampler against a slow one that says what is meant: sort, mask, all the noise, arg max."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.chi_square import assert_fits

from common.types import SamplingParams
from engine.batch import SampleRequest
from engine.philox import gumbel, words
from engine.sampler import Sampled, sample

NUM_DRAWS = 8000
PROMPT = [1, 2, 2]
OUTPUT = [3, 3, 3, 5]
SEEDED = torch.Generator().manual_seed(0)


def request(
    position: int = 7, history: list[int] | None = None, num_prompt: int = 3, **params: Any
) -> SampleRequest:
    params = {"max_tokens": 100, "seed": 11, **params}
    return SampleRequest(SamplingParams(**params), num_prompt, position, history or PROMPT + OUTPUT)


def chosen(logits: torch.Tensor, *requests: SampleRequest) -> list[int]:
    results = sample(logits, requests)
    assert all(result.error is None for result in results)
    return [result.token_id for result in results]


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


def filtered(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """min-p, then top-k, then top-p, by a full sort; what is not allowed becomes -inf."""
    scores = scores.astype(np.float64) / params.temperature
    probabilities = softmax(scores)
    scores = np.where(probabilities >= params.min_p * probabilities.max(), scores, -np.inf)
    if params.top_k:
        scores = np.where(
            scores >= np.sort(scores)[-min(params.top_k, len(scores))], scores, -np.inf
        )
    if params.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        mass_before = np.cumsum(softmax(scores)[order]) - softmax(scores)[order]
        scores[order[mass_before >= params.top_p]] = -np.inf
    return scores


def slow_choice(row: np.ndarray, one: SampleRequest) -> int:
    seed, position = np.array([one.params.seed], np.uint64), np.array([one.position], np.uint64)
    groups = np.arange(-(-len(row) // 4), dtype=np.uint64)
    noise = gumbel(words(seed, position, groups)).T.reshape(-1)[: len(row)]
    return int((filtered(row, one.params) + noise).argmax())


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.8},
    {"top_p": 0.97, "temperature": 1.3},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_k": 6, "top_p": 0.9, "temperature": 1.1},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_distribution(params: dict[str, Any]) -> None:
    """Over positions, with one seed: a sequence's own draws are independent of each other."""
    row = torch.linspace(-1.2, 1.6, 12)[torch.randperm(12, generator=SEEDED)]
    requests = [request(position=7 + i, **params) for i in range(NUM_DRAWS)]
    ids = chosen(row.expand(NUM_DRAWS, -1), *requests)
    probabilities = softmax(filtered(row.numpy(), requests[0].params))
    assert_fits(np.bincount(ids, minlength=12).tolist(), probabilities.tolist())


def test_distribution_over_seeds() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    requests = [request(seed=(2**64 - 4000 + i) % 2**64) for i in range(NUM_DRAWS)]
    ids = chosen(row.expand(NUM_DRAWS, -1), *requests)
    assert_fits(np.bincount(ids, minlength=5).tolist(), softmax(row.numpy()).tolist())


@pytest.mark.parametrize("vocab", [5, 130, 4099, 49152])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_every_choice_is_that_of_the_slow_sampler(vocab: int, spread: float) -> None:
    """Nothing that the sampler leaves out could have won: flat rows, peaked rows, equal logits."""
    rng = np.random.default_rng(vocab)
    rows = (spread * rng.standard_normal((12, vocab))).astype(np.float32)
    rows[::3] = np.round(rows[::3])
    params: list[dict[str, Any]] = [{}, {"temperature": 0.3}, {"top_k": 40}, {"min_p": 0.01}]
    requests = [
        request(position=i, seed=2**63 + i, **params[i % len(params)]) for i in range(len(rows))
    ]
    expected = [slow_choice(row, one) for row, one in zip(rows, requests, strict=True)]
    assert chosen(torch.from_numpy(rows), *requests) == expected


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_nucleus_of_a_large_vocabulary(top_p: float) -> None:
    rng = np.random.default_rng(5)
    rows = np.stack([s * rng.standard_normal(20_000) for s in (0.01, 1, 3, 6)]).astype(np.float32)
    requests = [request(position=i, top_p=top_p) for i in range(4)]
    expected = [slow_choice(row, one) for row, one in zip(rows, requests, strict=True)]
    assert chosen(torch.from_numpy(rows), *requests) == expected


def test_greedy_and_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, 1024)
    logits[1, [70, 71, 1000]] = 5.0
    logits[2, 1023] = 1.0
    assert chosen(logits, *[request(temperature=0.0)] * 3) == [0, 70, 1023]


def test_a_token_depends_on_seed_and_position_and_not_on_its_mates() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)).expand(64, -1)
    requests = [request(position=i // 8, seed=i % 8) for i in range(64)]
    together = chosen(logits, *requests)
    assert together == [chosen(logits[:1], one)[0] for one in requests]
    assert len(set(together)) > 30


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[0.0, 30.0, 29.9]])
    assert chosen(logits, request(temperature=1e-42)) == [1]


# ---------------------------------------------------------------- bias, mask, penalties


def greedy_after(logits: list[float], **params: Any) -> int:
    return chosen(torch.tensor([logits]), request(temperature=0.0, **params))[0]


def test_logit_bias() -> None:
    assert greedy_after([1.0, 2.0, 0.0], logit_bias=((2, 2.5),)) == 2
    assert greedy_after([1.0, 2.0, 0.0], logit_bias=((1, -100.0), (7, 99.0), (-1, 99.0))) == 0


def test_min_tokens_masks_stop_ids_until_enough_output() -> None:
    logits = [1.0, 5.0, 4.0]
    for min_tokens, expected in ((4, 1), (5, 0)):  # four output tokens so far
        assert greedy_after(logits, min_tokens=min_tokens, stop_token_ids=(1, 2, 9)) == expected


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = [0.9, 1.0, 1.0, 1.0, -3.0, 1.0]
    assert greedy_after(logits, repetition_penalty=1.2) == 0
    # A seen token with a negative score goes further down, an unseen one stays.
    assert greedy_after([-1.0, -0.9, -0.9, -0.9, -1.05, -0.9], repetition_penalty=1.2) == 0


def test_frequency_and_presence_count_output_only() -> None:
    # Output holds 3 three times and 5 once; 1 and 2 are prompt.
    logits = [0.0, 2.0, 1.9, 3.0, 0.0, 2.4]
    assert greedy_after(logits, frequency_penalty=0.1) == 3
    assert greedy_after(logits, frequency_penalty=0.32) == 5
    assert greedy_after(logits, frequency_penalty=0.5) == 1
    assert greedy_after(logits, presence_penalty=0.5) == 3
    assert greedy_after(logits, presence_penalty=1.1) == 1
    assert greedy_after(logits, presence_penalty=-1.0, frequency_penalty=0.9) == 5


def test_penalties_look_no_further_than_the_position() -> None:
    """Ids behind it are drafts, or tokens that came later."""
    one = request(position=3, history=[1, 2, 2, 0], temperature=0.0, presence_penalty=9.0)
    assert chosen(torch.tensor([[1.0, 0.0, 0.0]]), one) == [0]


def test_penalties_shape_the_distribution() -> None:
    row = torch.tensor([0.3, 1.0, 0.2, 1.4, -0.5, 0.9])
    params = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": ((4, 1.0),),
    }
    ids = chosen(row.expand(NUM_DRAWS, -1), *[request(seed=i, **params) for i in range(NUM_DRAWS)])
    row = row.clone()
    row[4] += 1.0
    row[[1, 2, 3, 5]] /= 1.5  # all positive
    row[3] -= 3 * 0.2 + 0.1
    row[5] -= 0.2 + 0.1
    assert_fits(np.bincount(ids, minlength=6).tolist(), softmax(row.numpy()).tolist())


def test_the_batch_is_not_changed() -> None:
    logits = torch.randn(2, 6)
    before = logits.clone()
    sample(logits, [request(logit_bias=((1, 3.0),), presence_penalty=1.0, logprobs=2)] * 2)
    assert torch.equal(logits, before)


# ---------------------------------------------------------------- log-probabilities, bad rows


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])
    one = request(temperature=0.5, top_k=1, logit_bias=((4, 50.0),), logprobs=3)
    (result,) = sample(logits, [one])
    expected = logits[0].double().log_softmax(-1).tolist()
    assert result.logprobs is not None
    assert result.token_id == result.logprobs.token_id == 4
    assert result.logprobs.logprob == pytest.approx(expected[4])
    assert result.logprobs.rank == 5
    assert [i for i, _ in result.logprobs.top] == [1, 3, 2]
    assert [p for _, p in result.logprobs.top] == pytest.approx([expected[i] for i in (1, 3, 2)])
    assert all(type(p) is float for _, p in result.logprobs.top)


@pytest.mark.parametrize(("num_top", "expected"), [(0, 0), (7, 7), (40, 40), (4000, 2000)])
def test_number_of_top_logprobs(num_top: int, expected: int) -> None:
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(2))
    (result,) = sample(logits, [request(temperature=0.0, logprobs=num_top)])
    assert result.logprobs is not None
    assert [i for i, _ in result.logprobs.top] == logits[0].topk(expected).indices.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.fault("F35")
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = torch.zeros(3, 100)
    logits[1, 60] = bad
    logits[2, 5] = 1.0
    requests = [request(temperature=0.0), request(top_p=0.5), request(temperature=0.0)]
    assert sample(logits, requests) == [
        Sampled(0),
        Sampled(error="logits are not finite"),
        Sampled(5),
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad",
    [
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": math.nan},
        {"min_tokens": 50, "stop_token_ids": tuple(range(16))},
        {"logit_bias": ((1, math.inf),)},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_a_row_that_its_parameters_leave_without_a_finite_largest_value_fails_alone(
    bad: dict[str, Any], temperature: float
) -> None:
    logits = torch.randn(3, 16, generator=SEEDED)
    logits[:, 1] = 20.0
    good = request(temperature=temperature)
    results = sample(logits, [good, request(temperature=temperature, **bad), good])
    assert results[1].token_id == -1
    assert results[1].error is not None
    assert [results[0], results[2]] == [sample(logits[i : i + 1], [good])[0] for i in (0, 2)]
