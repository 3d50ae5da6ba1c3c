"""One OpenAI client for every server of `bench.peers`: what it sends, and what it measures."""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

Sample = dict[str, float]
# Ids of ordinary words in SmolLM2's vocabulary.
_IDS = range(1000, 40_000)
_random = random.Random(11)


@dataclass(frozen=True, slots=True)
class Load:
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One request, seconds on the loop's clock of this process."""

    start_s: float
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    tokens_per_s: float
    ttft_p50_s: float


class PeerClient:
    """Streams completions. ``prefill_url``: the other half of vLLM's pair, asked first."""

    def __init__(self, url: str, model: str, prefill_url: str | None = None) -> None:
        self._decode = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._prefill: AsyncOpenAI | None = None
        if prefill_url is not None:
            self._prefill = AsyncOpenAI(base_url=f"{prefill_url}/v1", api_key="none", max_retries=0)
        self._model = model

    async def generate(self, num_prompt: int, num_output: int) -> Timed:
        """A prompt that no other request has, answered to the full length."""
        prompt = [_random.choice(_IDS) for _ in range(num_prompt)]
        extra: dict[str, Any] = {"ignore_eos": True}
        start_s = time.monotonic()
        if self._prefill is not None:
            extra["kv_transfer_params"] = await self._hand_over(self._prefill, prompt)
        stream = await self._decode.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=num_output,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        arrivals, num_tokens = [], 0
        async for chunk in stream:
            if chunk.choices:
                arrivals.append(time.monotonic())
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
        if num_tokens != num_output:
            raise SystemExit(f"{self._decode.base_url} gave {num_tokens} tokens, not {num_output}")
        return Timed(start_s, arrivals[0], arrivals[-1])

    async def _hand_over(self, prefill: AsyncOpenAI, prompt: list[int]) -> dict[str, Any]:
        """What the prefill server of a vLLM pair tells the decode server."""
        names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        asked = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            **dict.fromkeys(names),
        }
        answer = await prefill.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=1,
            temperature=0.0,
            extra_body={"kv_transfer_params": asked},
        )
        return dict(answer.model_dump()["kv_transfer_params"])


async def measure_decode(client: PeerClient, load: Load, concurrency: int) -> float:
    """Tokens a second after the first ones: concurrency over the mean time of a token."""
    timed = await _together(client, load, concurrency)
    mean_s = statistics.mean(one.last_s - one.first_s for one in timed)
    return concurrency * (load.num_output - 1) / mean_s


async def measure_prefill(client: PeerClient, num_prompt: int) -> float:
    """Prompt tokens a second, to the first token of a lone request."""
    timed = await client.generate(num_prompt, 1)
    return num_prompt / (timed.first_s - timed.start_s)


async def measure_load(client: PeerClient, load: Load, concurrency: int) -> Loaded:
    timed = await _together(client, load, concurrency)
    wall_s = max(one.last_s for one in timed) - min(one.start_s for one in timed)
    ttft_s = statistics.median(one.first_s - one.start_s for one in timed)
    return Loaded(concurrency * load.num_output / wall_s, ttft_s)


async def _together(client: PeerClient, load: Load, concurrency: int) -> list[Timed]:
    return await asyncio.gather(
        *(client.generate(load.num_prompt, load.num_output) for _ in range(concurrency))
    )
