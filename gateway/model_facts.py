"""What the gateway must know of the served model to judge a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.errors import Unavailable
from common.types import Role, TokenId
from gateway.model_entry import ModelEntry
from gateway.registry import WorkerRegistry


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[TokenId, ...]
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    # Tokens that the smallest and the largest live decode pool can hold; 0 while there is none.
    smallest_pool_tokens: int = 0
    largest_pool_tokens: int = 0

    def bound(self, pool_tokens: int) -> tuple[int, str]:
        """Tokens that a sequence can have at most with a pool of so many (0: unknown), and what
        sets the bound."""
        if 0 < pool_tokens < self.max_model_len:
            return pool_tokens, "the KV pool"
        return self.max_model_len, "the model's context"


def model_facts(
    entry: ModelEntry | None, registry: WorkerRegistry, max_model_len: int | None
) -> ModelFacts:
    """From the model entry, or for models without one (oracle, null) from a worker's report.
    Raises Unavailable while nothing is known."""
    report = next((e.report for e in registry.entries.values()), None)
    if entry is not None:
        name, fingerprint = entry.name, entry.fingerprint
        vocab_size, eos = entry.vocab_size, entry.eos_token_ids
        limits = [entry.max_model_len]
        defaults = entry.default_sampling
    elif report is not None:
        model = report.model
        name, fingerprint, vocab_size = model.name, model.fingerprint, model.vocab_size
        eos = tuple(model.eos_token_ids)
        limits, defaults = [], {}
    else:
        raise Unavailable("no worker is up", pool="decode")
    limits += [e.report.model.max_model_len for e in registry.entries.values()]
    if max_model_len is not None:
        limits.append(max_model_len)
    block_size = registry.block_size
    return ModelFacts(
        name=name,
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        max_model_len=min(limits),
        eos_token_ids=eos,
        default_sampling=defaults,
        smallest_pool_tokens=registry.smallest_pool(Role.DECODE) * block_size,
        largest_pool_tokens=registry.largest_pool(Role.DECODE) * block_size,
    )
