"""Streams answers from a gateway until a file appears, and says what became of them, as JSON.

Part of try_compose.sh; the standard library alone, since it runs outside of every container.
"""

import argparse
import http.client
import json
import sys
import threading
from collections import Counter
from itertools import count
from pathlib import Path

_TIMEOUT_S = 300.0
# Long enough for a hand-off: a decode worker computes short prompts itself.
_TEXT = "The keeper of the lighthouse counted the ships that passed on their way to the north. "


class Load:
    """``num_threads`` clients, one request after the other each, no two with the same prompt."""

    def __init__(self, port: int, num_threads: int, max_tokens: int, stop_file: Path) -> None:
        self._port = port
        self._max_tokens = max_tokens
        self._stop_file = stop_file
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(num_threads)]
        self.answers = 0
        self.failures: Counter[str] = Counter()

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _ask_on(self) -> None:
        while not self._stop_file.exists():
            with self._lock:
                number = next(self._numbers)
            try:
                problem = self._ask(number)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                if problem:
                    self.failures[problem] += 1
                else:
                    self.answers += 1

    def _ask(self, number: int) -> str:
        """What was wrong with the answer; nothing for a whole one."""
        body = {
            "prompt": f"Night {number} of {number * 7}. " + _TEXT * 4,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != http.client.OK:
            return f"status {response.status}: {text[:200]}"
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not events or events.pop() != "[DONE]":
            return "the stream ended before [DONE]"
        chunks = [json.loads(event) for event in events]
        if errors := [chunk["error"]["message"] for chunk in chunks if "error" in chunk]:
            return f"in the stream: {errors[0]}"
        num_tokens = chunks[-1]["usage"]["completion_tokens"]
        return "" if num_tokens == self._max_tokens else f"{num_tokens} tokens in the answer"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("stop_file", type=Path)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16)
    given = parser.parse_args()
    load = Load(given.port, given.threads, given.max_tokens, given.stop_file)
    load.run()
    result = {"answers": load.answers, "failed": load.failures.total(), "why": load.failures}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
