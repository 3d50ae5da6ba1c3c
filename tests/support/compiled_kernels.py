"""Compiles what the launchers launch, for a GPU that is not there; a program, since Triton decides
when a kernel is defined whether it is interpreted: ``python -m support.compiled_kernels all``.

The launchers run on CPU tensors with Triton's own ``run`` replaced by a recorder; a recorded launch
is specialised as Triton would (constants, 16-byte alignment) and compiled for a target.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.kernels import activation, blocks, norm, rotary_write, sampling, tuning
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import PrefillPlan, paged_prefill
from engine.kernels.span import Span
from engine.kernels.tuning import prefill_tuning
from engine.kv_cache import LayerPool
from kv_transfer.cuda import copy_kernel

HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITIES = (80, 90)
PAGED = ("_decode_split", "_prefill")
# What a test run can afford each time; the rest is for the long one.
CORE = [(torch.bfloat16, 128)]

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}


@dataclass(frozen=True)
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@dataclass(frozen=True)
class Compiled:
    """``spills``: bytes of local memory a thread."""

    ptx: str
    shared: int
    spills: int

    @property
    def widest_load_bytes(self) -> int:
        """Of one thread's loads from global memory, asynchronous copies included."""
        widths = [int(bits) // 8 for bits in re.findall(r"ld\.global\S*\.b(\d+)", self.ptx)]
        for count, bits in re.findall(r"ld\.global\S*\.v(\d)\.\w(\d+)", self.ptx):
            widths.append(int(count) * int(bits) // 8)
        widths += [16] * bool(re.search(r"cp\.async\.cg.*0x10", self.ptx))
        return max(widths, default=0)

    @property
    def copies_asynchronously(self) -> bool:
        return "cp.async.c" in self.ptx


def launches(call: Callable[[], object]) -> list[Launch]:
    """What ``call`` would launch."""
    found: list[Launch] = []
    with _recording(found):
        call()
    return found


@contextmanager
def _recording(found: list[Launch]) -> Iterator[None]:
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(Launch(self, args, options))

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run


def compile_for(launch: Launch, capability: int) -> Compiled:
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    options = dict(launch.options)
    for name in launch.kernel.arg_names:
        if name in options:
            values[name] = options.pop(name)
    constants, signature, attrs = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or _is_one(value):
            constants[parameter.name] = value
            signature[parameter.name] = "constexpr"
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(kernel.asm["ptx"], kernel.metadata.shared, _spills(kernel.asm["cubin"]))


def _is_one(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _spills(cubin: bytes) -> int:
    """By cuobjdump, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]) + int(found[2])


# ------------------------------------------------------------ what is compiled


def attention_launches(dtype: torch.dtype, head_size: int) -> list[Launch]:
    """Of a batch of 8 with 8 / 2 heads, blocks of 16."""
    pool = LayerPool.of(torch.empty((4, 2, 2, 16, 2, head_size), dtype=dtype), 1)
    queries = torch.empty((8, 8, head_size), dtype=dtype)
    tables, contexts = torch.zeros((8, 16), dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    block_m = prefill_tuning(head_size, dtype.itemsize, queries.device).block_m
    plan = PrefillPlan.of([Span(0, 8, 3, [1])], 4, block_m, 16, queries.device)
    return [
        *launches(lambda: paged_decode(queries, pool, tables, contexts, 4)),
        *launches(lambda: paged_prefill(queries, pool, plan, queries)),
    ]


def rotary_launches(dtype: torch.dtype, head_size: int) -> list[Launch]:
    """Of 32 / 8 heads, out of a merged product."""
    pool = LayerPool.of(torch.empty((4, 2, 2, 16, 8, head_size), dtype=dtype), 1)
    queries, keys, values = torch.empty((4, 48, head_size), dtype=dtype).split([32, 8, 8], dim=1)
    angles = (torch.empty((4, 1, head_size), dtype=dtype),) * 2
    slots = torch.zeros(4, dtype=torch.int64)
    heads = (queries, keys, values)
    return [
        *launches(lambda: rotary_write.rotary_write(pool, slots, 64, heads, angles)),
        *launches(lambda: norm.rms_norm(queries, torch.empty(head_size, dtype=dtype), 1e-5)),
    ]


def row_launches(dtype: torch.dtype) -> list[Launch]:
    x, weight = torch.empty((4, 4096), dtype=dtype), torch.empty(4096, dtype=dtype)
    gate_up = torch.empty((4, 28672), dtype=dtype)
    return [
        *launches(lambda: norm.add_rms_norm(x, x, weight, 1e-5)),
        *launches(lambda: activation.silu_multiply(gate_up)),
    ]


def plain_launches() -> list[Launch]:
    """Those without a dtype or a head size."""
    pool, ids = torch.empty((4, 4096), dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    numbers, edges = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    choices = sampling.RowChoices(numbers, ids, ids, numbers, edges)
    logits = torch.zeros((2, 128256))
    return [
        *launches(lambda: blocks.copy_blocks(pool, ids, pool, ids)),
        *launches(lambda: copy_kernel.copy_blocks(pool, pool, ids, ids)),
        *launches(lambda: sampling.choose(logits, choices)),
    ]


def cases(which: str) -> Iterator[tuple[str, Launch]]:
    pairs = CORE if which == "core" else [(d, size) for d in DTYPES for size in HEAD_SIZES]
    for dtype, head_size in pairs:
        name = f"{str(dtype).removeprefix('torch.')}-{head_size}"
        for launch in [*attention_launches(dtype, head_size), *rotary_launches(dtype, head_size)]:
            yield f"{launch.name}-{name}", launch
    for dtype in dict.fromkeys(dtype for dtype, _ in pairs):
        for launch in row_launches(dtype):
            yield f"{launch.name}-rows-{str(dtype).removeprefix('torch.')}", launch
    for launch in plain_launches():
        yield launch.name, launch


def main() -> None:
    """One JSON line a case and capability."""
    which = sys.argv[1]
    for capability in CAPABILITIES:
        with patch.object(tuning, "capability", return_value=capability):
            found = list(cases(which))
        for name, launch in found:
            if which == "core" and capability < 90 and launch.name not in PAGED:
                continue
            compiled = compile_for(launch, capability)
            line = {
                "case": f"{name}-sm{capability}",
                "kernel": launch.name,
                "spills": compiled.spills,
                "shared": compiled.shared,
                "shared_limit": SHARED_LIMIT[capability],
                "widest_load_bytes": compiled.widest_load_bytes,
                "copies_asynchronously": compiled.copies_asynchronously,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
