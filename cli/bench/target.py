"""What a load is sent to: the small interface, and a Baton gateway by gRPC.

The load generator calls ``send`` once a request and reads it to its end. A target sends each
request and raises the errors of common/errors.py; it keeps no times. Closing what ``send`` returned
cancels what is left of the request.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, cast

from common.client import BatonClient, Chunk, Sampling
from common.types import TokenId, Usage


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived at once. ``token_ids`` is empty where the endpoint does not tell them;
    ``usage`` comes with the last piece, ``trace_id`` too, where there is one."""

    num_tokens: int = 0
    token_ids: tuple[TokenId, ...] = ()
    usage: Usage | None = None
    trace_id: str = ""


class Target(Protocol):
    def send(
        self, prompt_ids: Sequence[TokenId], max_tokens: int, wants_ids: bool
    ) -> AsyncGenerator[Piece, None]:
        """Exactly ``max_tokens`` tokens for this prompt, greedily, past any end of text.
        ``wants_ids``: the caller goes on with the answer's ids, if they can be had."""
        ...

    async def close(self) -> None: ...


class GrpcTarget:
    """``address`` is a gateway's host:port."""

    def __init__(self, address: str) -> None:
        self._client = BatonClient(address)

    async def send(
        self, prompt_ids: Sequence[TokenId], max_tokens: int, wants_ids: bool
    ) -> AsyncGenerator[Piece, None]:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        answer = cast("AsyncGenerator[Chunk, None]", self._client.generate(prompt_ids, sampling))
        async with aclosing(answer) as chunks:
            async for chunk in chunks:
                if chunk.complete is not None:
                    yield Piece(usage=chunk.complete.usage, trace_id=chunk.complete.trace_id)
                elif chunk.token_ids:
                    yield Piece(len(chunk.token_ids), chunk.token_ids)

    async def close(self) -> None:
        await self._client.close()
