"""Sampling on the device, interpreted, against engine/sampler.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.types import SamplingParams
from engine import philox
from engine.batch import SampleRequest
from engine.kernels.device_sampler import sample_on_device
from engine.kernels.sampling import RowChoices, choose
from engine.sampler import NOT_FINITE, sample

DRAWN = SamplingParams(max_tokens=10, seed=5, temperature=0.9)
PARAMS = [
    replace(DRAWN, temperature=0.0),
    DRAWN,
    replace(DRAWN, temperature=0.01),
    replace(DRAWN, top_k=1),
    replace(DRAWN, top_k=5, seed=2**63 + 9),
    replace(DRAWN, top_p=0.6),
    replace(DRAWN, top_p=0.99, seed=2**64 - 1),
    replace(DRAWN, min_p=0.1),
    replace(DRAWN, min_p=0.02, top_k=30, top_p=0.9, temperature=1.3),
    replace(DRAWN, repetition_penalty=1.3),
    replace(DRAWN, logprobs=3),
    replace(DRAWN, temperature=0.0, logit_bias=((3, 50.0), (5, -2.0), (2000, 9.0)), logprobs=0),
    replace(DRAWN, min_tokens=50, stop_token_ids=(0, 1, 2, 3, 4), logit_bias=((2, 90.0),)),
    replace(DRAWN, frequency_penalty=0.5, logit_bias=((6, 4.0),)),
]


@pytest.mark.parametrize("vocab_size", [7, 1024, 1500])
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many-equal"])
def test_ids_are_those_of_the_host(vocab_size: int, rounded: bool) -> None:
    """Rounded logits have equal ones at every edge: those with the lowest ids are kept."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((len(PARAMS), vocab_size), generator=generator) * 3
    logits = logits.round() if rounded else logits
    history = [i % vocab_size for i in range(12)]
    requests = [
        SampleRequest(params, 3, 12 + (i << 31), history) for i, params in enumerate(PARAMS)
    ]
    assert sample_on_device(logits, requests).collect() == sample(logits, requests)


def test_noise_is_that_of_philox() -> None:
    """Equal logits: the largest noise wins, which tells it exactly."""
    vocab_size, seed = 2500, 2**64 - 3
    for position in (0, 1, 2**32 - 1, 2**40 + 7):
        groups = np.arange(-(-vocab_size // 4), dtype=np.uint64)
        words = philox.words(np.array([seed], np.uint64), np.array([position], np.uint64), groups)
        noise = philox.gumbel(words.T.reshape(-1)[:vocab_size])
        choices = RowChoices(
            torch.ones(1),
            torch.tensor([seed - 2**64]),
            torch.tensor([position]),
            torch.tensor([-19.5]),
            torch.tensor([vocab_size], dtype=torch.int32),
        )
        assert choose(torch.zeros(1, vocab_size), choices).tolist() == [int(noise.argmax())]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_that_are_not_finite_fail_alone_and_name_a_real_id() -> None:
    logits = torch.zeros(3, 10)
    logits[0, 4] = float("nan")
    logits[1, 3] = 2.0
    logits[2] = float("-inf")
    greedy = replace(DRAWN, temperature=0.0)
    step = sample_on_device(logits, [SampleRequest(greedy, 1, 1, [0])] * 3)
    assert ((step.ids >= 0) & (step.ids < 10)).all()
    results = step.collect()
    assert [result.error for result in results] == [NOT_FINITE, None, NOT_FINITE]
    assert results[1].token_id == 3
