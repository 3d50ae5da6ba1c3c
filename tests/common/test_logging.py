"""Log lines: one a record, escaped, short, and never the reason that a process stops."""

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from common.logging import JsonFormatter, PlainFormatter, about

HOSTILE = "a\r\n\x1b[2J\u202e" + "x" * 1_000_000


def record(message: str, *args: object, **extra: str) -> logging.LogRecord:
    made = logging.LogRecord("baton", logging.INFO, __file__, 1, message, args, None)
    vars(made).update(extra)
    return made


@pytest.mark.parametrize("formatter", [JsonFormatter("gw-1"), PlainFormatter("gw-1")])
@pytest.mark.fault("V22")
def test_hostile_text_is_one_short_escaped_line(formatter: logging.Formatter) -> None:
    line = formatter.format(record("bad id %s", HOSTILE, **about(HOSTILE, "ab" * 16)))
    assert len(line) < 2000
    assert not set(line) & set("\r\n\x1b\u202e")


def test_json_fields() -> None:
    line = json.loads(JsonFormatter("gw-1").format(record("done", **about("r-1", "ab" * 16))))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "process": "gw-1",
        "logger": "baton",
        "message": "done",
        "request_id": "r-1",
        "trace_id": "ab" * 16,
    }


@pytest.mark.parametrize("formatter", [JsonFormatter("gw-1"), PlainFormatter("gw-1")])
def test_tracebacks(formatter: logging.Formatter) -> None:
    made = record("failed")
    try:
        raise ValueError("evil \x1b[2J")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = formatter.format(made)
    assert "ValueError" in line and "\x1b" not in line


@pytest.mark.parametrize("stderr", ["closed", "full"])
@pytest.mark.fault("F38")
def test_a_log_that_cannot_be_written_does_not_stop_the_process(stderr: str) -> None:
    script = """
        import logging
        from common.logging import setup_logging
        setup_logging("w-1", "info")
        for _ in range(1000):
            logging.getLogger("x").error("text " * 20)
        print("alive")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    if stderr == "closed":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, env=os.environ)
    assert done.stdout == b"alive\n"
