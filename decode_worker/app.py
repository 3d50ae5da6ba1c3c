"""The decode process: `baton decode`."""

from common.config import PROTOCOL_VERSION, DecodeSettings
from common.wire import DECODE_SERVICE, worker_grpc
from decode_worker.servicer import DecodeServicer
from decode_worker.worker import DecodeWorker
from kv_transfer.control import GrpcKVControl
from kv_transfer.host import this_host
from kv_transfer.imports import Imports
from kv_transfer.registry import make_importers
from worker.process import open_process


async def run(settings: DecodeSettings) -> int:
    """Until SIGTERM or SIGINT; returns the exit status. Raises ConfigError or ModelError."""
    async with open_process(settings, settings.role) as process:
        memory, host = process.compute.memory, this_host()
        importers = make_importers(settings.transport, memory, process.transport_settings())
        control = GrpcKVControl(
            process.identity.worker_id,
            process.identity.epoch,
            memory.layout,
            host,
            process.token,
            PROTOCOL_VERSION,
            settings.tls,
        )
        try:
            worker = DecodeWorker(
                process.facts(tuple(importers), settings.local_prefill.value),
                settings,
                process.bus,
                Imports(memory, importers, process.transfers, control, host),
                process.make_runtime,
                process.telemetry,
            )
            worker_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(worker), process.server)
            return await process.serve(worker, [DECODE_SERVICE])
        finally:
            await control.close()
