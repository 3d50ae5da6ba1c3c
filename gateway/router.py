"""Which prefill worker already holds a request's prefix, as far as this gateway has seen."""

from collections import OrderedDict
from dataclasses import dataclass, field

from common.block_keys import BlockKey, chain_keys, root_key
from common.types import Role
from gateway.registry import WorkerRegistry
from gateway.request import Request


@dataclass(slots=True)
class PrefixMemory:
    """Remembers, per block key, the prefill worker that last computed it; the oldest goes first.

    A hint only: a wrong one costs a cache miss, never a wrong token, since workers look keys up
    in their own caches.
    """

    registry: WorkerRegistry
    max_entries: int = 1 << 16
    _holders: OrderedDict[BlockKey, str] = field(default_factory=OrderedDict)

    def holder(self, request: Request) -> str | None:
        """The live worker that holds the longest known prefix of the prompt, if any."""
        if not self._holders:
            return None
        ready = {entry.worker_id for entry in self.registry.ready(Role.PREFILL)}
        best = None
        for key in self._keys(request):
            worker_id = self._holders.get(key)
            if worker_id is None:
                break
            if worker_id in ready:
                best = worker_id
        return best

    def remember(self, request: Request, worker_id: str) -> None:
        """``worker_id`` has just computed this prompt."""
        for key in self._keys(request):
            self._holders[key] = worker_id
            self._holders.move_to_end(key)
        while len(self._holders) > self.max_entries:
            self._holders.popitem(last=False)

    def _keys(self, request: Request) -> list[BlockKey]:
        block_size = self.registry.block_size
        if not block_size:
            return []
        root = root_key(self.registry.fingerprint, request.tenant, request.cache_salt)
        return chain_keys(root, request.prompt_ids, block_size)
