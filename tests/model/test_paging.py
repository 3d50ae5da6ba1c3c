"""The pool, chunks and batch mates leave no trace in the logits.

The pool starts as NaN and block tables are in no order, so a wrong, stale or foreign slot shows.
"""

from collections.abc import Callable

import pytest
import torch
from support.paged import PagedModel
from support.tiny_models import VOCAB_SIZE, TinyModel

Tiny = Callable[[str], TinyModel]
TOLERANCE = {"rtol": 0, "atol": 1e-4}
GQA_MODELS = ["llama-tied-mha", "llama-biases-mqa", "qwen3", "qwen3-head-128"]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@pytest.mark.parametrize("name", GQA_MODELS)
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
def test_paged_equals_contiguous(tiny: Tiny, name: str, block_size: int) -> None:
    model = tiny(name)
    paged = PagedModel(model.entry, num_blocks=1 + 600 // block_size + 2, block_size=block_size)
    ids = prompt(70)
    sequence = paged.sequence(ids, room=0)
    logits = [paged.logits((sequence, n))[0] for n in (33, 1, 1, 20, 1, 14)]
    torch.testing.assert_close(torch.cat(logits), model.logits(ids), rtol=0, atol=1e-3)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48])
def test_chunks_of_any_size_equal_the_whole(tiny: Tiny, length: int) -> None:
    paged = PagedModel(tiny("llama").entry)
    ids = prompt(length)
    (whole,) = paged.logits((paged.sequence(ids, room=0), length))
    for chunk in (1, 7, 16):
        sequence = paged.sequence(ids, room=0)
        parts = []
        while sequence.computed < length:
            parts += paged.logits((sequence, min(chunk, length - sequence.computed)))
        torch.testing.assert_close(torch.cat(parts), whole, **TOLERANCE)
        paged = PagedModel(tiny("llama").entry)


@pytest.mark.parametrize("name", GQA_MODELS)
def test_batch_mates_do_not_matter(tiny: Tiny, name: str) -> None:
    """Decodes of very different lengths, a chunk and a prompt, in one step and each alone."""
    lengths = [1, 2, 16, 17, 40, 90, 150]
    together = PagedModel(tiny(name).entry)
    alone = PagedModel(tiny(name).entry)
    mixed = []
    expected = []
    for number, length in enumerate(lengths):
        ids = prompt(length + 30, seed=number)
        num_new = {2: 9, 4: 30}.get(number, 1)
        for model, chunks in ((together, mixed), (alone, expected)):
            sequence = model.sequence(ids, room=0)
            if length > 1:
                model.logits((sequence, length - 1))
            chunks.append((sequence, num_new))
    whole_prompt = prompt(45, seed=99)
    mixed.insert(3, (together.sequence(whole_prompt, room=0), 45))
    expected.insert(3, (alone.sequence(whole_prompt, room=0), 45))
    for got, chunk in zip(together.logits(*mixed), expected, strict=True):
        torch.testing.assert_close(got, alone.logits(chunk)[0], **TOLERANCE)


def test_a_neighbours_broken_past_does_not_show(tiny: Tiny) -> None:
    """Blocks that held NaN are reused: what lies behind the sequence's end is never looked at."""
    paged = PagedModel(tiny("llama").entry)
    ids = prompt(20)
    first, second = paged.sequence(ids, room=0), paged.sequence(ids[:3], room=0)
    paged.logits((first, 19), (second, 2))
    paged.storage[second.block_ids[0], :, :, 3:] = float("inf")
    (of_first, of_second) = paged.logits((first, 1), (second, 1))
    assert of_first.isfinite().all()
    assert of_second.isfinite().all()


def test_copied_block_holds_the_same(tiny: Tiny) -> None:
    paged = PagedModel(tiny("llama").entry)
    ids = prompt(21)
    sequence = paged.sequence(ids, room=0)
    paged.logits((sequence, 20))
    copy = paged.sequence(ids, room=0)
    for source, target in zip(sequence.block_ids, copy.block_ids, strict=True):
        paged.runner.copy_block(source, target)
    copy.computed = 20
    (expected,) = paged.logits((sequence, 1))
    assert torch.equal(paged.logits((copy, 1))[0], expected)
