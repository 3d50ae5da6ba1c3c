"""Text to token ids, without torch and without transformers.

`tokenizers` holds the GIL while it encodes, even in a thread; its async methods do not stall the
event loop. Two texts are encoded at a time, and a text that cannot fit the model's context is
refused by its length in bytes before any of it is tokenised.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from common.errors import InvalidRequest, ModelError
from common.types import TokenId
from gateway.chat_template import ChatMessage, ChatTemplate, SpecialToken
from gateway.detokenizer import Detokenizer
from gateway.model_entry import ModelEntry, read_model_entry

_MAX_CONCURRENT_ENCODES = 2
# Models that have no text: requests and answers are token ids.
ID_MODELS = ("oracle", "null")


class IdTokenizer:
    """Stands in where the model has no text: refuses any, and every token's text is empty."""

    entry: ModelEntry | None = None
    has_chat_template = False

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[TokenId]:
        raise InvalidRequest("text", "this model has no tokenizer; send token_ids")

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[TokenId]:
        raise InvalidRequest("chat", "this model has no chat template and no text; send token_ids")

    def decode(self, token_ids: Sequence[TokenId], *, skip_special_tokens: bool = False) -> str:
        raise InvalidRequest("tokens", "this model has no tokenizer")

    def token_text(self, token_id: TokenId) -> str:
        """One token by itself, as logprobs name it; never the same for two where there is no text
        to show."""
        return f"token_id:{token_id}"

    def detokenizer(
        self,
        *,
        prompt_ids: Sequence[TokenId] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> Detokenizer:
        if stop:
            raise InvalidRequest("stop", "this model has no text; use stop_token_ids")
        return Detokenizer(None)


class Tokenizer(IdTokenizer):
    """The tokenizer and chat template of one prepared model entry."""

    def __init__(
        self, directory: Path, max_model_len: int | None = None, quantization: str = "none"
    ) -> None:
        """Raises ModelError when the entry has no usable tokenizer."""
        entry = read_model_entry(directory, quantization)
        self.entry = entry
        self._max_model_len = max_model_len or entry.max_model_len
        self._path = directory / "tokenizer.json"
        self._parsing = _build(_read_source(self._path))
        self._literal: tokenizers.Tokenizer | None = None
        self._continuing: tokenizers.Tokenizer | None = None
        self.max_token_bytes = _max_token_bytes(self._parsing)
        self._template = _read_template(directory, self._parsing, entry)
        self.has_chat_template = self._template is not None
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_ENCODES)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[TokenId]:
        """``add_special_tokens``: BOS and the like, where the tokenizer writes them by itself.
        ``parse_special_tokens``: a special token that the text spells becomes one."""
        self._refuse_if_too_long("text", text)
        tokenizer = self._parsing if parse_special_tokens else self._literal_tokenizer()
        async with self._slots:
            encoding = await tokenizer.async_encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[TokenId]:
        """Ids of a conversation in the model's chat template, which writes BOS itself. Special
        tokens are the template's only; in a message they stay text."""
        if self._template is None:
            raise InvalidRequest("chat", "this model has no chat template; send text")
        for index, message in enumerate(messages):
            self._refuse_if_too_long(f"messages[{index}].content", message.content)
        chat = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        self._refuse_if_too_long("messages", chat.text)
        if chat.pieces is None:
            return await self.encode(chat.text, add_special_tokens=False)
        return await self._encode_pieces(chat.pieces)

    def decode(self, token_ids: Sequence[TokenId], *, skip_special_tokens: bool = False) -> str:
        return self._parsing.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: TokenId) -> str:
        return self.decode([token_id])

    def detokenizer(
        self,
        *,
        prompt_ids: Sequence[TokenId] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> Detokenizer:
        return Detokenizer(
            self._parsing,
            prompt_ids=prompt_ids,
            stop=stop,
            include_stop_str_in_output=include_stop_str_in_output,
            skip_special_tokens=skip_special_tokens,
            min_tokens=min_tokens,
        )

    async def _encode_pieces(self, pieces: Sequence[str | TokenId]) -> list[TokenId]:
        """What encoding the joined pieces would give, but for what is special in the texts."""
        ids: list[TokenId] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
                continue
            tokenizer = self._continuing_tokenizer() if index else self._literal_tokenizer()
            async with self._slots:
                encoding = await tokenizer.async_encode(piece, add_special_tokens=False)
            ids.extend(encoding.ids)
        return ids

    def _refuse_if_too_long(self, field: str, text: str) -> None:
        limit = self._max_model_len * self.max_token_bytes
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(field, "is not valid Unicode") from None
        if size > limit:
            raise InvalidRequest(
                field,
                f"{size} bytes can never fit the context of {self._max_model_len} tokens"
                f" (at most {limit} bytes)",
            )

    def _literal_tokenizer(self) -> tokenizers.Tokenizer:
        """Takes spelled special tokens as text. Built when first needed: 22 MB for SmolLM2."""
        if self._literal is None:
            self._literal = _build(_read_source(self._path))
            self._literal.encode_special_tokens = True
        return self._literal

    def _continuing_tokenizer(self) -> tokenizers.Tokenizer:
        """A literal tokenizer for text that stands behind something: sentencepiece-like tokenizers
        put a space in front of the first text only."""
        if self._continuing is None:
            source = _read_source(self._path)
            changed = _without_first_space(source)
            if changed == source:
                self._continuing = self._literal_tokenizer()
            else:
                self._continuing = _build(changed)
                self._continuing.encode_special_tokens = True
        return self._continuing


def load_tokenizer(
    model: str, max_model_len: int | None = None, quantization: str = "none"
) -> IdTokenizer:
    """The tokenizer of what ``--model`` names: a prepared entry, `oracle` or `null`."""
    if model in ID_MODELS:
        return IdTokenizer()
    return Tokenizer(Path(model), max_model_len, quantization)


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError("model", f"cannot read {path.name}: {error}") from None


def _build(source: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError("model", f"tokenizer.json cannot be used: {error}") from error
    # A prompt is never cut or padded behind the user's back.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _max_token_bytes(tokenizer: tokenizers.Tokenizer) -> int:
    """Bytes of the longest vocabulary entry. A byte-level vocabulary spells a byte as one
    character."""
    size = len if "ByteLevel" in repr(tokenizer.decoder) else _utf8_length
    return max(map(size, tokenizer.get_vocab()), default=1)


def _utf8_length(text: str) -> int:
    return len(text.encode())


def _without_first_space(source: str) -> str:
    """The same text where nothing is to change."""
    if '"Metaspace"' not in source:
        return source
    tokenizer: dict[str, Any] = json.loads(source)
    part = tokenizer.get("pre_tokenizer") or {}
    steps = [part, *part.get("pretokenizers", ())]
    first = [step for step in steps if step.get("prepend_scheme") == "first"]
    for step in first:
        step["prepend_scheme"] = "never"
    return json.dumps(tokenizer) if first else source


def _read_template(
    directory: Path, tokenizer: tokenizers.Tokenizer, entry: ModelEntry
) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    if not path.exists():
        return None
    special = [
        SpecialToken(token.content, token_id, token.lstrip, token.rstrip)
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    ]
    return ChatTemplate(path.read_text(encoding="utf-8"), special, entry.template_variables)
