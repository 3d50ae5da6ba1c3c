"""Sizes in bytes as people write them: 80GiB, 40GB, 1048576."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo

from common.errors import ConfigError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, setting: str) -> int:
    """Whole bytes. GB is 10^9 and GiB 2^30. Raises ConfigError naming ``setting``."""
    match = _PATTERN.fullmatch(text.strip())
    factors = _BINARY if match and match[3] else _DECIMAL
    factor = factors.get(match[2].upper()) if match else None
    if match is None or factor is None or (num_bytes := int(float(match[1]) * factor)) < 1:
        raise ConfigError(
            setting, f"{text!r} is not a size; write 80GiB, 40GB or a number of bytes"
        )
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """In GiB, or in MiB or KiB below one."""
    for unit in ("G", "M", "K"):
        if num_bytes >= _BINARY[unit]:
            return f"{num_bytes / _BINARY[unit]:,.2f} {unit}iB"
    return f"{num_bytes} B"


def _parsed(value: Any, info: ValidationInfo) -> Any:
    return parse_bytes(value, str(info.field_name)) if isinstance(value, str) else value


SIZE = BeforeValidator(_parsed)
# The type of a setting that is a size.
Bytes = Annotated[int, SIZE]
