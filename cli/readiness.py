"""Whether a gateway would answer a request."""

import asyncio
from collections.abc import Collection

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import rpc
from common.errors import Unavailable
from common.wire import INFERENCE_SERVICE, inference, inference_grpc

_TIMEOUT_S = 60.0
_POLL_S = 0.05


async def wait_until_ready(address: str, worker_ids: Collection[str]) -> None:
    """Until the gateway knows these workers as ready and its health says that it serves. Raises
    Unavailable after a minute."""
    async with rpc.make_public_channel(address) as channel:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                ready = await is_ready(channel, worker_ids)
                while not ready:
                    await asyncio.sleep(_POLL_S)
                    ready = await is_ready(channel, worker_ids)
        except TimeoutError:
            raise Unavailable(
                f"gateway and workers did not find each other in {_TIMEOUT_S:.0f} s"
            ) from None


async def is_ready(channel: aio.Channel, worker_ids: Collection[str]) -> bool:
    """Whether it is so at this moment."""
    try:
        listing = await inference_grpc.InferenceServiceStub(channel).ListWorkers(
            inference.ListWorkersRequest(), timeout=_TIMEOUT_S
        )
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE), timeout=_TIMEOUT_S
        )
    except aio.AioRpcError:
        return False
    ready = {worker.worker_id for worker in listing.workers if worker.state == "ready"}
    serving = health.status == health_pb2.HealthCheckResponse.SERVING
    return serving and ready.issuperset(worker_ids)
