"""Checks the GPU path, or without a GPU all of it that needs none; prints one JSON document.

    python -m bench.gpu_check [--output FILE]

Needs Python 3.11 or newer, torch 2.11 or newer and triton 3.6 or newer; an import hook refuses all
else. Each check is ``device`` (ran on the GPU), ``interpreted`` (ran in Triton's interpreter, or
over a stand-in for the device), ``not_run`` with the reason, or ``failed``. Each figure stands
beside the bound that it is held against. The exit status is 1 when a check failed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.imports import allow_nothing_else

_NO_GPU = "no GPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="also write the document here")
    parser.add_argument("--only", default="", help="names of checks, commas between them")
    options = parser.parse_args()
    allow_nothing_else()
    document = run(set(filter(None, options.only.split(","))))
    text = json.dumps(document, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 1 if document["num_failed"] else 0


def run(only: set[str]) -> dict[str, Any]:
    """The document; ``only``: names of checks, all where empty."""
    # Triton decides when a kernel is defined whether it is interpreted.
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    from bench.gpu.checks import CHECKS
    from bench.gpu.interpreter import leave_storages_in_place
    from bench.gpu.report import Machine, run_check

    if not has_gpu:
        leave_storages_in_place()
    start_s = time.monotonic()
    machine = Machine(torch.device("cuda" if has_gpu else "cpu"))
    results = []
    for check in CHECKS:
        if not only or check.name in only:
            print(f"{check.name} ...", file=sys.stderr, flush=True)
            results.append(run_check(check, machine))
            if has_gpu:
                torch.cuda.empty_cache()
    return {
        **_machine(has_gpu),
        "seconds": round(time.monotonic() - start_s, 1),
        "num_failed": sum(result["status"] == "failed" for result in results),
        "checks": results,
    }


def _machine(has_gpu: bool) -> dict[str, Any]:
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name() if has_gpu else _NO_GPU,
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
