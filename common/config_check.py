"""What is wrong with settings, in the words of who gave them."""

import ctypes
import difflib
import os
import re
from collections.abc import Collection, Iterable
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.errors import ConfigError

PREFIX = "BATON_"
# Read where they are used; no settings.
_OTHER_VARIABLES = frozenset(
    {
        "BATON_ADDRESS",
        "BATON_API_KEY",
        "BATON_CACHE",
        "BATON_CLIENT_CA_FILE",
        "BATON_CONFIG",
    }
)
# What Kubernetes puts into a pod for a service called baton-...
_SERVICE_LINK = re.compile(r"BATON_\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")

_WANTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_pattern_mismatch": "like {pattern}",
}


def check_names(names: Iterable[Any], settings: Collection[str]) -> None:
    """Raises ConfigError for the first of ``names`` that is none of ``settings``."""
    for name in names:
        if name not in settings:
            similar = difflib.get_close_matches(str(name), settings, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise ConfigError(str(name), f"is no setting{hint}")


def check_environment(settings: Collection[str]) -> None:
    """The same for the variables that look like ours."""
    known = {PREFIX + name.upper() for name in settings} | _OTHER_VARIABLES
    ours = sorted(name for name in os.environ if name.startswith(PREFIX))
    check_names([name for name in ours if not _is_service_link(name)], known)


def explain(error: ValidationError) -> ConfigError:
    """The first thing that pydantic found wrong."""
    first = error.errors()[0]
    return ConfigError(str(first["loc"][0]) if first["loc"] else error.title, _reason(first))


def yaml_reason(error: yaml.YAMLError) -> str:
    """In which line, and what."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "is not YAML"
    return problem if mark is None else f"line {mark.line + 1}: {problem}"


def _is_service_link(name: str) -> bool:
    is_address = os.environ[name].startswith(("tcp://", "udp://", "sctp://"))
    return is_address or _SERVICE_LINK.fullmatch(name) is not None


def _reason(error: ErrorDetails) -> str:
    wanted = _WANTED.get(error["type"])
    if wanted is None:
        return error["msg"].removeprefix("Value error, ")
    return f"must be {wanted.format(**error.get('ctx', {}))}, not {error['input']!r}"


def has_nvidia_driver() -> bool:
    """Whether this process could load it; says nothing of torch, which is not imported for this."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
