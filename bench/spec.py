"""Speculation on SmolLM2: what it gains, what it costs, and that it is silent where it costs.

``python -m bench.spec [--part workloads|sweep|pairs|proposers|coupling] [--plot PATH]``

One engine in this process, the kernels that serve, fp32, greedy, on the prompts of
bench/data/speculation.json: edit this code, fill this JSON, copy with changes, free chat. All
ratios are taken within one run, plain and drafted decodes in turns. JSON on stdout:

workloads  n-gram drafts, k fixed, one sequence: tokens a step (a), step time by rows (c), measured
           speed-up beside a / c, of which the engine may lose a tenth
sweep      speed-up against the number of sequences, with k chosen and with k fixed; the plot
pairs      20 interleaved pairs with and without ``auto``: 95 % interval of the mean ratio
proposers  what n-gram costs a sequence and step; what self:N and noisy copies of the target give
coupling   acceptance of a model draft by the coupled noise, and by rejection sampling
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from cli.kernel_cache import fill_kernel_cache, kernel_cache
from cli.model_cache import default_cache_dir, prepare_entry
from cli.prepare import DEFAULT_MODEL, find_source
from common.config import DecodeSettings, load
from common.types import SamplingParams, SequenceId, SequenceOutput, SequenceSpec, StepRecord
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.model_runner import TorchRunner
from engine.models.choice import choose_kernels
from engine.models.choice import load as load_model
from engine.models.config import read_entry
from engine.prefix_cache import PrefixCache
from engine.scheduler import SchedulerConfig
from engine.speculation.speculator import Speculator
from worker.model import ModelFacts, model_facts
from worker.speculation import make_speculator

DATA = Path(__file__).parent / "data" / "speculation.json"
NUM_BLOCKS, BLOCK_SIZE = 1200, 16
K = 5
COPY_TYPE = ("edit", "json", "copy")
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
PAIRS = 20
# Per sequence, where one runs alone; as many together take that many times as long.
NUM_TOKENS = 48
ROUNDS = 3


@dataclass(frozen=True)
class Result:
    """One run: decode tokens and seconds, from the first step without a prompt."""

    num_tokens: int
    seconds: float
    records: tuple[StepRecord, ...]
    ids: tuple[tuple[int, ...], ...]

    @property
    def per_s(self) -> float:
        return self.num_tokens / self.seconds


class Bench:
    def __init__(self) -> None:
        self.entry = prepare_entry(find_source(DEFAULT_MODEL), default_cache_dir(), lambda *_: None)
        self.facts: ModelFacts = model_facts(load(DecodeSettings, {"model": str(self.entry)}))
        storage = torch.zeros(NUM_BLOCKS, *self.facts.layout.block_shape)
        cache, entry = KVCache(storage), read_entry(self.entry)
        kernels = choose_kernels("auto", entry.config, cache)
        self.model = load_model(entry, kernels, torch.float32, torch.device("cpu"), "none")
        self.runner = TorchRunner(self.model, cache)
        if kernels.name == "numba":
            torch.set_num_threads(1)  # as a worker does
        tokenizer = Tokenizer.from_file(str(self.entry / "tokenizer.json"))
        prompts: dict[str, list[str]] = json.loads(DATA.read_text(encoding="utf-8"))
        self.prompts = {
            name: [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
            for name, texts in prompts.items()
        }
        self._ids = count(1)
        self._pool = self._fresh_pool()

    def _fresh_pool(self) -> BlockPool:
        return BlockPool(NUM_BLOCKS, BLOCK_SIZE, "m", PrefixCache(NUM_BLOCKS))

    def speculator(self, **settings: object) -> Speculator:
        """To be made before the engines that are compared: it times steps in the pool's memory."""
        self._pool = self._fresh_pool()
        loaded = load(DecodeSettings, {"model": str(self.entry), **settings})
        made = make_speculator(loaded, self.facts, self.runner, self._pool, time.monotonic)
        assert made is not None
        return made

    def engine(self, speculator: Speculator | None = None) -> Engine:
        """All engines share the pool, one after the other, and so the prompts' KV."""
        config = SchedulerConfig(max_num_batched_tokens=256)
        return Engine(self.runner, self._pool, config, speculator=speculator)

    def run(
        self,
        engine: Engine,
        name: str,
        num_sequences: int,
        num_tokens: int,
        after_step: Callable[[], None] = lambda: None,
    ) -> Result:
        """Sequence i goes on from prompt i of the workload, modulo their number."""
        prompts = self.prompts[name]
        seq_ids = [SequenceId(next(self._ids)) for _ in range(num_sequences)]
        ids: dict[SequenceId, list[int]] = {seq_id: [] for seq_id in seq_ids}
        for number, seq_id in enumerate(seq_ids):
            params = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0)
            prompt = tuple(prompts[number % len(prompts)])
            engine.add(SequenceSpec(seq_id, "", 1, prompt, (), params))
        records: list[StepRecord] = []
        num_decoded, start_s = 0, 0.0
        while engine.has_work:
            all_begun = all(ids.values())
            if all_begun and not start_s:
                start_s = time.monotonic()
            events, record = engine.step()
            after_step()
            for event in events:
                assert isinstance(event, SequenceOutput), event
                ids[event.seq_id] += event.token_ids
                num_decoded += len(event.token_ids) if all_begun else 0
            if all_begun and record is not None:
                records.append(record)
        seconds = time.monotonic() - start_s
        return Result(num_decoded, seconds, tuple(records), tuple(map(tuple, ids.values())))


