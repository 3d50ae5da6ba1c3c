"""How many tokens the HTTP front streams, without a model. Prints JSON.

``python -m bench.http [--streams 64] [--tokens 400] [--rounds 3]``

`baton up --model null` (1 prefill worker, 1 decode worker, a gateway and nats-server, each a
process), steps of 1/170 s. This process is the client: plain sockets that take what comes and look
at the last event only, since an SSE parser costs more than what is measured. The rate counts from
the first request to the end of the last answer. The median of some rounds.

Then a gateway with 5 prefill and 5 decode workers is asked for ``/metrics``, 50 times.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import urllib.request
from typing import Any

import uvloop

from bench.bounds import at_least, at_most
from cli.bench.report import rounded
from cli.bench.setup import baton

STEPS_PER_S = 170
PROMPT_TOKENS = 64
BOUND = 5000
METRICS_BOUND_MS, NUM_SCRAPES = 20, 50
_END = b"data: [DONE]\n\n"
# The usage, which comes before the end, is within these bytes of it.
_TAIL_BYTES = 4096


async def stream(host: str, port: int, prompt: list[int], max_tokens: int) -> int:
    """One completion over a connection of its own; returns the bytes that came."""
    body = json.dumps(
        {
            "model": "null",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(body)}\r\n"
        "content-type: application/json\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + body)
        num_bytes, tail = 0, b""
        while _END not in tail:
            data = await reader.read(1 << 16)
            if not data:
                raise SystemExit(f"the answer broke off: {tail[-200:]!r}")
            num_bytes += len(data)
            tail = (tail + data)[-_TAIL_BYTES:]
    finally:
        writer.close()
    if f'"completion_tokens":{max_tokens}' not in tail.decode().replace(" ", ""):
        raise SystemExit(f"not {max_tokens} tokens: {tail[-400:]!r}")
    return num_bytes


async def measure(num_streams: int, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    rates, num_bytes = [], 0
    loop = asyncio.get_running_loop()
    async with baton("--model", "null", "--step-delay-ms", str(1000 / STEPS_PER_S)) as setup:
        host, _, port = setup.http.rpartition(":")
        for number in range(num_rounds):
            sys.stderr.write(f"round {number + 1} of {num_rounds} ...\n")
            prompts = [
                [(number * 131 + i * 7 + k) % 1000 for k in range(PROMPT_TOKENS)]
                for i in range(num_streams)
            ]
            start_s = loop.time()
            counts = await asyncio.gather(
                *(stream(host, int(port), prompt, num_tokens) for prompt in prompts)
            )
            rates.append(num_streams * num_tokens / (loop.time() - start_s))
            num_bytes += sum(counts)
    return {
        "setup": {"streams": num_streams, "tokens": num_tokens, "steps_per_s": STEPS_PER_S},
        "tokens_per_s": at_least(statistics.median(rates), BOUND, "1/s"),
        "rounds": rates,
        "bytes_a_token": num_bytes / (num_rounds * num_streams * num_tokens),
    }


async def scrape_ms() -> list[float]:
    """Of each scrape of a gateway that knows ten workers."""
    sys.stderr.write("scrapes ...\n")
    flags = ("--model", "null", "--num-blocks", "64", "--prefill", "5", "--decode", "5")
    async with baton(*flags) as setup:
        return await asyncio.to_thread(_scrapes, f"http://{setup.http}/metrics")


def _scrapes(url: str) -> list[float]:
    taken = []
    for _ in range(NUM_SCRAPES):
        start_s = time.perf_counter()
        with urllib.request.urlopen(url, timeout=10) as response:
            response.read()
        taken.append(1000 * (time.perf_counter() - start_s))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = uvloop.run(measure(options.streams, options.tokens, options.rounds))
    median_ms = statistics.median(uvloop.run(scrape_ms()))
    result["metrics_ms"] = at_most(median_ms, METRICS_BOUND_MS, "ms")
    print(json.dumps(rounded(result), indent=2))


if __name__ == "__main__":
    main()
