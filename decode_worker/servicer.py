"""DecodeService over gRPC."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from common import rpc
from common.wire import worker as wire
from common.wire import worker_grpc
from decode_worker.worker import DecodeWorker


class DecodeServicer(worker_grpc.DecodeServiceServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Stream(
        self, request_iterator: AsyncIterator[wire.StreamRequest], context: rpc.Context
    ) -> AsyncIterator[wire.StreamResponse]:
        # Closed here whichever way the call ends: that is what frees the stream's sequences.
        async with aclosing(self._worker.stream(request_iterator)) as responses:
            async for message in responses:
                yield message
