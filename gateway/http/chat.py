"""The shapes of /v1/chat/completions."""

from dataclasses import dataclass

from gateway.http.answers import Answer, Choice, Json
from gateway.http.logprobs import chat_logprobs, prompt_logprobs
from gateway.http.schemas import ChatBody
from gateway.request import Completed, Delta
from gateway.spans import CHAT


@dataclass
class ChatAnswer(Answer):
    PREFIX = "chatcmpl-"
    OPERATION = CHAT

    body: ChatBody

    def opening(self) -> list[Json]:
        """The role, once a choice and alone: what measures the first token waits for text."""
        return [
            {
                **self.head_of_chunk(),
                "choices": [
                    {
                        "index": choice.index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
            }
            for choice in self.choices
        ]

    def head_of_chunk(self) -> Json:
        return {**self._common(), "object": "chat.completion.chunk"}

    def chunk(
        self, choice: Choice, delta: Delta, completed: Completed | None, is_first: bool
    ) -> Json:
        shown: Json = {
            "index": choice.index,
            "delta": {"content": delta.text},
            **self._details(delta, completed),
        }
        return {
            **self.head_of_chunk(),
            "choices": [shown],
            **self._of_prompt(choice, delta, is_first),
        }

    def head(self) -> Json:
        choices = []
        for choice in self.choices:
            delta = choice.delta or Delta(0, (), "")
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            details = self._details(delta, choice.completed)
            choices.append({"index": choice.index, "message": message, **details})
        first = self.choices[0]
        of_prompt = self._of_prompt(first, first.delta or Delta(0, (), ""), is_first=True)
        return {**self._common(), "object": "chat.completion", "choices": choices, **of_prompt}

    def _common(self) -> Json:
        return {"id": self.answer_id, "created": self.created, "model": self.model}

    def _details(self, delta: Delta, completed: Completed | None) -> Json:
        details: Json = {
            "logprobs": chat_logprobs(delta.logprobs, self.text_of) if self.body.logprobs else None,
            "finish_reason": None if completed is None else completed.finish_reason.value,
        }
        if completed is not None:
            details["stop_reason"] = self.stop_reason(completed)
        if self.body.return_token_ids:
            details["token_ids"] = list(delta.token_ids)
        return details

    def _of_prompt(self, choice: Choice, delta: Delta, is_first: bool) -> Json:
        """The prompt is the same for all choices and stands beside them."""
        shown: Json = {}
        if self.body.return_token_ids and is_first:
            shown["prompt_token_ids"] = list(choice.request.prompt_ids)
        if delta.prompt_logprobs and self.body.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, self.text_of)
        return shown
