"""What is replayed: requests with their arrival, lengths and the prefixes that they share.

Time is counted in *steps*: in one, every running request gets one output token.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Pace at which a trace's milliseconds become steps: 25 tokens a second for each stream.
STEP_MS = 40
# Tokens that one hash id of a trace stands for, as in Mooncake's public traces.
TRACE_SEGMENT_TOKENS = 512
# A longer prompt or output is a broken trace, not a request.
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """``prefix_ids`` name the prompt's first segments of ``Workload.segment_tokens`` tokens each;
    requests with equal ids begin with equal tokens."""

    arrival: int
    num_prompt: int
    num_output: int
    prefix_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output

    @property
    def num_stored(self) -> int:
        """Most slots that it fills. The last output token's keys and values are never computed."""
        return self.num_tokens - 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival. ``num_refused`` more were longer than ``max_len``."""

    name: str
    requests: tuple[Request, ...]
    max_len: int
    num_refused: int
    segment_tokens: int


def read_trace(path: Path, max_len: int | None) -> Workload:
    """A JSON Lines trace: ``input_length`` and ``output_length``, with or without ``timestamp``
    (ms; without it all requests arrive at once) and ``hash_ids`` (one for each 512 tokens of the
    prompt). Without ``max_len``, the power of two that holds the longest request.

    Raises ConfigError naming the line and the field.
    """
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    requests.append(_parse(line, path.name, number))
    except OSError as error:
        raise ConfigError("trace", f"cannot read {path}: {error.strerror}") from None
    if not requests:
        raise ConfigError("trace", f"{path} holds no requests")
    longest = max(request.num_tokens for request in requests)
    return bounded(path.name, requests, max_len or next_power_of_two(longest), TRACE_SEGMENT_TOKENS)


def bounded(name: str, requests: list[Request], max_len: int, segment_tokens: int) -> Workload:
    """The requests that a server of this maximum length accepts. Raises ConfigError for none."""
    accepted = sorted(
        (request for request in requests if request.num_tokens <= max_len),
        key=lambda request: request.arrival,
    )
    if not accepted:
        shortest = min(request.num_tokens for request in requests)
        raise ConfigError("max-len", f"{max_len} is less than the shortest request, {shortest}")
    return Workload(name, tuple(accepted), max_len, len(requests) - len(accepted), segment_tokens)


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _parse(line: bytes, name: str, number: int) -> Request:
    where = f"{name}, line {number}: "
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("trace", f"{where}not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError("trace", f"{where}not a JSON object")
    num_prompt = _length(fields, "input_length", where)
    return Request(
        arrival=_arrival(fields, where),
        num_prompt=num_prompt,
        num_output=_length(fields, "output_length", where),
        prefix_ids=_prefix_ids(fields, num_prompt, where),
    )


def _length(fields: dict[str, Any], field: str, where: str) -> int:
    if field not in fields:
        raise ConfigError("trace", f"{where}{field} is missing")
    value = fields[field]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(
            "trace",
            f"{where}{field} is {_shown(value)}, not a whole number from 1 to {MAX_TOKENS}",
        )
    return int(value)


def _arrival(fields: dict[str, Any], where: str) -> int:
    value = fields.get("timestamp", 0)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < 1e15:
        raise ConfigError("trace", f"{where}timestamp is {_shown(value)}, not milliseconds from 0")
    return math.ceil(float(value) / STEP_MS)


def _prefix_ids(fields: dict[str, Any], num_prompt: int, where: str) -> tuple[int, ...]:
    """Those of whole segments: a prompt's last, partly filled one is not shared."""
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ConfigError("trace", f"{where}hash_ids is {_shown(ids)}, not a list of whole numbers")
    expected = -(-num_prompt // TRACE_SEGMENT_TOKENS)
    if ids and len(ids) != expected:
        raise ConfigError(
            "trace",
            f"{where}{len(ids)} hash_ids, but a prompt of {num_prompt} tokens has {expected} "
            f"segments of {TRACE_SEGMENT_TOKENS}",
        )
    if len(set(ids)) != len(ids):
        raise ConfigError("trace", f"{where}hash_ids names one segment twice")
    return tuple(ids[: num_prompt // TRACE_SEGMENT_TOKENS])


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**18 else "far too large"
    return text if len(text) <= 40 else f"{text[:40]}..."
