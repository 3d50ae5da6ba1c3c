"""What quantised weights cost in quality: perplexity through the kernels that serve. JSON.

``python -m bench.quality [--model ENTRY] [--tokens 8192]``

The text, `bench/data/prose.txt`, goes through the model in windows of 1,024 tokens, each by itself,
every token but a window's first is scored. ``logits_from_torch`` compares the compiled kernels with
plain torch on the weights that the quantised ones stand for, over one window.
"""

import argparse
import json
import math
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from cli.model_cache import default_cache_dir, prepare_entry
from cli.prepare import DEFAULT_MODEL, find_source
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.models.choice import choose_kernels, load
from engine.models.config import ModelEntry, read_entry
from engine.models.model import Model

TEXT = Path(__file__).parent / "data" / "prose.txt"
WINDOW, BLOCK_SIZE, SLICE = 1024, 16, 64
# Perplexity over that of fp32, at most; logits, at most apart.
BOUNDS = {"int8": 1.01, "int4": 1.02}
LOGITS_BOUND = 1e-3


class Scorer:
    """One model and a pool for one window."""

    def __init__(self, entry: ModelEntry, kernels: str, quantization: str) -> None:
        config = entry.config
        num_blocks = WINDOW // BLOCK_SIZE + 1
        shape = (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads)
        self._cache = KVCache(torch.zeros(*shape, config.head_size))
        chosen = choose_kernels(kernels, config, self._cache)
        cpu = torch.device("cpu")
        self._model: Model = load(entry, chosen, torch.float32, cpu, quantization)
        self._blocks = list(range(1, num_blocks))

    @torch.inference_mode()
    def hidden(self, token_ids: list[int]) -> Tensor:
        n = len(token_ids)
        plan = self._model.kernels.attention(self._cache, [Span(0, n, 0, self._blocks)])
        slots = torch.tensor(self._cache.slots(self._blocks, 0, n))
        return self._model.forward(
            torch.tensor(token_ids), torch.arange(n), slots, self._cache, plan
        ).clone()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden).clone()

    def negative_log_likelihood(self, token_ids: list[int]) -> float:
        """Summed over all tokens but the first."""
        hidden, total = self.hidden(token_ids), 0.0
        for start in range(0, len(token_ids) - 1, SLICE):
            targets = torch.tensor(token_ids[start + 1 : start + 1 + SLICE])
            logits = self.logits(hidden[start : start + len(targets)])
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        return total


def perplexity(scorer: Scorer, windows: list[list[int]]) -> float:
    total = sum(scorer.negative_log_likelihood(window) for window in windows)
    return math.exp(total / sum(len(window) - 1 for window in windows))


def logits_apart(entry: ModelEntry, window: list[int], quantization: str) -> float:
    """The largest difference between the compiled and the plain kernels."""
    compiled = Scorer(entry, "numba", quantization)
    plain = Scorer(entry, "torch", quantization)
    states = [scorer.hidden(window)[-SLICE:] for scorer in (compiled, plain)]
    return (compiled.logits(states[0]) - plain.logits(states[1])).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a prepared entry; default: the default model")
    parser.add_argument("--tokens", type=int, default=8192)
    given = parser.parse_args()
    directory = given.model or prepare_entry(
        find_source(DEFAULT_MODEL), default_cache_dir(), lambda *_: None
    )
    entry = read_entry(directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[: given.tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]
    base = perplexity(Scorer(entry, "auto", "none"), windows)
    result: dict[str, object] = {"tokens": len(ids), "perplexity": {"fp32": base}}
    for quantization, bound in BOUNDS.items():
        value = perplexity(Scorer(entry, "auto", quantization), windows)
        apart = logits_apart(entry, windows[0], quantization)
        result[quantization] = {
            "perplexity": value,
            "over_fp32": value / base,
            "at_most": bound,
            "logits_from_torch": apart,
            "logits_at_most": LOGITS_BOUND,
            "ok": value / base <= bound and apart <= LOGITS_BOUND,
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
