"""TorchRunner: what a batch of rows comes back as."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.paged import GREEDY, PagedModel, make_storage
from support.tiny_models import VOCAB_SIZE, TinyModel, make_tiny_model

from common.errors import ConfigError
from engine.batch import IN_FLIGHT, Batch, PromptLogprobsRequest
from engine.model_runner import RunnerConfig, build_runner
from engine.models.config import read_entry

Tiny = Callable[[str], TinyModel]
PROMPT = [5, 17, 99, 3, 140, 8, 8, 61, 7, 23, 54, 11, 2, 90, 33, 71, 16, 4, 120, 9]


def test_build_runner_from_an_entry(tiny: Tiny) -> None:
    entry = tiny("llama").entry
    config = read_entry(entry).config
    storage = make_storage(config, 8, 16, torch.float32)
    runner = build_runner(RunnerConfig(), entry, storage)
    assert runner.vocab_size == VOCAB_SIZE
    with pytest.raises(ConfigError, match="kernels: nosuch"):
        build_runner(RunnerConfig(kernels="nosuch"), entry, storage)


def test_a_mid_prompt_chunk_gives_no_token(tiny: Tiny) -> None:
    paged = PagedModel(tiny("llama").entry)
    sequence = paged.sequence(PROMPT)
    (result,) = paged.step(sequence, chunk=7)
    assert result.token_ids == ()
    assert result.error is None


def test_many_sequences_at_once_give_what_each_gives_alone(tiny: Tiny) -> None:
    params = [
        GREEDY,
        replace(GREEDY, temperature=0.8, seed=1),
        replace(GREEDY, temperature=1.0, seed=2**64 - 1, top_k=20, top_p=0.9),
        replace(GREEDY, temperature=1.2, seed=3, min_p=0.02, repetition_penalty=1.3),
        replace(GREEDY, temperature=0.7, seed=4, frequency_penalty=0.5, presence_penalty=-0.2),
    ]
    alone = PagedModel(tiny("qwen3").entry, num_blocks=128)
    expected = [alone.generate(alone.sequence(PROMPT, p), 20, chunk=6) for p in params]
    assert len({tuple(ids) for ids in expected}) == len(params)
    together = PagedModel(tiny("qwen3").entry, num_blocks=128)
    sequences = [together.sequence(PROMPT, p) for p in params]
    for _ in range(20):
        together.step(*sequences)
    assert [s.token_ids[len(PROMPT) :] for s in sequences] == expected


def test_a_resumed_sequence_goes_on_as_it_would_have(tiny: Tiny) -> None:
    """Prompt + output computed anew, as after a preemption or a move."""
    params = replace(GREEDY, temperature=0.9, seed=5, repetition_penalty=1.1, presence_penalty=0.3)
    paged = PagedModel(tiny("llama").entry, num_blocks=128)
    whole = paged.generate(paged.sequence(PROMPT, params), 24)
    for num_before in (1, 9, 23):
        resumed = paged.sequence(PROMPT + whole[:num_before], params, room=30)
        resumed.num_prompt = len(PROMPT)
        assert paged.generate(resumed, 24) == whole


def test_tokens_in_flight_are_resolved(tiny: Tiny) -> None:
    """Two steps launched before the first is collected, twice."""
    paged = PagedModel(tiny("llama").entry)
    expected = paged.generate(paged.sequence(PROMPT), 4)
    sequence, mate = paged.sequence(PROMPT), paged.sequence(PROMPT[:3])
    handles = [paged.runner.launch(Batch(0, [paged.row(mate), paged.row(sequence)]))]
    sequence.computed = len(PROMPT)
    for _ in range(3):
        sequence.token_ids.append(IN_FLIGHT)
        handles.append(paged.runner.launch(Batch(0, [paged.row(sequence)])))
        sequence.computed += 1
    assert [handle.collect()[-1].token_ids[0] for handle in handles] == expected


def test_drafts_are_scored_as_if_they_had_been_sampled(tiny: Tiny) -> None:
    params = replace(GREEDY, temperature=0.9, seed=8, frequency_penalty=0.7)
    paged = PagedModel(tiny("llama").entry)
    truth = paged.generate(paged.sequence(PROMPT, params), 6)
    drafts = [*truth[1:4], (truth[4] + 1) % VOCAB_SIZE]
    sequence = paged.sequence(PROMPT, params)
    paged.step(sequence)
    row = paged.row(sequence)
    row.token_ids = [truth[0], *drafts]
    row.num_draft_tokens = len(drafts)
    (result,) = paged.runner.launch(Batch(0, [row])).collect()
    assert result.token_ids[:4] == tuple(truth[1:5])
    assert len(result.token_ids) == len(drafts) + 1


@pytest.mark.parametrize("chunk", [3, 100])
def test_prompt_logprobs_equal_transformers(tiny: Tiny, chunk: int) -> None:
    model = tiny("llama")
    paged = PagedModel(model.entry)
    ids = (PROMPT * 5)[:90]
    sequence = paged.sequence(ids)
    scored = []
    while sequence.computed < len(ids):
        row = paged.row(sequence, chunk)
        end = row.start + len(row.token_ids)
        row.prompt_logprobs = PromptLogprobsRequest(2, ids[row.start + 1 : end + 1])
        (result,) = paged.runner.launch(Batch(0, [row])).collect()
        scored += result.prompt_logprobs
        sequence.computed = end
    expected = model.logits(ids).log_softmax(-1)
    assert [one.token_id for one in scored] == ids[1:]
    for position, one in enumerate(scored):
        assert one.logprob == pytest.approx(float(expected[position, one.token_id]), abs=1e-3)
        best = expected[position].topk(2)
        assert [i for i, _ in one.top] == best.indices.tolist()
        assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert one.rank == 1 + int((expected[position] > expected[position, one.token_id]).sum())


@pytest.mark.fault("F35")
def test_not_finite_fails_only_its_row(tmp_path: Path) -> None:
    """A token whose embedding is NaN, as a decode, in a mid-prompt chunk and beside good rows."""
    model = make_tiny_model("llama", tmp_path)
    paged = PagedModel(model.entry)
    paged.model._weights.embedding[13] = math.nan
    good, bad, chunked = (
        paged.sequence(PROMPT),
        paged.sequence([*PROMPT, 13]),
        paged.sequence([13, *PROMPT]),
    )
    rows = [paged.row(good), paged.row(bad), paged.row(chunked, 5)]
    of_good, of_bad, of_chunked = paged.runner.launch(Batch(0, rows)).collect()
    assert of_good.error is None
    assert of_good.token_ids == tuple(paged.generate(paged.sequence(PROMPT), 1))
    for result in (of_bad, of_chunked):
        assert result.token_ids == ()
        assert result.error == "logits are not finite"
    # Its next token, launched before the failure was known, does not exist.
    bad.computed = len(bad.token_ids)
    bad.token_ids.append(IN_FLIGHT)
    (after,) = paged.runner.launch(Batch(1, [paged.row(bad)])).collect()
    assert after.error is not None


def test_an_id_out_of_the_vocabulary_fails_only_its_row(tiny: Tiny) -> None:
    paged = PagedModel(tiny("llama").entry)
    rows = [paged.row(paged.sequence(ids)) for ids in ([5, VOCAB_SIZE], PROMPT, [-2, 5])]
    above, good, below = paged.runner.launch(Batch(0, rows)).collect()
    assert good.error is None
    assert above.error == below.error == "a token id is out of the vocabulary"
