"""How the prompts under way share what the decodes of a step leave.

The oldest prompt makes haste: it may take three quarters. The others, and those that start in this
step, are sure of the last quarter, in equal parts as far as they want them, so that a short prompt
need not wait until a long one is through. What nobody claims goes to the oldest first::

    budget  |------------------------------------------|--------------|
             oldest: up to 3/4, and all that is over     the others: up to 1/4

At most ``max_partial`` prompts are under way at once, that is started and not finished; one that
finishes within the step does not count. With 1 they go strictly one after the other.
"""

_YOUNGER_PART = 4


class PrefillBudget:
    """Of one step with ``num_tokens``. Prompts ``join`` in the order of age, those under way first,
    then those that start as long as `admits` says so; then `split`."""

    def __init__(self, num_tokens: int, max_partial: int, in_chunks: bool) -> None:
        self._num_tokens = num_tokens
        self._max_partial = max_partial
        self._in_chunks = in_chunks
        self._wanted: list[int] = []
        self._sure: list[int] = []
        self._num_open = num_tokens
        self._num_partial = 0
        if max_partial > 1:
            reserve = max(1, num_tokens // _YOUNGER_PART) if num_tokens > 1 else 0
            self._oldest_part = num_tokens - reserve
            self._younger_part = max(1, reserve // (max_partial - 1))
        else:
            self._oldest_part = self._younger_part = num_tokens

    def admits(self, num_tokens: int) -> bool:
        """Whether another prompt with this much to compute could start in this step."""
        if not self._in_chunks:
            return num_tokens <= self._num_open
        return self._num_open > 0 and self._num_partial < self._max_partial

    def join(self, num_tokens: int) -> None:
        part = num_tokens
        if self._in_chunks:
            most = self._younger_part if self._wanted else self._oldest_part
            part = min(num_tokens, most, self._num_open)
        self._wanted.append(num_tokens)
        self._sure.append(part)
        self._num_open -= part
        self._num_partial += part < num_tokens

    def split(self) -> list[int]:
        """Tokens for each that joined; together never more than the budget."""
        parts = []
        for wanted, sure in zip(self._wanted, self._sure, strict=True):
            more = min(wanted - sure, self._num_open)
            self._num_open -= more
            parts.append(sure + more)
        return parts
