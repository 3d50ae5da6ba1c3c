"""What `baton up` answers to the other commands: gRPC on loopback, with the run's token."""

from grpc import aio

from cli.otlp import OtlpReceiver
from common import rpc
from common.errors import InvalidRequest, Unsupported
from common.wire import supervisor as wire
from common.wire import supervisor_grpc

_HOST = "127.0.0.1"


class SupervisorServer(supervisor_grpc.SupervisorServiceServicer):
    def __init__(self, receiver: OtlpReceiver, token: str) -> None:
        self._receiver = receiver
        self._server: aio.Server = rpc.make_internal_server(token)
        supervisor_grpc.add_SupervisorServiceServicer_to_server(self, self._server)
        self.address = ""

    async def start(self) -> None:
        port = rpc.bind(self._server, _HOST, 0)
        self.address = rpc.endpoint(_HOST, port)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def GetTrace(
        self, request: wire.GetTraceRequest, context: rpc.Context
    ) -> wire.GetTraceResponse:
        found = self._receiver.find(request.id)
        if found is None:
            raise InvalidRequest("id", "no such trace here; only the last ones are kept")
        return found

    async def Scale(self, request: wire.ScaleRequest, context: rpc.Context) -> wire.ScaleResponse:
        raise Unsupported("scale", "pools of a running `baton up` cannot be changed yet")
