from collections.abc import AsyncIterator

import pytest

from cli.otlp import OtlpReceiver
from common import nats_bus
from tests.worker.rig import OTLP_TOKEN, AttemptSpan


@pytest.fixture
async def attempt_span() -> AsyncIterator[AttemptSpan]:
    receiver = OtlpReceiver(OTLP_TOKEN)
    yield AttemptSpan(receiver, await receiver.start())
    await receiver.stop()


@pytest.fixture(autouse=True)
def _short_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's bus closes when its last fetch is over, which these tests need not wait for."""
    monkeypatch.setattr(nats_bus, "_FETCH_ROUND_S", 0.2)
