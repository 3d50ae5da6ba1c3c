"""Errors as an OpenAI client reads them, and bodies that do not fit their schema as our errors.

::

    {"error": {"message": "top_p: must be ...", "type": "BadRequestError", "param": "top_p",
               "code": 400}}
"""

import math
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from common.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from common.status import is_for_clients

# vLLM's names.
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class HttpError(BatonError):
    """What only HTTP knows: no such path, a body too large or too slow."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_body(error: BatonError) -> dict[str, Any]:
    """What a client may know of ``error``."""
    if not is_for_clients(error) and not isinstance(error, HttpError):
        error = InternalError("internal error")
    status = status_of(error)
    field = error.field if isinstance(error, InvalidRequest | Unsupported) else None
    if isinstance(error, ModelNotFound):
        field = "model"
    kind = _TYPES.get(status, "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": field, "code": status}}


def status_of(error: BatonError) -> int:
    return error.status if isinstance(error, HttpError) else error.http_status


def error_response(error: BatonError) -> JSONResponse:
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
    if status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_of(error), headers)


# Longer than the name of any field that is known.
MAX_NAME_CHARS = 64


def invalid(error: ValidationError) -> InvalidRequest:
    """The first thing that does not fit a schema; nothing of what was sent is in its text."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(
            "body", f"is not JSON ({first['msg'].removeprefix('Invalid JSON: ')})"
        )
    field = ""
    for part in first["loc"]:
        if len(str(part)) > MAX_NAME_CHARS:
            break  # a client's own key
        if isinstance(part, int):
            field += f"[{part}]"
        elif part.islower():  # else how pydantic names the member of a union
            field += f".{part}" if field else part
        if wanted := _UNIONS.get(field.rpartition(".")[2]):
            return InvalidRequest(field, f"must be {wanted}")
    return InvalidRequest(field or "body", first["msg"].replace("Input should", "must"))


# Fields of more than one type; pydantic speaks of one of them only.
_UNIONS = {
    "prompt": "a text, token ids, or a list of at most 1024 of either",
    "stop": "a text or a list of texts",
    "content": "a text or a list of at most 1024 parts",
}
