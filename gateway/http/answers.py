"""An answer under way: what has come of each choice, and the numbers of the whole.

The shapes of the two APIs are in gateway/http/completions.py and gateway/http/chat.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from common.types import TokenId
from gateway.http.schemas import Generation
from gateway.request import Completed, Delta, OutputEvent, Request
from gateway.tokenizer import IdTokenizer

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One choice so far. ``held`` is its last delta, which goes out with the reason of the end."""

    index: int
    request: Request
    delta: Delta | None = None
    held: Delta | None = None
    completed: Completed | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    # How much text the chunks had before, for text offsets.
    num_chars: int = 0


@dataclass
class Answer(ABC):
    """``events`` come in as the pipeline gives them. A stream asks for `chunks`, anyone else takes
    everything in and asks for `whole`."""

    # How its ids begin, and what spans call it.
    PREFIX: ClassVar[str]
    OPERATION: ClassVar[str]

    answer_id: str
    model: str
    created: int
    body: Generation
    tokenizer: IdTokenizer
    choices: list[Choice] = field(default_factory=list)

    # ------------------------------------------------------------ streamed

    def opening(self) -> list[Json]:
        """Chunks before anything has come."""
        return []

    def chunks(self, index: int, event: OutputEvent) -> list[Json]:
        choice = self.choices[index]
        if isinstance(event, Delta):
            choice.num_tokens += len(event.token_ids)
            if event.last:
                choice.held = event
                return []
            return [self._chunk(choice, event, None)]
        choice.completed = event
        return [self._chunk(choice, choice.held or Delta(choice.num_tokens, (), ""), event)]

    def closing(self) -> list[Json]:
        """Chunks behind everything."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self.head_of_chunk(), "choices": [], "usage": self.usage(), **self._metrics()}]

    def _chunk(self, choice: Choice, delta: Delta, completed: Completed | None) -> Json:
        chunk = self.chunk(choice, delta, completed, is_first=choice.num_chunks == 0)
        choice.num_chunks += 1
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        return chunk

    @abstractmethod
    def head_of_chunk(self) -> Json: ...

    @abstractmethod
    def chunk(
        self, choice: Choice, delta: Delta, completed: Completed | None, is_first: bool
    ) -> Json: ...

    # ------------------------------------------------------------ whole

    def take(self, index: int, event: OutputEvent) -> None:
        choice = self.choices[index]
        if isinstance(event, Completed):
            choice.completed = event
        else:
            choice.num_tokens += len(event.token_ids)
            choice.delta = event if choice.delta is None else choice.delta + event

    def whole(self) -> Json:
        return {**self.head(), "usage": self.usage(), **self._metrics()}

    @abstractmethod
    def head(self) -> Json:
        """Everything but the numbers."""

    # ------------------------------------------------------------ numbers

    def usage(self) -> Json:
        """Each prompt counts once, however many choices it has."""
        prompts = [choice for choice in self.choices if choice.request.choice == 0]
        prompt_tokens = sum(len(choice.request.prompt_ids) for choice in prompts)
        output_tokens = sum(choice.num_tokens for choice in self.choices)
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }
        done = [choice.completed.usage for choice in prompts if choice.completed is not None]
        if len(done) == len(prompts):
            cached_tokens = sum(u.cached_tokens for u in done)
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage

    def _metrics(self) -> Json:
        """Times of an answer of one choice, by vLLM's names."""
        completed = self.choices[0].completed
        if completed is None or len(self.choices) > 1:
            return {}
        phases, num_tokens = completed.phases_ms, completed.usage.output_tokens
        generation_ms = max(0.0, phases.total - phases.time_to_first_token)
        metrics = {
            "time_to_first_token_ms": round(phases.time_to_first_token, 3),
            "generation_time_ms": round(generation_ms, 3),
            "queue_time_ms": round(phases.queue + phases.prefill_queue + phases.decode_queue, 3),
        }
        if num_tokens > 1 and generation_ms > 0:
            metrics["mean_itl_ms"] = round(generation_ms / (num_tokens - 1), 3)
            metrics["tokens_per_second"] = round(1000 * num_tokens / phases.total, 3)
        return {"metrics": metrics}

    # ------------------------------------------------------------ text

    def text_of(self, token_id: TokenId) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def text_of_ids(self, token_ids: Sequence[TokenId]) -> str:
        """Empty for models that have no text."""
        return "" if self.tokenizer.entry is None else self.tokenizer.decode(token_ids)

    def stop_reason(self, completed: Completed) -> str | int | None:
        """The client's own stop string or token that ended it; null for the model's own end."""
        if completed.matched_token_id in (self.body.stop_token_ids or ()):
            return completed.matched_token_id
        return completed.matched_string


def choices_of(requests: Sequence[Request]) -> list[Choice]:
    return [Choice(index, request) for index, request in enumerate(requests)]
