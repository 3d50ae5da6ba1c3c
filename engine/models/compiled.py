"""The Llama family as one compiled function a step (engine/kernels/cpu), for fp32 on a CPU.

The life of a step:

1. positions give cosines and sines, block tables are put one after the other, buffers grow where
   the step is larger than any before; nothing is allocated otherwise;
2. a team of threads runs `forward` over all layers;
3. logits are a second call, of the rows that are asked for.
"""

from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.kernels import Attention, Kernels
from engine.kernels.cpu.attention import CHUNK_TOKENS
from engine.kernels.cpu.buffers import Buffers, padded
from engine.kernels.cpu.forward import forward, head_rows
from engine.kernels.cpu.kernels import PlannedSpans
from engine.kernels.cpu.packing import address_of
from engine.kernels.cpu.products import MAX_ROWS, PANELS
from engine.kernels.cpu.step import NUM_PHASES, Pool, Step, Weights
from engine.kernels.cpu.team import Team
from engine.kernels.cpu.tiles import PANEL
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig, ModelEntry
from engine.models.packed import PackedModel
from engine.models.packed_files import load_packed
from engine.models.rope import RotaryEmbedding


class CompiledModel:
    """What `LlamaModel` is, for the kernel set ``numba``. The tensors that it gives are views of
    its buffers: the next call writes over them."""

    def __init__(self, config: ModelConfig, packed: PackedModel, kernels: Kernels) -> None:
        self.config = config
        self.kernels = kernels
        # The kernels know addresses only: what lies there is held here.
        self._packed = packed
        self._head = packed.head.entry
        layers = packed.layers
        self._weights = Weights(
            products=np.stack(
                [np.stack([one.entry for one in layer.products]) for layer in layers]
            ),
            norms=np.array(
                [[address_of(norm) for norm in layer.norms] for layer in layers], np.int64
            ),
            final_norm=address_of(packed.final_norm),
            embedding=packed.embedding.entry,
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
        )
        cpu = torch.device("cpu")
        self._rotary = RotaryEmbedding(config.rope, config.head_size, torch.float32, cpu)
        self._team = Team(torch.get_num_threads(), config.num_layers * NUM_PHASES + 2)
        self._buffers = Buffers(self._team.num_threads)

    def first_layers(self, num_layers: int) -> "CompiledModel":
        """The model of these layers, norm and head; weights and KV are those of this one."""
        first = copy(self)
        first.config = replace(self.config, num_layers=num_layers)
        first._weights = self._weights._replace(
            products=self._weights.products[:num_layers], norms=self._weights.norms[:num_layers]
        )
        return first

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        attention: Attention,
    ) -> Tensor:
        """As `LlamaModel.forward`; ``attention`` is a plan of the kernel set ``numba``."""
        assert isinstance(attention, PlannedSpans)
        step = self._step(token_ids, positions, cache, attention)
        self._team.run(forward, self._pool(cache), self._weights, step)
        normed = self._buffers.matrix("normed", len(token_ids), padded(self.config.hidden_size))
        return normed[:, : self.config.hidden_size]

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the given rows only: ``[m, hidden_size]`` to ``[m, vocab_size]``."""
        entry, num_rows = self._head, len(hidden)
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        logits = self._buffers.matrix("logits", num_rows, int(entry[PANELS]) * PANEL)
        work, size = self._buffers.work(self._work_floats(0))
        self._team.run(
            head_rows, entry, hidden.data_ptr(), hidden.stride(0), num_rows,
            logits.data_ptr(), logits.stride(0), self._team.words, work, size,
        )  # fmt: skip
        return logits[:, : self.config.vocab_size]

    def _step(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, plan: PlannedSpans
    ) -> Step:
        config, buffers, n = self.config, self._buffers, len(token_ids)
        half = config.head_size // 2
        cosines, sines = (
            np.ascontiguousarray(part[:, 0, :half]) for part in self._rotary.at(positions)
        )
        widths = {
            "hidden": config.hidden_size,
            "normed": config.hidden_size,
            "queries": (config.num_heads + 2 * config.num_kv_heads) * config.head_size,
            "attended": config.num_heads * config.head_size,
            "inner": config.intermediate_size,
        }
        at = {name: buffers.matrix(name, n, padded(width)) for name, width in widths.items()}
        spans, num_copied = plan.arrays(2 * config.num_kv_heads * config.head_size)
        longest = max(span.context for span in plan.spans)
        work, size = buffers.work(self._work_floats(longest))
        return Step(
            token_ids=token_ids.numpy(),
            spans=spans,
            tables=plan.tables,
            cosines=cosines,
            sines=sines,
            hidden=at["hidden"].data_ptr(),
            hidden_stride=at["hidden"].stride(0),
            normed=at["normed"].data_ptr(),
            queries=at["queries"].data_ptr(),
            queries_stride=at["queries"].stride(0),
            attended=at["attended"].data_ptr(),
            attended_stride=at["attended"].stride(0),
            inner=at["inner"].data_ptr(),
            inner_stride=at["inner"].stride(0),
            copies=buffers.matrix("copies", 1, num_copied).data_ptr(),
            has_chunks=num_copied > 0,
            work=work,
            work_bytes=size,
            words=self._team.words,
        )

    def _pool(self, cache: KVCache) -> Pool:
        config = self.config
        return Pool(
            address=cache.address,
            num_layers=cache.num_layers,
            block_size=cache.block_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        )

    def _work_floats(self, longest: int) -> int:
        """Room of one thread: for a panel and what goes with it, or for scores of attention."""
        config = self.config
        k = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_size)
        of_product = k * (1 + PANEL) + MAX_ROWS * 2 * PANEL
        rows = CHUNK_TOKENS * (config.num_heads // config.num_kv_heads)
        of_chunk = rows * (config.head_size + padded(longest))
        return max(of_product, of_chunk, config.num_heads * padded(longest))


def load_compiled(entry: ModelEntry, kernels: Kernels, quantization: str) -> CompiledModel:
    """Maps the entry's packed weights, or packs them. Raises ModelError."""
    return CompiledModel(entry.config, load_packed(entry, quantization), kernels)
