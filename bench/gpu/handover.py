"""A random model end to end through two processes: prefill, hand-off by cuda_ipc, decode.

The life of a run; control is JSON over a pipe, KV goes by the transport alone::

    parent                 exporter                          importer
    ------                 --------                          --------
    spawns both            builds the model, prefills,       builds the same model
                           tells first token, blocks, pool
    passes that on                                           maps the pool, copies the blocks,
                           decodes on by itself              decodes on
    compares the ids       ends                              ends

On a machine without a GPU a tiny model runs interpreted over a file in a GPU's place.
"""

import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.gpu.models import LARGE, TINY, random_model
from bench.gpu.processes import FOLDER_PREFIX, Control, two_processes
from bench.gpu.rates import COPY, rate
from bench.gpu.report import Figure, Machine, Outcome
from common.types import BlockRef, Epoch, KVLayout, SamplingParams, SequenceId, WorkerId
from engine.batch import Batch, BatchRow, SampleRequest
from engine.device_runner import DeviceRunner
from engine.kernels import kernel_set
from engine.kv_cache import KVCache
from kv_transfer.base import BlockCopy, CancelFlag, LeaseProof, Peer, TransportSettings
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.memory import PoolMemory, allocate_pool

_TRANSPORT = "kv_transfer.cuda"
_GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
_CHUNK = 2048


@dataclass(frozen=True)
class Job:
    """``num_prompt`` tokens are handed over, whole blocks of 16, then ``num_new`` computed."""

    on_gpu: bool
    num_prompt: int
    num_new: int
    folder: str

    @property
    def num_blocks(self) -> int:
        """Of a pool: the prompt's, what is new, the null block."""
        return self.num_prompt // 16 + 3

    @property
    def layout(self) -> KVLayout:
        config = LARGE if self.on_gpu else TINY
        dtype = "bfloat16" if self.on_gpu else "float32"
        shape = (config.num_layers, 16, config.num_kv_heads, config.head_size)
        return KVLayout(*shape, dtype, "random", checksum=NO_CHECKSUM)


