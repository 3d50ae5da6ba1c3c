"""Drafts without a model: what followed the last words when they came before.

Prompt lookup decoding (Saxena 2023; `ngram` in vLLM): the longest of the last n_max .. n_min tokens
that also stand earlier in prompt or output is looked up, and what followed its latest occurrence is
proposed. ::

    ids     ... a b c d e f ......... x b c          suffix  b c
                  ^^^ ^^^^^                          proposal d e f

The index of a sequence is one dict a length n, from n tokens to the position behind their latest
occurrence. Each new token costs one entry a length, O(n_max - n_min + 1), below 1 us; a look-up
takes as many dict reads. A long prompt is indexed over several steps, so that no step waits for it.
Memory is about 0.2 KB a token and length, next to tens of KB of KV.
"""

from collections.abc import Sequence as Items

from common.types import SequenceId, TokenId
from engine.sequence import Sequence
from engine.speculation.proposer import Ask

# Tokens of one sequence that are indexed within one step: about 1 ms.
_TOKENS_A_STEP = 1024


class NgramIndex:
    """Of one growing list of tokens."""

    def __init__(self, min_length: int, max_length: int) -> None:
        # Longest first, as they are looked up.
        self._tables: list[tuple[int, dict[tuple[TokenId, ...], int]]] = [
            (length, {}) for length in range(max_length, min_length - 1, -1)
        ]
        # Tokens that are known as a continuation.
        self._num_indexed = 0

    def add(self, token_ids: Items[TokenId], limit: int = _TOKENS_A_STEP) -> bool:
        """Takes in what is new of ``token_ids``, at most ``limit`` tokens; whether that was all.
        The last tokens become findable only with the one that follows them, so a suffix never
        finds itself."""
        start = self._num_indexed
        end = min(len(token_ids), start + limit)
        for length, table in self._tables:
            first = max(start, length)
            if first + 1 == end:  # one token more, as most often
                table[tuple(token_ids[first - length : first])] = first
            if first + 1 >= end:
                continue
            columns = (token_ids[first - length + i : end - length + i] for i in range(length))
            table.update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self._num_indexed = end
        return end == len(token_ids)

    def find(self, token_ids: Items[TokenId]) -> int | None:
        """Position behind the latest earlier occurrence of the longest known suffix."""
        num_tokens = len(token_ids)
        for length, table in self._tables:
            if length <= num_tokens:
                position = table.get(tuple(token_ids[num_tokens - length :]))
                if position is not None:
                    return position
        return None


class NgramProposer:
    """``min_length`` and ``max_length`` of the suffix, 1 <= min <= max."""

    name = "ngram"
    is_free = True

    def __init__(self, min_length: int, max_length: int) -> None:
        assert 1 <= min_length <= max_length
        self._min_length = min_length
        self._max_length = max_length
        self._indexes: dict[SequenceId, NgramIndex] = {}
        # Where the proposals of this step begin.
        self._found: dict[SequenceId, int] = {}

    def reach(self, sequence: Sequence, limit: int) -> int:
        seq_id, token_ids = sequence.seq_id, sequence.token_ids
        index = self._indexes.get(seq_id)
        if index is None:
            index = self._indexes[seq_id] = NgramIndex(self._min_length, self._max_length)
        if not index.add(token_ids):
            return 0
        position = index.find(token_ids)
        if position is None:
            return 0
        self._found[seq_id] = position
        return min(limit, len(token_ids) - position)

    def prepare(self, asks: Items[Ask], num_tokens: int) -> list[Ask]:
        return list(asks)

    def propose(self, asks: Items[Ask]) -> list[Items[TokenId]]:
        proposals: list[Items[TokenId]] = []
        for ask in asks:
            start = self._found[ask.sequence.seq_id]
            proposals.append(ask.sequence.token_ids[start : start + ask.num_drafts])
        return proposals

    def forget(self, seq_id: SequenceId) -> None:
        self._indexes.pop(seq_id, None)
        self._found.pop(seq_id, None)
