"""From a GenerateRequest to Requests that cannot be wrong: the one place where input is judged."""

import asyncio
import dataclasses
import uuid

from common.config import GatewaySettings
from common.errors import InvalidRequest
from common.types import TokenId
from common.wire import inference
from gateway.chat_template import ChatMessage
from gateway.model_facts import ModelFacts, model_facts
from gateway.registry import WorkerRegistry
from gateway.request import Request
from gateway.sampling import check_token_ids, sampling_params, stop_strings
from gateway.tokenizer import IdTokenizer

MAX_ID_BYTES = 128
MAX_SALT_BYTES = 256
_SEED_MASK = (1 << 64) - 1


class RequestParser:
    """Stateless but for what it reads: settings, the registry and the tokenizer."""

    def __init__(
        self, settings: GatewaySettings, registry: WorkerRegistry, tokenizer: IdTokenizer
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._tokenizer = tokenizer

    async def prompt_ids(self, message: inference.GenerateRequest) -> list[TokenId]:
        """The tokens of a message's prompt, as `parse` has them."""
        facts = self.facts()
        return list(check_token_ids("prompt", await self._prompt_ids(message, facts), facts))

    def facts(self) -> ModelFacts:
        return model_facts(self._tokenizer.entry, self._registry, self._settings.max_model_len)

    async def parse(
        self,
        message: inference.GenerateRequest,
        time_remaining_s: float | None,
        tenant: str = "",
    ) -> list[Request]:
        """One Request a choice; choice i has seed + i. Raises InvalidRequest and Unavailable."""
        facts = self.facts()
        _check_length("request_id", message.request_id, MAX_ID_BYTES)
        _check_length("cache_salt", message.cache_salt, MAX_SALT_BYTES)
        num_choices = message.n if message.HasField("n") else 1
        if not 1 <= num_choices <= self._settings.max_n:
            raise InvalidRequest("n", f"must be 1 to {self._settings.max_n}")
        stop = stop_strings(message.sampling)
        sampling_params(message.sampling, facts, None, self._settings.max_logprobs)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        prompt_ids = check_token_ids("prompt", await self._prompt_ids(message, facts), facts)
        tokenize_ms = (loop.time() - began_s) * 1000
        if not prompt_ids:
            raise InvalidRequest("prompt", "is empty; send at least one token")
        params = sampling_params(
            message.sampling, facts, len(prompt_ids), self._settings.max_logprobs
        )
        limit_s = self._settings.request_timeout_s
        sampling = message.sampling
        first = Request(
            request_id=uuid.uuid4().hex,
            client_request_id=message.request_id,
            prompt_ids=prompt_ids,
            params=params,
            timeout_s=limit_s if time_remaining_s is None else min(limit_s, time_remaining_s),
            stop=stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=(
                sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
            ),
            tenant=tenant,
            cache_salt=message.cache_salt,
            priority=message.priority,
            speculate=message.speculation != inference.SPECULATION_OFF,
            tokenize_ms=tokenize_ms,
        )
        return [first, *(_choice(first, i) for i in range(1, num_choices))]

    async def _prompt_ids(
        self, message: inference.GenerateRequest, facts: ModelFacts
    ) -> list[TokenId]:
        """Counts before it looks: a message of 16 MiB has millions of ids or chat messages, and the
        event loop of all streams stands still while Python objects are made of them."""
        kind = message.WhichOneof("input")
        limit, bound = facts.bound(facts.largest_pool_tokens)
        if kind == "token_ids":
            if len(message.token_ids.ids) > limit:
                raise InvalidRequest(
                    "prompt",
                    f"has {len(message.token_ids.ids)} tokens; {bound} has room for {limit}",
                )
            return list(message.token_ids.ids)
        if kind == "text":
            add = message.add_special_tokens if message.HasField("add_special_tokens") else True
            parse = (
                message.parse_special_tokens if message.HasField("parse_special_tokens") else True
            )
            return await self._tokenizer.encode(
                message.text, add_special_tokens=add, parse_special_tokens=parse
            )
        if kind == "chat":
            chat = message.chat
            if len(chat.messages) > limit:  # each takes a token at least
                raise InvalidRequest(
                    "messages",
                    f"{len(chat.messages)} can never fit {bound} of {limit} tokens",
                )
            return await self._tokenizer.encode_chat(
                [ChatMessage(entry.role, entry.content) for entry in chat.messages],
                add_generation_prompt=(
                    chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
                ),
                continue_final_message=chat.continue_final_message,
            )
        raise InvalidRequest("input", "is missing; send text, token_ids or chat")


def _choice(first: Request, index: int) -> Request:
    params = dataclasses.replace(first.params, seed=(first.params.seed + index) & _SEED_MASK)
    return dataclasses.replace(first, request_id=uuid.uuid4().hex, params=params, choice=index)


def _check_length(field: str, text: str, limit: int) -> None:
    if len(text.encode()) > limit:
        raise InvalidRequest(field, f"must have at most {limit} bytes")
