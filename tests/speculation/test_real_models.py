"""SmolLM2 and the tiny families: greedy ids equal the goldens, sampled ids those without drafts."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.default_model import default_entry
from support.parity import ParityCheck, load_goldens
from support.tiny_models import FAMILIES, VOCAB_SIZE, TinyModel, make_random_llama, make_tiny_model
from support.torch_engines import TorchRig

from common.types import SamplingParams

GREEDY = SamplingParams(max_tokens=40, seed=0, temperature=0.0)
QUICK = ("capital-of-france", "code", "length-17")
ALL = (*QUICK, "one-token", "digits", "emoji", "chinese", "length-16")
DRAFTS = ("ngram", "self:10", "perfect", "random", "wrong")


def compare(names: Iterable[str], drafts: str, k: int, **config: int) -> TorchRig:
    goldens = load_goldens(tuple(names))
    truth = {tuple(golden.prompt_ids): golden.token_ids for golden in goldens}
    rig = TorchRig(default_entry(), drafts, k, truth=truth, **config)
    check = ParityCheck()
    work = [(golden, 0) for golden in goldens]
    while work:
        outputs = rig.generate(
            [
                (
                    golden.prompt_ids,
                    golden.token_ids[:start],
                    replace(GREEDY, max_tokens=len(golden.token_ids)),
                )
                for golden, start in work
            ]
        )
        ends = [
            (golden, check.compare(golden, token_ids, start))
            for (golden, start), token_ids in zip(work, outputs, strict=True)
        ]
        work = [(golden, start) for golden, start in ends if start is not None]
    check.finish()
    return rig


def test_goldens() -> None:
    compare(QUICK, "ngram", 3)


def test_the_model_as_its_own_draft_is_accepted() -> None:
    assert compare(QUICK[:1], "perfect", 5).acceptance > 0.9


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_goldens_with_every_draft_and_length(drafts: str, k: int) -> None:
    compare(ALL, drafts, k)
    compare(ALL, drafts, k, max_num_batched_tokens=24)


# ---------------------------------------------------------------- tiny families


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 12},
    {"temperature": 1.0, "top_p": 0.85},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"temperature": 1.0, "logit_bias": ((5, 3.0),)},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, TinyModel] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny_model(name, tmp_path_factory.mktemp(name))
        return made[name].entry

    return get


def check_family(entry: Path, drafts: str, k: int) -> float:
    """All parameters at once, over block boundaries, first with room and then under preemption."""
    prompts = [
        ([(7 * i + n) % VOCAB_SIZE for i in range(3 + 5 * n)], (), params)
        for n, params in enumerate(
            SamplingParams(max_tokens=30, seed=n + 1, **one) for n, one in enumerate(PARAMETERS)
        )
    ]
    expected = TorchRig(entry, block_size=4).generate(prompts)
    truth = {tuple(p[0]): ids for p, ids in zip(prompts, expected, strict=True)}
    for num_blocks in (300, 30):
        rig = TorchRig(entry, drafts, k, num_blocks=num_blocks, block_size=4, truth=truth)
        assert rig.generate(prompts) == expected
    assert rig.engine.statistics().preemptions > 0
    return rig.acceptance


@pytest.mark.parametrize("drafts", ["ngram", "self:1", "perfect", "wrong"])
def test_a_tiny_model(tmp_path: Path, drafts: str) -> None:
    acceptance = check_family(make_random_llama(tmp_path / "m"), drafts, 4)
    assert drafts != "perfect" or acceptance > 0.9
    assert drafts != "wrong" or acceptance == 0


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(tiny: Callable[[str], Path], name: str, k: int) -> None:
    for drafts in ("ngram", "self:1", "perfect", "random", "wrong"):
        check_family(tiny(name), drafts, k)