# ---------------------------------------------------------------- parts


def workloads(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    drafted = bench.engine(bench.speculator(speculation="ngram", fixed_k=True))
    plain = bench.engine()
    for name in bench.prompts:
        bench.run(plain, name, 1, 2)  # the prompt's KV, for both
        without, with_drafts = [], []
        for _ in range(ROUNDS):
            without.append(bench.run(plain, name, 1, NUM_TOKENS))
            with_drafts.append(bench.run(drafted, name, 1, NUM_TOKENS))
        found[name] = compare(without, with_drafts)
    return found


def compare(without: Sequence[Result], drafted: Sequence[Result]) -> dict[str, Any]:
    assert all(result.ids == without[0].ids for result in [*without, *drafted])
    one_s = statistics.median(duration(r) for result in without for r in result.records)
    by_rows: dict[int, list[float]] = {}
    for record in (record for result in drafted for record in result.records):
        by_rows.setdefault(1 + record.num_draft_tokens, []).append(duration(record))
    num_steps = sum(map(len, by_rows.values()))
    steps_s = sum(len(times) * statistics.median(times) for times in by_rows.values())
    drafts = sum(record.num_draft_tokens for result in drafted for record in result.records)
    accepted = sum(record.num_accepted_tokens for result in drafted for record in result.records)
    a = sum(result.num_tokens for result in drafted) / num_steps
    c = steps_s / num_steps / one_s
    measured = statistics.median(
        with_drafts.per_s / plain.per_s for plain, with_drafts in zip(without, drafted, strict=True)
    )
    return {
        "tokens_a_step": round(a, 3),
        "cost_ratio": round(c, 3),
        "cost_by_rows": {
            str(rows): round(statistics.median(times) / one_s, 2)
            for rows, times in sorted(by_rows.items())
        },
        "acceptance": round(accepted / max(1, drafts), 3),
        "step_ms": round(one_s * 1000, 1),
        "speedup": round(measured, 3),
        "of_a_over_c": round(measured / (a / c), 3),
    }


def duration(record: StepRecord) -> float:
    return record.end_s - record.start_s


def sweep(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {"concurrency": list(CONCURRENCIES)}
    speculators = {
        "auto": bench.speculator(speculation="auto"),
        "fixed": bench.speculator(speculation="ngram", fixed_k=True),
    }
    engines = {mode: bench.engine(speculator) for mode, speculator in speculators.items()}
    plain = bench.engine()
    for name in ("copy", "chat"):
        for mode in engines:
            found[f"{name}_{mode}"] = []
        for num_sequences in CONCURRENCIES:
            num_tokens = NUM_TOKENS if num_sequences < 8 else NUM_TOKENS // 2
            bench.run(plain, name, num_sequences, 2)
            bench.run(engines["auto"], name, num_sequences, num_tokens)  # it learns
            without = bench.run(plain, name, num_sequences, num_tokens)
            for mode, engine in engines.items():
                with_drafts = bench.run(engine, name, num_sequences, num_tokens)
                ratio = round(with_drafts.per_s / without.per_s, 3)
                found[f"{name}_{mode}"].append(ratio)
    return found


def pairs(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, num_sequences, num_tokens in (("chat", 1, 40), ("chat", 32, 12), ("copy", 32, 12)):
        drafted = bench.engine(bench.speculator(speculation="auto"))
        plain = bench.engine()
        bench.run(plain, name, num_sequences, 2)
        bench.run(drafted, name, num_sequences, num_tokens)
        ratios = []
        for number in range(PAIRS):
            order = (plain, drafted) if number % 2 else (drafted, plain)
            per_s = {e: bench.run(e, name, num_sequences, num_tokens).per_s for e in order}
            ratios.append(per_s[drafted] / per_s[plain])
        speculation = drafted.statistics().speculation
        assert speculation is not None
        found[f"{name}_at_{num_sequences}"] = {
            **interval(ratios),
            "reasons": {reason.value: n for reason, n in speculation.reasons.items()},
        }
    return found


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """95 % of the geometric mean, by Student's t for 20 pairs."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = mean - 2.093 * error, mean + 2.093 * error
    return {
        name: round(math.exp(v), 3)
        for name, v in zip(("mean", "low", "high"), (mean, low, high), strict=True)
    }


def proposers(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {"ngram": {name: ngram_cost(bench, name) for name in ("copy", "chat")}}
    for name in ("draft=self:10", "draft=self:20", "draft=self:29", f"draft={bench.entry}"):
        drafted = bench.engine(bench.speculator(speculation=name, fixed_k=True))
        result = bench.run(drafted, "chat", 1, 40)
        num_drafts = sum(record.num_draft_tokens for record in result.records)
        accepted = sum(record.num_accepted_tokens for record in result.records)
        label = name if "self" in name else "draft=the target itself"
        found[label] = {
            "acceptance": round(accepted / max(1, num_drafts), 3),
            "tokens_a_step": round(result.num_tokens / len(result.records), 2),
        }
    return found


def ngram_cost(bench: Bench, name: str) -> dict[str, float]:
    """The whole of `Speculator.draft` at 32 sequences whose forward pass is as it is: a step once
    the prompts are indexed, and indexing them."""
    speculator = bench.speculator(speculation="auto")
    spent: list[tuple[float, int]] = []

    def look() -> None:
        now = speculator.statistics()
        spent.append((now.proposal_s, sum(now.reasons.values())))

    bench.run(bench.engine(speculator), name, 32, 24, look)
    costs_us = [
        (after_s - before_s) * 1e6 / (num_after - num_before)
        for (before_s, num_before), (after_s, num_after) in pairwise(spent)
        if num_after > num_before
    ]
    # The first steps of a sequence index its prompt.
    prompts = [len(prompt) for prompt in bench.prompts[name]]
    return {
        "us_a_sequence_and_step": round(statistics.median(costs_us), 2),
        "us_a_prompt_token": round(max(costs_us) / statistics.mean(prompts), 2),
    }


def coupling(bench: Bench) -> dict[str, Any]:
    """Exact, from both models' distributions at each position of a chat answer: by the coupled
    noise sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), by rejection sampling 1 - TV."""
    prompt = bench.prompts["chat"][0]
    (ids,) = bench.run(bench.engine(), "chat", 1, 48).ids
    target = distributions(bench, [*prompt, *ids], 30)
    found = {}
    for num_layers in (10, 20, 27, 29):
        draft = distributions(bench, [*prompt, *ids], num_layers)
        coupled, rejected = [], []
        for p, q in zip(target[len(prompt) :], draft[len(prompt) :], strict=True):
            keep = (p + q) > 1e-9
            p, q = p[keep] / p[keep].sum(), q[keep] / q[keep].sum()
            rejected.append(float(torch.minimum(p, q).sum()))
            coupled.append(same_choice(p, q))
        found[f"self:{num_layers}"] = {
            "coupled": round(statistics.mean(coupled), 3),
            "rejection": round(statistics.mean(rejected), 3),
        }
    return found


def same_choice(p: torch.Tensor, q: torch.Tensor) -> float:
    """Over the 500 likeliest ids; the rest of the mass is left out."""
    top = (p + q).topk(min(500, len(p))).indices
    p, q = p[top].double().clamp_min(1e-30), q[top].double().clamp_min(1e-30)
    total = 0.0
    for i in range(len(p)):
        total += float(1 / torch.maximum(p / p[i], q / q[i]).sum())
    return total


def distributions(bench: Bench, token_ids: Sequence[int], num_layers: int) -> torch.Tensor:
    layers = bench.facts.layout.num_layers
    model = bench.model if num_layers >= layers else bench.model.first_layers(num_layers)
    cache = KVCache(torch.zeros(64, *bench.facts.layout.block_shape))
    block_ids = list(range(1, 64))
    n = len(token_ids)
    with torch.inference_mode():
        hidden = model.forward(
            torch.tensor(token_ids),
            torch.arange(n),
            torch.tensor(cache.slots(block_ids, 0, n)),
            cache,
            model.kernels.attention(cache, [Span(0, n, 0, block_ids)]),
        )
        return model.logits(hidden).softmax(-1)


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "workloads": workloads,
    "sweep": sweep,
    "pairs": pairs,
    "proposers": proposers,
    "coupling": coupling,
}


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    looks = {"auto": "-o", "fixed": "--s"}
    colours = {"copy": "tab:blue", "chat": "tab:orange"}
    for name, colour in colours.items():
        for mode, look in looks.items():
            label = f"{name}, k {'chosen' if mode == 'auto' else f'= {K}'}"
            values = found[f"{name}_{mode}"]
            axes.plot(found["concurrency"], values, look, color=colour, label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(found["concurrency"], [str(n) for n in found["concurrency"]])
    axes.set_xlabel("sequences at the same time")
    axes.set_ylabel("speed-up over no speculation")
    axes.set_title("n-gram speculation, SmolLM2-135M, fp32, CPU")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    os.environ.update(kernel_cache())
    fill_kernel_cache()
    bench = Bench()
    found = {name: PARTS[name](bench) for name in options.part or PARTS}
    print(json.dumps(found, indent=1))
    if options.plot is not None and "sweep" in found:
        plot(found["sweep"], options.plot)


if __name__ == "__main__":
    main()