def check_handover(machine: Machine) -> Outcome:
    with TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        job = Job(machine.has_gpu, 8192 if machine.has_gpu else 48, 16, folder)
        told, fetched, alone = _run_both(job)
    wrong = sum(a != b for a, b in zip(fetched["ids"], alone["ids"], strict=True))
    outcome = Outcome([Figure("ids that differ from those of one process", wrong, "1", 0)])
    if machine.has_gpu:
        num_bytes = 2 * job.layout.block_bytes * (job.num_prompt // 16)
        share = num_bytes / fetched["fetch_s"] / rate(machine, COPY)
        of_prefill = fetched["fetch_s"] / told["prefill_s"]
        outcome.figures += [
            Figure("hand-off of 512 blocks, share of copy", share, "1", 0.8, at_most=False),
            Figure("hand-off / prefill of those tokens", of_prefill, "1", 0.05),
        ]
    return outcome


def _run_both(job: Job) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What the exporter told of its offer, what the importer gave, what the exporter gave."""
    with two_processes(_export, _import, job) as (exporter, importer):
        told = exporter.receive()
        importer.send(told)
        return told, importer.receive(), exporter.receive()


# ------------------------------------------------------------ the two processes


def _export(job: Job, control: Control) -> None:
    transport = import_module(f"{_TRANSPORT}.ipc")
    with _pool(job, "exporter") as pool:
        runner = _Stepper(job, pool, first_block=1)
        runner.prefill()
        runner.restart()
        start_s = time.monotonic()
        first_id = runner.prefill()
        prefill_s = time.monotonic() - start_s
        exporter = transport.CudaIpcExporter(pool, TransportSettings(pool_dir=Path(job.folder)))
        address = exporter.address()
        exporter.seal([BlockRef(block_id, 1) for block_id in runner.prompt_blocks])
        told = {
            "first_id": first_id,
            "block_ids": list(runner.prompt_blocks),
            "prefill_s": prefill_s,
            "uuid": address.device_uuid,
            "handle": address.handle.hex(),
        }
        control.send(told)
        control.send({"ids": runner.decode(first_id)})
        control.wait_for_the_end()  # the pool must outlive the importer's copy
        exporter.close()


def _import(job: Job, control: Control) -> None:
    transport = import_module(f"{_TRANSPORT}.ipc")
    base = import_module("kv_transfer.base")
    with _pool(job, "importer") as pool:
        # Other blocks than the exporter's, so that ids and addresses must be translated.
        runner = _Stepper(job, pool, first_block=2)
        importer = transport.CudaIpcImporter(pool, TransportSettings(pool_dir=Path(job.folder)))
        told = control.receive()
        address = base.CudaIpcAddress(told["uuid"], bytes.fromhex(told["handle"]))
        peer = Peer(WorkerId("exporter"), Epoch(1), job.layout, job.num_blocks, (address,))
        copies = [
            BlockCopy(index, BlockRef(source, 1), BlockRef(target, 1), None)
            for index, (source, target) in enumerate(
                zip(told["block_ids"], runner.prompt_blocks, strict=True)
            )
        ]
        importer.connect(peer)
        proof = LeaseProof("", b"")
        results = [importer.fetch(peer, proof, copies, CancelFlag()) for _ in range(3)]
        ids = runner.decode(told["first_id"])
        fetch_s = min(result.duration_s for result in results)
        control.send({"ids": ids, "fetch_s": fetch_s})
        importer.close()


def _pool(job: Job, worker_id: str) -> PoolMemory:
    if job.on_gpu:
        device = import_module(f"{_TRANSPORT}.device").open_device("cuda")
    else:
        device = import_module("bench.gpu.file_device").FileDevice(Path(job.folder))
    allocate: Any = allocate_pool
    folder, name = Path(job.folder), WorkerId(worker_id)
    pool: PoolMemory = allocate(
        "cuda", job.layout, job.num_blocks, folder, name, Epoch(os.getpid()), device
    )
    return pool


class _Stepper:
    """One sequence over a pool, stepped by hand."""

    def __init__(self, job: Job, pool: PoolMemory, first_block: int) -> None:
        config = LARGE if job.on_gpu else TINY
        cache = KVCache(pool.tensor)
        kernels = kernel_set("triton", cache)
        dtype: torch.dtype = getattr(torch, job.layout.dtype)
        model = random_model(config, dtype, cache.device, kernels)
        self._runner = DeviceRunner(model, cache)
        self._job = job
        self._block_ids = range(first_block, job.num_blocks)
        self._prompt = [(7 * i + i // 11) % config.vocab_size for i in range(job.num_prompt)]
        self._computed = 0

    @property
    def prompt_blocks(self) -> range:
        return self._block_ids[: self._job.num_prompt // 16]

    def restart(self) -> None:
        self._computed = 0

    def prefill(self) -> int:
        """The first token."""
        token_id = -1
        while self._computed < len(self._prompt):
            chunk = self._prompt[self._computed : self._computed + _CHUNK]
            token_id = self._step(chunk)
        return token_id

    def decode(self, token_id: int) -> list[int]:
        self._computed = len(self._prompt)
        ids = [token_id]
        for _ in range(self._job.num_new):
            ids.append(self._step(ids[-1:]))
        return ids

    def _step(self, token_ids: list[int]) -> int:
        """Greedy id after the last of ``token_ids``."""
        end = self._computed + len(token_ids)
        request = SampleRequest(_GREEDY, len(self._prompt), end, [])
        row = BatchRow(SequenceId(1), token_ids, self._computed, self._block_ids, request)
        (result,) = self._runner.launch(Batch(0, [row])).collect()
        if result.error is not None:
            raise RuntimeError(result.error)
        self._computed = end
        return result.token_ids[0]
