"""A model's chat template: messages to one text whose special tokens are the template's alone.

Templates come with the model and are untrusted code: they run in jinja2's sandbox, in the
environment that transformers gives them. Messages come from users: where one spells a special
token, that stays text. So

1. in each message, special tokens that it spells are broken up by a *mark*, a private-use
   character that occurs nowhere in the input; so are ends that the text around the message could
   complete to one;
2. the template is rendered;
3. special tokens are cut out of what it wrote, and then the marks are removed.

An ordinary message needs no mark and renders exactly as in transformers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, ModelError, Unsupported

ROLES = frozenset({"system", "developer", "user", "assistant"})
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token of the vocabulary; ``lstrip`` and ``rstrip`` swallow white space there."""

    content: str
    token_id: int
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """``text`` as the template wrote it; ``pieces`` the same cut into texts in which nothing is
    special, and ids of the template's special tokens. ``pieces`` is None when no message spells a
    special token: then ``text`` can be encoded as a whole."""

    text: str
    pieces: tuple[str | int, ...] | None


class ChatTemplate:
    """Compiled once. ``variables`` are what templates expect beside messages (bos_token ...)."""

    def __init__(
        self, source: str, special_tokens: Sequence[SpecialToken], variables: Mapping[str, str]
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError("chat_template", f"does not compile: {error}") from None
        self._source = source
        self._variables = dict(variables)
        self._tokens = sorted(special_tokens, key=lambda token: -len(token.content))
        contents = [token.content for token in self._tokens]
        self._heads = tuple({c[:i] for c in contents for i in range(1, len(c))})
        self._tails = tuple({c[i:] for c in contents for i in range(1, len(c))})

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """Raises InvalidRequest for messages that this template refuses."""
        _check(messages, add_generation_prompt, continue_final_message)
        mark, tag = _unused_characters([self._source, *(m.content for m in messages)])
        chat = [{"role": m.role, "content": self._marked(m.content, mark)} for m in messages]
        if continue_final_message:
            chat[-1]["content"] += f"{tag} "
        text = self._run(chat, add_generation_prompt)
        if continue_final_message:
            text = _cut_at(text, tag)
        if mark not in text:
            return RenderedChat(text, None)
        return RenderedChat(text.replace(mark, ""), tuple(self._pieces(text, mark)))

    def _run(self, chat: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=chat, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from None

    def _marked(self, content: str, mark: str) -> str:
        """Puts a mark behind each character of a spelled token, and at ends that could grow into
        one."""
        spelled = [re.escape(t.content) for t in self._tokens if t.content in content]
        if spelled:
            content = re.sub(
                "|".join(spelled),
                lambda match: "".join(char + mark for char in match[0]),
                content,
            )
        # The marks stand within the white space around, which templates may trim.
        core = content.strip()
        inside = core and any(core in token.content for token in self._tokens)
        if inside or core.startswith(self._tails) or content.startswith(self._tails):
            content = content.replace(core, mark + core, 1)
        if core.endswith(self._heads) or content.endswith(self._heads):
            before, _, after = content.rpartition(core)
            content = before + core + mark + after
        return content

    def _pieces(self, text: str, mark: str) -> Iterator[str | int]:
        """Cuts at special tokens, which a mark keeps from being found."""
        present = [token for token in self._tokens if token.content in text]
        pattern = re.compile("|".join(_searched(token, mark) for token in present) or r"(?!)")
        position = 0
        for match in pattern.finditer(text):
            if before := text[position : match.start()].replace(mark, ""):
                yield before
            assert match.lastindex is not None
            yield present[match.lastindex - 1].token_id
            position = match.end()
        if rest := text[position:].replace(mark, ""):
            yield rest


def _check(
    messages: Sequence[ChatMessage], add_generation_prompt: bool, continue_final_message: bool
) -> None:
    if not messages:
        raise InvalidRequest("messages", "at least one is needed")
    for index, message in enumerate(messages):
        if message.role in ("tool", "function"):
            raise Unsupported(f"messages[{index}].role", "tools are not supported")
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role", f"must be one of {', '.join(sorted(ROLES))}"
            )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message", "cannot be used together with add_generation_prompt"
        )


def _cut_at(text: str, tag: str) -> str:
    """``text`` up to the end of the final message, so that the model goes on with it. A tag without
    the space that was sent with it tells that the template trims messages (as transformers has
    it)."""
    position = text.rfind(tag)
    if position < 0:
        raise InvalidRequest(
            "continue_final_message", "the model's chat template leaves the final message out"
        )
    trimmed = text[position + len(tag) :][:1] != " "
    return text[:position].rstrip() if trimmed else text[:position]


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    taken = {char for text in texts for char in set(text) if ord(char) in _PRIVATE_USE}
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
    try:
        return next(free), next(free)
    except StopIteration:
        raise InvalidRequest("messages", "too many different private-use characters") from None


def _searched(token: SpecialToken, mark: str) -> str:
    before = r"\s*" if token.lstrip else ""
    after = r"\s*" if token.rstrip else ""
    # A token of one character cannot be broken up: there the mark behind it tells.
    unmarked = f"(?!{mark})" if len(token.content) == 1 else ""
    return f"{before}({re.escape(token.content)}){unmarked}{after}"


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a chat template (utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this one escapes no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
