"""What `baton up` answers to the other commands: gRPC on loopback, with the run's token."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from grpc import aio

from cli.child import ChildFailed
from cli.otlp import OtlpReceiver
from cli.scaling import SCALABLE, Scaler
from common import rpc
from common.errors import ConfigError, InvalidRequest, Unavailable
from common.listener import host_port
from common.wire import supervisor as wire
from common.wire import supervisor_grpc

_HOST = "127.0.0.1"


class SupervisorServer(supervisor_grpc.SupervisorServiceServicer):
    def __init__(self, receiver: OtlpReceiver, token: str) -> None:
        self._receiver = receiver
        self._scaler: Scaler | None = None
        self._server: aio.Server = rpc.make_internal_server(token)
        supervisor_grpc.add_SupervisorServiceServicer_to_server(self, self._server)
        self.address = ""

    def can_scale(self, scaler: Scaler) -> None:
        """From now on; until then there is nothing to change yet."""
        self._scaler = scaler

    async def start(self) -> None:
        port = rpc.bind(self._server, _HOST, 0)
        self.address = host_port(_HOST, port)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def GetTrace(
        self, request: wire.GetTraceRequest, context: rpc.Context
    ) -> wire.GetTraceResponse:
        found = self._receiver.find(request.id)
        if found is None:
            raise InvalidRequest("id", f"no such trace; {self._receiver.kept}")
        return found

    async def Scale(
        self, request: wire.ScaleRequest, context: rpc.Context
    ) -> AsyncIterator[wire.ScaleResponse]:
        if self._scaler is None:
            raise Unavailable("`baton up` is still starting")
        wanted = {pool: getattr(request, pool) for pool in SCALABLE if request.HasField(pool)}
        try:
            async with aclosing(self._scaler.scale(wanted)) as responses:
                async for response in responses:
                    yield response
        except (ConfigError, ChildFailed) as error:
            # Of a worker that did not start: who asked is the one to know why.
            raise Unavailable(error.message) from None
