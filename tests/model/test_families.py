"""Each family and rope type against transformers, on the same random weights."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.paged import PagedModel
from support.tiny_models import FAMILIES, VOCAB_SIZE, TinyModel

Tiny = Callable[[str], TinyModel]
# Longer than the original context of the scaled ropes (32), and no multiple of the block size.
PROMPT = torch.randint(VOCAB_SIZE, (117,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_ids_equal_transformers(tiny: Tiny, name: str) -> None:
    model = tiny(name)
    paged = PagedModel(model.entry)
    (logits,) = paged.logits((paged.sequence(PROMPT), len(PROMPT)))
    expected = model.logits(PROMPT)
    assert expected.std() > 0.1  # else equality would say little
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)

    ids = paged.generate(paged.sequence(PROMPT), 24)
    assert ids == _greedy(model, PROMPT, 24)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_fp32_as_transformers_is(tiny: Tiny, name: str) -> None:
    model = tiny(name)
    exact = model.logits(PROMPT).log_softmax(-1)
    paged = PagedModel(model.entry, dtype=torch.bfloat16)
    (logits,) = paged.logits((paged.sequence(PROMPT), len(PROMPT)))
    assert logits.dtype == torch.float32
    ours = (logits.log_softmax(-1) - exact).abs().mean()
    rounded = TinyModel(copy.deepcopy(model.reference).bfloat16(), model.entry)
    theirs = (rounded.logits(PROMPT).log_softmax(-1) - exact).abs().mean()
    assert ours < 0.1
    assert ours < 1.1 * theirs


def _greedy(model: TinyModel, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
