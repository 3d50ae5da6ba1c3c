"""What Triton makes of every kernel for sm_80 and sm_90, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGED = {"_decode_split", "_prefill"}
# One program a row, a handful of numbers.
NARROW = {"_best_of_row"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["core", "all"])
def test_what_is_compiled(which: str) -> None:
    """``core``: bf16 and heads of 128 alone."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "support.compiled_kernels", which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in compiled} >= PAGED | NARROW
    wrong = [
        one
        for one in compiled
        if one["spills"] > 0
        or one["shared"] > one["shared_limit"]
        or (one["kernel"] not in NARROW and one["widest_load_bytes"] < 16)
        or (one["kernel"] in PAGED and not one["copies_asynchronously"])
    ]
    assert wrong == []
