"""The shapes of /v1/completions."""

from dataclasses import dataclass

from gateway.http.answers import Answer, Choice, Json
from gateway.http.logprobs import completion_logprobs, prompt_logprobs
from gateway.http.schemas import CompletionBody
from gateway.request import Completed, Delta
from gateway.spans import TEXT_COMPLETION


@dataclass
class CompletionAnswer(Answer):
    PREFIX = "cmpl-"
    OPERATION = TEXT_COMPLETION

    body: CompletionBody

    def head_of_chunk(self) -> Json:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def chunk(
        self, choice: Choice, delta: Delta, completed: Completed | None, is_first: bool
    ) -> Json:
        return {
            **self.head_of_chunk(),
            "choices": [self._choice(choice, delta, completed, is_first)],
        }

    def head(self) -> Json:
        choices = []
        for choice in self.choices:
            delta = choice.delta or Delta(0, (), "")
            choices.append(self._choice(choice, delta, choice.completed, is_first=True))
        return {**self.head_of_chunk(), "choices": choices}

    def _choice(
        self, choice: Choice, delta: Delta, completed: Completed | None, is_first: bool
    ) -> Json:
        echoes = bool(self.body.echo) and is_first
        text = (self._prompt_text(choice) if echoes else "") + delta.text
        shown: Json = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, delta, echoes),
            "finish_reason": None,
            "stop_reason": None,
        }
        choice.num_chars += len(text)
        if delta.prompt_logprobs and self.body.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, self.text_of)
        if self.body.return_token_ids:
            shown["token_ids"] = list(delta.token_ids)
            if is_first:
                shown["prompt_token_ids"] = list(choice.request.prompt_ids)
        if completed is not None:
            shown["finish_reason"] = completed.finish_reason.value
            shown["stop_reason"] = self.stop_reason(completed)
        return shown

    def _prompt_text(self, choice: Choice) -> str:
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return prompt
        prompt_index = choice.index // max(1, self.body.n or 1)
        one = prompt[prompt_index] if not isinstance(prompt[0], int) else prompt
        if isinstance(one, str):
            return one
        return self.text_of_ids(choice.request.prompt_ids)

    def _logprobs(self, choice: Choice, delta: Delta, echoes: bool) -> Json | None:
        if self.body.logprobs is None:
            return None
        before = delta.prompt_logprobs if echoes else ()
        return completion_logprobs((*before, *delta.logprobs), self.text_of, choice.num_chars)
