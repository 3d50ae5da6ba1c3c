"""bench/gpu_check.py without a GPU: what it runs, what it may leave out, what it imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# CUDA graphs, rates and their shares, real cuda_ipc and nccl: nothing else may be left out.
MAY_NOT_RUN = {
    "device_rates",
    "decode_attention_rate",
    "prefill_attention_rate",
    "decode_step",
    "nccl",
}
QUICK = "small_kernels,block_copies,sampling,device_rates,decode_step"


def run_check(arguments: list[str], timeout_s: float) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    document: dict[str, object] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", QUICK],
        pytest.param([], marks=[pytest.mark.full, pytest.mark.timeout(300)]),
    ],
    ids=["quick", "all"],
)
def test_without_a_gpu_all_but_the_device_itself_is_checked(arguments: list[str]) -> None:
    document = run_check(arguments, timeout_s=100 if arguments else 290)
    checks = document["checks"]
    assert isinstance(checks, list) and len(checks) == (5 if arguments else 14)
    for check in checks:
        if check["name"] in MAY_NOT_RUN and check["status"] == "not_run":
            assert check["reason"]
        else:
            assert check["status"] == "interpreted", check
            assert check["figures"] and all(f["bound"] is not None for f in check["figures"])


def test_the_hook_refuses_what_a_gpu_machine_does_not_have() -> None:
    program = (
        "from bench.gpu.imports import allow_nothing_else\n"
        "allow_nothing_else()\n"
        "import json, numpy, engine.device_runner, kv_transfer.shm\n"
        "for name in ('grpc', 'xxhash', 'safetensors', 'pydantic'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ModuleNotFoundError:\n"
        "        continue\n"
        "    raise SystemExit(f'{name} was let in')\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
