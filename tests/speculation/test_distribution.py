"""What acceptance by coupling rests on: the sampler's own choices follow the distribution, and two
distributions sampled with the same noise agree at least as often as Daliri, Musco, Suresh 2024
(arXiv 2408.07978, theorem 1) say."""

import numpy as np
import pytest
import torch
from support.chi_square import assert_fits

from common.types import SamplingParams
from engine.batch import SampleRequest
from engine.sampler import sample

VOCAB = 24
PARAMS = SamplingParams(max_tokens=1 << 20, seed=2**64 - 5, temperature=0.9)
ROWS = 2000


def choices(logits: torch.Tensor, num_draws: int) -> np.ndarray:
    """One draw a position of the same sequence, from position 1 on."""
    ids: list[int] = []
    for start in range(1, num_draws + 1, ROWS):
        requests = [SampleRequest(PARAMS, 1, start + i, []) for i in range(ROWS)]
        ids += [one.token_id for one in sample(logits.expand(ROWS, -1), requests)]
    return np.array(ids)


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.2


def probabilities(logits: torch.Tensor) -> np.ndarray:
    return (logits[0].double() / PARAMS.temperature).softmax(0).numpy()


@pytest.mark.full
def test_two_hundred_thousand_draws() -> None:
    logits = logits_of(1)
    counts = np.bincount(choices(logits, 200_000), minlength=VOCAB)
    assert_fits(counts.tolist(), probabilities(logits).tolist())


def test_the_same_noise_makes_two_models_agree() -> None:
    for seed in (2, 3):
        target, draft = logits_of(seed), logits_of(seed) + 0.6 * logits_of(seed + 10)
        p, q = probabilities(target), probabilities(draft)
        distance = float(np.abs(p - q).sum() / 2)
        num_draws = 6000
        agreed = float((choices(target, num_draws) == choices(draft, num_draws)).mean())
        exact = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(VOCAB))
        deviation = 3.3 * np.sqrt(exact * (1 - exact) / num_draws)
        assert agreed == pytest.approx(exact, abs=float(deviation))
        assert (1 - distance) / (1 + distance) <= exact <= 1 - distance
