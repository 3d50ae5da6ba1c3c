"""Fields that clients know and Baton does not do: refused by name unless they ask for nothing.

What nobody knows is accepted and ignored, as OpenAI's clients expect of a server.
"""

from collections.abc import Mapping
from typing import Any

from common.errors import Unsupported
from gateway.http.errors import MAX_NAME_CHARS

# Field: the values, beside null, with which it asks for nothing.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
_PREFIX = "guided_"
# The same for the fields of a chat message.
_OF_MESSAGES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def refuse_unsupported(extra: Mapping[str, Any], n: int) -> None:
    """``extra``: the fields of a body that no schema has. Raises Unsupported."""
    for name, value in extra.items():
        if name.startswith(_PREFIX) or name in _DEFAULTS:
            _refuse(name[:MAX_NAME_CHARS], value, _DEFAULTS.get(name, ()))
    _refuse("best_of", extra.get("best_of"), (n,))


def refuse_in_message(index: int, extra: Mapping[str, Any]) -> None:
    for name in extra.keys() & _OF_MESSAGES.keys():
        _refuse(f"messages[{index}].{name}", extra[name], _OF_MESSAGES[name])


def _refuse(field: str, value: Any, defaults: tuple[Any, ...]) -> None:
    if value is not None and value not in defaults:
        raise Unsupported(field, "is not supported; leave it out")
