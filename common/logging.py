"""Log lines on stderr: JSON, one a record, or plain ones for a terminal.

Nothing a client sent can forge a line or reach the terminal: control characters are escaped, and a
line is cut at 1 KB (tracebacks at 16 KB). Prompts, outputs and secrets are never logged. A record
gets its request by ``log.info("...", extra=about(request_id, trace_id))``.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

_MAX_CHARS = 1000
_MAX_TRACEBACK_CHARS = 16_000
_FIELDS = ("request_id", "trace_id")


def about(request_id: str, trace_id: str = "") -> dict[str, str]:
    """The ``extra`` that ties a record to a request."""
    return {"request_id": request_id, "trace_id": trace_id}


def setup_logging(process: str, level: str) -> None:
    """Sends all records of ``level`` and above to stderr, plain where that is a terminal;
    ``process`` names this one in each."""
    plain = sys.stderr is not None and sys.stderr.isatty()
    handler = _Handler(sys.stderr)
    handler.setFormatter(PlainFormatter(process) if plain else JsonFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("uvicorn", "asyncio", "nats"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class _Handler(logging.StreamHandler[TextIO]):
    """A log that cannot be written (disk full, stderr closed) is dropped; the service goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _cut(record.getMessage(), _MAX_CHARS),
        }
        line |= _fields_of(record)
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = _traceback_of(record)
        # ASCII: control characters, bidi marks and broken surrogates all become \\u escapes.
        return json.dumps(line, ensure_ascii=True)


class PlainFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={_escaped(v)}" for key, v in _fields_of(record).items())
        message = _escaped(_cut(record.getMessage(), _MAX_CHARS))
        line = f"{time} {record.levelname.lower():7} {self._process} {message}{fields}"
        if record.exc_info and record.exc_info[0] is not None:
            rows = _traceback_of(record).rstrip().split("\n")
            line += "".join(f"\n  {_escaped(row)}" for row in rows)
        return line


def _fields_of(record: logging.LogRecord) -> dict[str, str]:
    values = {key: getattr(record, key, "") for key in _FIELDS}
    return {key: _cut(str(value), 128) for key, value in values.items() if value}


def _traceback_of(record: logging.LogRecord) -> str:
    assert record.exc_info
    return _cut("".join(traceback.format_exception(*record.exc_info)), _MAX_TRACEBACK_CHARS)


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
