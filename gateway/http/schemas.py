"""The bodies of requests. JSON types are taken as they are: a number in quotes is no number.

Every field may be null, which is the same as leaving it out; fields that are not here are kept in
``model_extra`` (see gateway/http/unsupported.py). What values mean and where their limits are is
judged by gateway/parser.py, as for gRPC; here stand only the limits of the wire's own types.
"""

from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from typing_extensions import TypeAliasType

from gateway.http.errors import invalid

MAX_MESSAGES = 1 << 14
MAX_PARTS = 1024
MAX_PROMPTS = 1024
_UINT32 = (1 << 32) - 1

Count = Annotated[int, Field(ge=0, le=_UINT32)]
# Each kind of list ends at the first member that does not fit: a body may hold millions.
Strings = TypeAliasType("Strings", Annotated[list[str], FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[Count], FailFast()])
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
# Negative ones stand for their two's complement.
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)

    model: str | None = None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises InvalidRequest that names the field."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise invalid(error) from None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Body):
    """What completions and chat have in common."""

    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Count | None = None
    min_p: float | None = None
    min_tokens: Count | None = None
    n: Count | None = None
    presence_penalty: float | None = None
    priority: Int32 | None = None
    prompt_logprobs: Count | None = None
    repetition_penalty: float | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    seed: Seed | None = None
    skip_special_tokens: bool | None = None
    speculation: Literal["off"] | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None


Prompts = TypeAliasType(
    "Prompts", Annotated[list[TokenIds], FailFast(), Field(max_length=MAX_PROMPTS)]
)
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast(), Field(max_length=MAX_PROMPTS)])
Prompt = Annotated[str | Texts | TokenIds | Prompts, Field(union_mode="left_to_right")]


class CompletionBody(Generation):
    prompt: Prompt
    echo: bool | None = None
    logprobs: Count | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


Parts = TypeAliasType(
    "Parts", Annotated[list[ContentPart], FailFast(), Field(max_length=MAX_PARTS)]
)


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Parts | None = None


Messages = TypeAliasType(
    "Messages", Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)]
)


class ChatBody(Generation):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Literal[False] | None = None


class TokenizeBody(Body):
    """One of ``prompt`` and ``messages``."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: TokenIds
