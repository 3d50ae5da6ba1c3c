"""Stands in for Jaeger where its image cannot be pulled: takes traces by OTLP, shows one by one.

It is what `baton up` has inside, as a process of its own in the same image (compose.offline.yaml).
The command `baton trace ID` finds it in its container::

    docker compose exec jaeger baton trace ID
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from cli.otlp import OtlpReceiver
from cli.run_dir import RunDir, RunState
from cli.supervisor_service import SupervisorServer
from common.config import read_secret

_PORT = 4317


async def main(token_file: Path) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    token = read_secret(token_file, "token_file")
    receiver = OtlpReceiver(token)
    service = SupervisorServer(receiver, token)
    run_dir = RunDir()
    try:
        await receiver.start("0.0.0.0", _PORT)
        await service.start()
        run_dir.save(RunState(os.getpid(), "", (), service.address, str(token_file), ()))
        await stop.wait()
    finally:
        await service.stop()
        await receiver.stop()
        run_dir.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
