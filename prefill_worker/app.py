"""The prefill process: `baton prefill`."""

from common.config import PROTOCOL_VERSION, PrefillSettings
from common.wire import KV_TRANSFER_SERVICE, worker_grpc
from kv_transfer.control import KVTransferServicer
from kv_transfer.exports import Exports
from kv_transfer.host import this_host
from kv_transfer.registry import make_exporters
from prefill_worker.worker import PrefillWorker
from worker.process import open_process


async def run(settings: PrefillSettings) -> int:
    """Until SIGTERM or SIGINT; returns the exit status. Raises ConfigError or ModelError."""
    async with open_process(settings, settings.role) as process:
        memory = process.compute.memory
        exporters = make_exporters(settings.transport, memory, process.transport_settings())
        exports = Exports(
            memory, exporters, process.transfers, process.endpoints.grpc, settings.lease_s
        )
        servicer = KVTransferServicer(exports, this_host(), PROTOCOL_VERSION)
        worker_grpc.add_KVTransferServiceServicer_to_server(servicer, process.server)
        worker = PrefillWorker(
            process.facts(tuple(exporters)),
            settings,
            process.bus,
            exports,
            process.make_runtime,
            process.telemetry,
        )
        return await process.serve(worker, [KV_TRANSFER_SERVICE])
