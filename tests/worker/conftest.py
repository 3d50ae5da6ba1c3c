from collections.abc import AsyncIterator

import pytest

from cli.otlp import OtlpReceiver
from tests.worker.rig import OTLP_TOKEN, AttemptSpan


@pytest.fixture
async def attempt_span() -> AsyncIterator[AttemptSpan]:
    receiver = OtlpReceiver(OTLP_TOKEN)
    yield AttemptSpan(receiver, await receiver.start())
    await receiver.stop()
