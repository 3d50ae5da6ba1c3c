"""bench/exporter.py with a GPU of the tests in place of a real one."""

import asyncio
from unittest.mock import patch

from bench import exporter
from common import failpoints
from tests.kv_transfer.fake_device import FakeDevice

if __name__ == "__main__":
    arguments = exporter.parse()
    failpoints.arm(arguments.failpoints)
    device = FakeDevice("GPU-a", arguments.folder)
    with patch.object(exporter, "open_device", lambda name: device):
        asyncio.run(exporter.serve(arguments))
