"""Which worker a request goes to: what there is to compute there, and what is queued there already.

For prefill the cost of a worker, in tokens, is the part of the prompt that it has not cached plus
what it still has to compute for others. The load is the larger of what must be left of what the
worker reported and of what this gateway was granted there and has had no ticket for: the report is
up to a second old, and knows other gateways' work. Both belong to the worker's epoch, and are zero
when it is idle.
"""

import random
from collections.abc import Sequence
from typing import Literal

from common.block_keys import chain_keys, key_prefix, root_key
from common.types import Role, TokenId
from gateway.expected_prefixes import ExpectedPrefixes
from gateway.prefix_index import PrefixIndex
from gateway.registry import WorkerEntry, WorkerRegistry
from gateway.run import Run

# A worker that has not reported for so long is not chosen by name: it may hang.
_QUIET_S = 1.5
# So many are asked by name, then the job goes to the shared queue.
_MAX_TARGETS = 2


class Router:
    """``mode``: auto, or load (as if nothing were cached anywhere), or random. ``seed`` decides
    ties."""

    def __init__(
        self,
        mode: Literal["auto", "load", "random"],
        registry: WorkerRegistry,
        index: PrefixIndex,
        seed: str,
    ) -> None:
        self._mode = mode
        self._registry = registry
        self._index = index
        self._rng = random.Random(seed)
        self._expected = ExpectedPrefixes(registry.clock)

    def targets(self, run: Run) -> list[str]:
        """Prefill workers to ask for, best first. None where any is as good as another: the
        shared queue gives the job to the first that is free."""
        quiet_s = self._registry.clock() - _QUIET_S
        ready = [e for e in self._registry.ready(Role.PREFILL) if e.heard_s >= quiet_s]
        if len(ready) < 2:
            return []
        self._rng.shuffle(ready)
        if self.avoids_some(run):
            ready = [e for e in ready if e.worker_id not in run.excluded_prefill]
            return [e.worker_id for e in sorted(ready, key=lambda e: self.cost(run, e))]
        if self._mode == "random":
            return [ready[0].worker_id]
        costs = {entry.worker_id: self.cost(run, entry) for entry in ready}
        if len(set(costs.values())) == 1:
            return []
        return sorted(costs, key=costs.__getitem__)[:_MAX_TARGETS]

    def avoids_some(self, run: Run) -> bool:
        """Some prefill worker lost the run's KV, and there is another one: who cannot be reached is
        idle, and would get it again and again."""
        ready = {entry.worker_id for entry in self._registry.ready(Role.PREFILL)}
        return bool(ready & run.excluded_prefill) and not ready <= run.excluded_prefill

    def cost(self, run: Run, entry: WorkerEntry) -> int:
        """Tokens that a worker has to compute until it has done this one too."""
        return self.num_uncached(run, entry.worker_id) + self._registry.queued_tokens(entry)

    def num_uncached(self, run: Run, worker_id: str) -> int:
        """Tokens of the run that the worker would have to compute: at least one, whose logits are
        needed."""
        return max(1, run.num_tokens - self.num_held(run, worker_id) * self._registry.block_size)

    def num_held(self, run: Run, worker_id: str) -> int:
        """Leading blocks of the prompt that the worker has cached and can use."""
        if self._mode != "auto":
            return 0
        return self._index.num_held(worker_id, self._keys(run), self._expected.of(worker_id))

    def sent(self, run: Run, worker_id: str) -> None:
        """The worker computes the run's prompt, or has got its KV and decoded what there is."""
        if self._mode != "auto":
            return
        keys = self._chain(run, run.output_ids) if run.output_ids else self._keys(run)
        self._expected.expect(worker_id, keys)

    def _keys(self, run: Run) -> Sequence[int]:
        request, registry = run.request, self._registry
        # Log-probabilities of the prompt come from computing it; nothing cached helps.
        if request.params.prompt_logprobs is not None or not registry.block_size:
            return ()
        if run.key_prefixes is None:
            run.key_prefixes = self._chain(run)
        return run.key_prefixes

    def _chain(self, run: Run, output_ids: Sequence[TokenId] = ()) -> tuple[int, ...]:
        request, registry = run.request, self._registry
        root = root_key(registry.fingerprint, request.tenant, request.cache_salt)
        ids = (*request.prompt_ids, *output_ids)
        return tuple(map(key_prefix, chain_keys(root, ids, registry.block_size)))
