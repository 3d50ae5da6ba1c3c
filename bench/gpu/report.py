"""What a check gives: figures, each beside the bound that it is held against."""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

Status = Literal["device", "interpreted", "not_run", "failed"]


@dataclass(frozen=True)
class Figure:
    """``bound`` is what it must reach, ``aim`` what it should; None: only reported."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    aim: float | None = None
    at_most: bool = True

    @property
    def ok(self) -> bool:
        return self._reaches(self.bound)

    @property
    def misses_aim(self) -> bool:
        return not self._reaches(self.aim)

    def _reaches(self, limit: float | None) -> bool:
        if limit is None:
            return True
        return self.value <= limit if self.at_most else self.value >= limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "value": float(f"{self.value:.6g}"), "ok": self.ok}


@dataclass
class Outcome:
    """``profile``: the kernels that took longest, where an aim was missed."""

    figures: list[Figure] = field(default_factory=list)
    compile_s: float = 0.0
    profile: list[dict[str, Any]] = field(default_factory=list)


class NotRun(Exception):
    """A check cannot run here, for this reason."""


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[["Machine"], Outcome]
    # None: runs everywhere, interpreted where there is no GPU.
    needs_gpu: str | None = None
    # Whether a stand-in takes the device's place even where there is a GPU.
    over_stand_in: bool = False


@dataclass(frozen=True)
class Machine:
    """Where the checks run. ``rates`` are filled in by the check that measures them."""

    device: torch.device
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """bf16 arithmetic is wrong in Triton's interpreter."""
        if self.has_gpu:
            return (torch.float32, torch.float16, torch.bfloat16)
        return (torch.float32, torch.float16)


def run_check(check: Check, machine: Machine) -> dict[str, Any]:
    """One entry of the document. Whatever goes wrong in a check is that check's result."""
    start_s = time.monotonic()
    outcome, reason = Outcome(), ""
    on_device = machine.has_gpu and not check.over_stand_in
    status: Status = "device" if on_device else "interpreted"
    if check.needs_gpu is not None and not machine.has_gpu:
        status, reason = "not_run", check.needs_gpu
    else:
        try:
            outcome = check.run(machine)
        except NotRun as error:
            status, reason = "not_run", str(error)
        except Exception as error:  # noqa: BLE001
            status, reason = "failed", f"{type(error).__name__}: {error}"
            traceback.print_exc()
    if any(not figure.ok for figure in outcome.figures):
        status, reason = "failed", "a figure misses its bound"
    return {
        "name": check.name,
        "status": status,
        **({"reason": reason} if reason else {}),
        "seconds": round(time.monotonic() - start_s, 2),
        "compile_s": round(outcome.compile_s, 2),
        "figures": [figure.to_json() for figure in outcome.figures],
        **({"profile": outcome.profile} if outcome.profile else {}),
    }
