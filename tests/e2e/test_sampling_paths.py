"""Each sampling parameter gives the same ids and logprobs on every path through Baton (I2, I3).

The oracle model, whose right answer is known without any engine, shows it exactly; the default
model shows it with real logits.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache

import pytest
import pytest_asyncio
import torch
from support.answers import Answer, answer_of, answers_of, assert_logprobs_equal, params_of
from support.cluster import Cluster, Process, baton_up
from support.default_model import default_entry
from support.engines import VOCAB_SIZE, Rig, prompt_of, spec_of
from support.paged import make_storage

from common.client import BatonClient, Sampling
from common.types import (
    FinishReason,
    SamplingParams,
    SequenceOutput,
    SequenceSpec,
    TokenId,
    TokenLogprobs,
)
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.model_runner import RunnerConfig, build_runner
from engine.models.config import read_entry
from engine.oracle import reference_ids
from engine.prefix_cache import PrefixCache
from engine.scheduler import SchedulerConfig

BLOCK_SIZE = 16
PROMPT_TOKENS = 2 * BLOCK_SIZE
MAX_TOKENS = 120
# So few blocks that the cases below, together, preempt each other.
SMALL_POOL, LARGE_POOL = 32, 256
FLAGS = ["--num-blocks", str(SMALL_POOL), "--step-delay-ms", "5", "--lease-s", "3"]
# Makes eight ids so likely that they come again and again: penalties have something to do.
FEW = dict.fromkeys(range(1, 9), 8.0)


def _case(**parameters: object) -> Sampling:
    return Sampling(max_tokens=MAX_TOKENS, logprobs=3, seed=2024, **parameters)  # type: ignore[arg-type]


CASES = {
    "greedy": _case(temperature=0.0),
    "seed": _case(),
    "temperature": _case(temperature=0.3),
    "top_k": _case(top_k=5),
    "top_p": _case(top_p=0.4),
    "min_p": _case(min_p=0.5),
    "repetition_penalty": _case(repetition_penalty=1.3, logit_bias=FEW),
    "frequency_penalty": _case(frequency_penalty=0.4, logit_bias=FEW),
    "presence_penalty": _case(presence_penalty=1.5, logit_bias=FEW, temperature=0.5),
    "logit_bias": _case(logit_bias=FEW),
    "min_tokens": _case(min_tokens=100, stop_token_ids=tuple(range(64))),
    "stop_token_ids": _case(top_k=40, stop_token_ids=(0,)),
}


@cache
def prompt(name: str) -> tuple[TokenId, ...]:
    return prompt_of(list(CASES).index(name) + 1, PROMPT_TOKENS)


def stopping(name: str, sampling: Sampling) -> Sampling:
    """Where the case is about stop ids: one that first comes up late in the answer."""
    if name != "stop_token_ids":
        return sampling
    ids = reference_ids(prompt(name), params_of(sampling), VOCAB_SIZE)
    late = next(i for i in range(80, len(ids)) if ids.index(ids[i]) == i)
    return replace(sampling, stop_token_ids=(ids[late],))


CASES = {name: stopping(name, sampling) for name, sampling in CASES.items()}


@cache
def right_ids(name: str) -> list[TokenId]:
    return reference_ids(prompt(name), params_of(CASES[name]), VOCAB_SIZE)


@cache
def right_logprobs(name: str) -> list[TokenLogprobs]:
    """Of one engine alone with the case."""
    rig = Rig(num_blocks=LARGE_POOL, block_size=BLOCK_SIZE)
    return _run(rig, name)[name]


def _run(rig: Rig, *names: str) -> dict[str, list[TokenLogprobs]]:
    """Runs cases in one engine; their ids must be right."""
    specs = {name: spec_of(prompt(name), params_of(CASES[name])) for name in names}
    rig.run(*specs.values())
    rig.assert_idle()
    for name, spec in specs.items():
        assert rig.ids(spec) == right_ids(name), name
    return {
        name: [entry for output in rig.outputs(spec) for entry in output.logprobs]
        for name, spec in specs.items()
    }


def assert_right(name: str, answer: Answer) -> None:
    assert answer.token_ids == right_ids(name), name
    assert len(answer.logprobs) == len(answer.token_ids)
    assert_logprobs_equal(answer.logprobs, right_logprobs(name))
    stops = len(right_ids(name)) < MAX_TOKENS
    assert answer.complete.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
    assert answer.complete.matched_token_id == (right_ids(name)[-1] if stops else None)


# ---------------------------------------------------------------- in one engine


def test_every_parameter_matters() -> None:
    """Else the other tests would show nothing: each case differs from the one without it."""
    plain = {"min_tokens": {"min_tokens": None}, "stop_token_ids": {"stop_token_ids": ()}}
    for name in set(CASES) - {"greedy", "seed"}:
        without = replace(CASES[name], **plain.get(name, {name: None}))  # type: ignore[arg-type]
        ids = reference_ids(prompt(name), params_of(without), VOCAB_SIZE)
        assert ids != right_ids(name), name
    assert 80 < len(right_ids("stop_token_ids")) < MAX_TOKENS
    assert 100 <= len(right_ids("min_tokens")) < MAX_TOKENS


def test_in_one_engine_alone_and_preempted() -> None:
    rig = Rig(num_blocks=SMALL_POOL, block_size=BLOCK_SIZE)
    together = _run(rig, *CASES)
    assert rig.engine.statistics().preemptions > 0
    for name, logprobs in together.items():
        assert_logprobs_equal(logprobs, right_logprobs(name))


# ---------------------------------------------------------------- through the pipeline


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with baton_up(tmp_path_factory.mktemp("sampling"), flags=FLAGS) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[BatonClient]:
    async with BatonClient(cluster.grpc) as client:
        yield client


async def decode_work(cluster: Cluster) -> tuple[int, int, int]:
    """What the decode worker has done since its start: steps, bytes fetched, promises."""
    (worker,) = cluster.of_role("decode")
    statistics = await cluster.debug(worker, "statistics")
    return (
        statistics["engine"]["num_steps"],
        statistics["imports"]["num_bytes"].get("shm", 0),
        statistics["reservations"]["granted"],
    )


async def test_preempted_in_the_pipeline(cluster: Cluster, client: BatonClient) -> None:
    answers = await asyncio.gather(
        *(answer_of(client, prompt(name), CASES[name]) for name in CASES)
    )
    for name, answer in zip(CASES, answers, strict=True):
        assert_right(name, answer)
        assert answer.complete.attempts == 1
        assert answer.complete.usage.decode_transferred == PROMPT_TOKENS
    assert sum(answer.complete.usage.preemptions for answer in answers) > 0
    await cluster.until_clean()


async def test_resumed_after_a_decode_worker_was_killed(
    cluster: Cluster, client: BatonClient
) -> None:
    """All begin on a worker with much room and go on, on one with little, when it is killed."""
    flags = ("--num-blocks", str(LARGE_POOL), "--step-delay-ms", "40", "--worker-id", "decode-x")
    async with cluster.another("decode", *flags) as victim:
        tasks = await one_after_the_other(client)
        await _kill_when_all_run(client, victim)
        answers = await asyncio.gather(*tasks)
    for name, answer in zip(CASES, answers, strict=True):
        assert_right(name, answer)
        assert answer.complete.attempts == 2
        assert answer.complete.usage.recomputed > 0
    await cluster.until_clean()


async def one_after_the_other(client: BatonClient) -> list[asyncio.Task[Answer]]:
    """All cases under way, each begun when the one before runs on a decode worker: so each goes
    where there is most room."""
    tasks = []
    for name in CASES:
        begun = asyncio.Event()
        tasks.append(asyncio.create_task(_until_end(client, name, begun)))
        await begun.wait()
    return tasks


async def _until_end(client: BatonClient, name: str, begun: asyncio.Event) -> Answer:
    """Sets ``begun`` once the decode worker has given a token."""
    answer = Answer()
    async for chunk in client.generate(prompt(name), CASES[name]):
        answer.token_ids += chunk.token_ids
        answer.logprobs += chunk.logprobs
        answer.completion = chunk.complete
        if len(answer.token_ids) > 1:
            begun.set()
    return answer


async def _kill_when_all_run(client: BatonClient, victim: Process) -> None:
    async with asyncio.timeout(10):
        while True:
            workers = {w.worker_id: w for w in (await client.list_workers()).workers}
            if workers[victim.id].running == len(CASES):
                break
            await asyncio.sleep(0.05)
    victim.kill()


async def test_computed_on_the_decode_worker(cluster: Cluster, client: BatonClient) -> None:
    flags = ("--num-blocks", str(LARGE_POOL), "--local-prefill", "always", "--worker-id", "both-x")
    async with cluster.another("decode", *flags):
        answers = await asyncio.gather(*await one_after_the_other(client))
        for name, answer in zip(CASES, answers, strict=True):
            assert_right(name, answer)
            assert answer.complete.usage.decode_computed == PROMPT_TOKENS
            assert answer.complete.usage.prefill_computed == 0


async def test_one_token_needs_no_decode_worker(cluster: Cluster, client: BatonClient) -> None:
    before = await decode_work(cluster)
    for name in ("greedy", "top_p"):
        answer = await answer_of(client, prompt(name), replace(CASES[name], max_tokens=1))
        assert answer.token_ids == right_ids(name)[:1]
        assert_logprobs_equal(answer.logprobs, right_logprobs(name)[:1])
        assert answer.complete.finish_reason is FinishReason.LENGTH
        assert answer.complete.usage.decode_transferred == 0
    await cluster.until_clean()
    assert await decode_work(cluster) == before


async def test_a_stop_id_as_first_token(cluster: Cluster, client: BatonClient) -> None:
    before = await decode_work(cluster)
    (first, *_) = right_ids("seed")
    sampling = replace(CASES["seed"], stop_token_ids=(first,))
    answer = await answer_of(client, prompt("seed"), sampling)
    assert answer.token_ids == [first] and len(answer.logprobs) == 1
    assert answer.complete.finish_reason is FinishReason.STOP
    assert answer.complete.matched_token_id == first
    await cluster.until_clean()
    steps, num_bytes, _ = await decode_work(cluster)
    assert (steps, num_bytes) == before[:2]


async def test_no_token_but_the_prompt_scored(cluster: Cluster, client: BatonClient) -> None:
    before = await decode_work(cluster)
    sampling = Sampling(max_tokens=0, prompt_logprobs=2, seed=1)
    answer = await answer_of(client, prompt("seed"), sampling)
    assert (answer.token_ids, answer.logprobs, answer.text) == ([], [], "")
    assert answer.complete.finish_reason is FinishReason.LENGTH
    rig = Rig(num_blocks=LARGE_POOL, block_size=BLOCK_SIZE)
    spec = spec_of(prompt("seed"), params_of(sampling))
    rig.run(spec)
    assert_logprobs_equal(answer.prompt_logprobs, rig.last(spec).prompt_logprobs)
    assert [entry.token_id for entry in answer.prompt_logprobs] == list(prompt("seed"))
    assert answer.prompt_logprobs[0].logprob is None
    await cluster.until_clean()
    assert await decode_work(cluster) == before


async def test_choices_have_seeds_that_follow_each_other(
    cluster: Cluster, client: BatonClient
) -> None:
    last_seed = (1 << 64) - 1
    sampling = replace(CASES["seed"], max_tokens=12, seed=last_seed)
    choices = await answers_of(client, prompt("seed"), sampling, n=3)
    assert [choice.complete.seed for choice in choices] == [last_seed, 0, 1]
    for choice in choices:
        params = params_of(replace(sampling, seed=choice.complete.seed))
        assert choice.token_ids == reference_ids(prompt("seed"), params, VOCAB_SIZE)
        assert len(choice.logprobs) == 12
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    await cluster.until_clean()


# ---------------------------------------------------------------- the default model

PROMPT_TEXT = "Once upon a time, in a small village by the sea, there lived"
REAL_CASES = {
    "top_p": Sampling(max_tokens=24, temperature=0.8, top_p=0.9, top_k=0, logprobs=1, seed=11),
    "repetition_penalty": Sampling(
        max_tokens=24, temperature=1.0, repetition_penalty=1.2, top_k=50, logprobs=1, seed=12
    ),
    "min_p": Sampling(max_tokens=24, temperature=1.2, min_p=0.05, top_k=0, logprobs=1, seed=13),
}


async def test_eos_first_gives_an_empty_text(smollm2: Cluster) -> None:
    async with BatonClient(smollm2.grpc) as client:
        (eos, *_) = (await client.model_info()).eos_token_ids
        sampling = Sampling(max_tokens=8, temperature=0.0, logit_bias={eos: 100.0}, logprobs=0)
        answer = await answer_of(client, PROMPT_TEXT, sampling)
        assert (answer.text, answer.token_ids) == ("", [eos])
        assert len(answer.logprobs) == 1
        assert answer.complete.finish_reason is FinishReason.STOP
        assert answer.complete.matched_token_id == eos


@pytest.mark.full
async def test_default_model_samples_as_one_engine_does(smollm2: Cluster) -> None:
    """At once through the pipeline, alone in one engine. No two of the best scores of these
    answers are nearer to each other than 1e-3, so there is no tie to allow for."""
    prompt_ids = _encode(PROMPT_TEXT)
    async with BatonClient(smollm2.grpc) as client:
        answers = await asyncio.gather(
            *(answer_of(client, prompt_ids, sampling) for sampling in REAL_CASES.values())
        )
    for sampling, answer in zip(REAL_CASES.values(), answers, strict=True):
        token_ids, logprobs = _one_engine(prompt_ids, params_of(sampling))
        assert answer.token_ids == token_ids
        assert_logprobs_equal(answer.logprobs, logprobs)


def _encode(text: str) -> tuple[TokenId, ...]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_entry() / "tokenizer.json"))
    return tuple(tokenizer.encode(text).ids)


def _one_engine(
    prompt_ids: tuple[TokenId, ...], params: SamplingParams
) -> tuple[list[TokenId], list[TokenLogprobs]]:
    entry, num_blocks = default_entry(), 16
    storage = make_storage(read_entry(entry).config, num_blocks, BLOCK_SIZE, torch.float32)
    pool = BlockPool(num_blocks, BLOCK_SIZE, "smollm2", PrefixCache(num_blocks))
    engine = Engine(build_runner(RunnerConfig(), entry, storage), pool, SchedulerConfig())
    spec: SequenceSpec = spec_of(prompt_ids, params)
    engine.add(spec)
    token_ids: list[TokenId] = []
    logprobs: list[TokenLogprobs] = []
    while engine.has_work:
        for event in engine.step()[0]:
            assert isinstance(event, SequenceOutput), event
            token_ids += event.token_ids
            logprobs += event.logprobs
    return token_ids, logprobs
