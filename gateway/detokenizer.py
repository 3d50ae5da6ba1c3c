"""Token ids to text, one request at a time, with stop strings.

The life of a token's text:

1. ``push`` feeds the token to a `DecodeStream`, which keeps it while it ends inside a character.
2. Decoded text is looked through for stop strings; a match ends the output, wherever in a token it
   lies: at the first character that completes any of them.
3. Text that may still become a stop string (the longest suffix that is the beginning of one) is
   held back; the rest is released.
4. ``finish`` releases what is held. A character whose last bytes never came is dropped.

The text is a function of the token ids alone, however they were grouped into pushes. The state
belongs to the gateway, so a request that moves to another worker simply goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from common.types import TokenId

_REPLACEMENT = "\ufffd"
# A character has at most four bytes and a token at least one: this many tokens without text are
# special ones or bytes that are no UTF-8 at all.
_MAX_PENDING = 16
# How far back a stream looks for tokens to join new ones to (vLLM's detokenizer starts at 4).
_MIN_CONTEXT = 4
_MAX_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a push released. ``num_tokens``: how many of the pushed tokens belong to the output;
    all of them, unless ``stop`` was completed by one before the last."""

    text: str
    num_tokens: int
    stop: str | None = None


class Detokenizer:
    """Incremental text of one sequence.

    ``prompt_ids`` only tells how the first output token joins what stood before it. Within the
    first ``min_tokens`` tokens stop strings are not looked for. Without a tokenizer (models that
    speak in ids alone) every token's text is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        prompt_ids: Sequence[TokenId] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = _StopStrings(stop, include_stop_str_in_output)
        self._skip_special = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending: list[TokenId] = []
        self._context = self._start_context(prompt_ids)
        self._stream = self._new_stream()

    def push(self, token_ids: Sequence[TokenId]) -> TextDelta:
        """Adds tokens. After a stop string nothing more is taken."""
        released: list[str] = []
        used = 0
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            used += 1
            self._num_tokens += 1
            text = self._decode(token_id)
            released.append(self._stops.push(text, look=self._num_tokens > self._min_tokens))
        return TextDelta("".join(released), used, self._stops.matched)

    def finish(self) -> str:
        """The text held back, when no more tokens come."""
        if self._stops.matched is not None:
            return ""
        rest = self._pending_text().rstrip(_REPLACEMENT)
        self._pending.clear()
        text = self._stops.push(rest, look=self._num_tokens > self._min_tokens)
        held, self._stops.held = self._stops.held, ""
        return text + held

    def _decode(self, token_id: TokenId) -> str:
        """Text that ``token_id`` completes; empty while a character is unfinished."""
        if self._tokenizer is None:
            return ""
        self._pending.append(token_id)
        text = self._step(self._tokenizer, token_id)
        if text is None:
            if len(self._pending) < _MAX_PENDING:
                return ""
            text = self._pending_text()
            self._context = self._joinable([*self._context, *self._pending])
            self._stream = self._new_stream()
        else:
            self._context = self._pending
        self._pending = []
        return text

    def _step(self, tokenizer: Tokenizer, token_id: TokenId) -> str | None:
        try:
            return self._stream.step(tokenizer, token_id)
        except Exception as error:
            # The library raises a bare Exception when bytes that are no UTF-8 change text that it
            # has already given out; vLLM, too, starts afresh behind that text.
            if "Invalid prefix" not in str(error):
                raise
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        return self._stream.step(tokenizer, token_id)

    def _pending_text(self) -> str:
        if self._tokenizer is None or not self._pending:
            return ""
        before = self._text(self._context)
        return self._text([*self._context, *self._pending])[len(before) :]

    def _text(self, token_ids: Sequence[TokenId]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=list(self._context), skip_special_tokens=self._skip_special)

    def _start_context(self, prompt_ids: Sequence[TokenId]) -> list[TokenId]:
        return [] if self._tokenizer is None else self._joinable(prompt_ids)

    def _joinable(self, token_ids: Sequence[TokenId]) -> list[TokenId]:
        """The shortest good tail of ``token_ids`` that ends between characters, or nothing."""
        for length in range(min(_MIN_CONTEXT, len(token_ids)), _MAX_CONTEXT + 1):
            tail = list(token_ids[-length:]) if length else []
            text = self._text(tail)
            if text and not text.endswith(_REPLACEMENT):
                return tail
            if length >= len(token_ids):
                break
        return []


class _Beginning:
    """How much of one stop string the text ends with. Looks at each character once, whatever is
    held back (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = 0
        # By length matched: the next shorter beginning that ends there too.
        self._shorter = [0] * (len(stop) + 1)
        for end in range(1, len(stop)):
            self._shorter[end + 1] = self.take(stop[end])
        self.length = 0

    def take(self, text: str) -> int:
        """The new length; ``text`` must not complete the string."""
        stop, length = self._stop, self.length
        for char in text:
            while length and stop[length] != char:
                length = self._shorter[length]
            length += stop[length] == char
        self.length = length
        return length


class _StopStrings:
    """Looks for stop strings in text that comes in pieces and holds back what may become one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = [stop for stop in stops if stop]
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._include = include
        self.held = ""
        self.matched: str | None = None

    def push(self, text: str, look: bool) -> str:
        """What may be shown. ``look`` False: this text takes part in no stop string."""
        if not self._stops or not look:
            held, self.held = self.held, ""
            for beginning in self._beginnings:
                beginning.length = 0
            return held + text
        new, text = text, self.held + text
        match = self._first_match(text)
        if match is not None:
            end, start, self.matched = match
            self.held = ""
            return text[: end if self._include else start]
        shown = len(text) - max(beginning.take(new) for beginning in self._beginnings)
        self.held = text[shown:]
        return text[:shown]

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """The stop string completed by the earliest character; of several, the longest."""
        starts = ((text.find(stop), stop) for stop in self._stops)
        return min(
            ((start + len(stop), start, stop) for start, stop in starts if start >= 0), default=None
        )
