"""Puts the compute side of a worker together: model, KV pool, engine.

model entry -> KV layout -> number of blocks (what the settings ask for, refused where it cannot be)
-> pool memory -> runner (oracle, null or torch) -> block pool -> engine.
"""

from collections.abc import Callable, Sequence

from common.types import EngineEvent, StepRecord
from engine.loop import EngineRuntime

OnEvents = Callable[[Sequence[EngineEvent], StepRecord | None], None]
# Gives the engine's runtime its listener: the real one makes an EngineLoop.
MakeRuntime = Callable[[OnEvents], EngineRuntime]
