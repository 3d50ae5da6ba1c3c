"""An engine over a real entry, with or without drafts."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from support.paged import make_storage
from support.proposers import ScriptedProposer

from common.types import SamplingParams, SequenceCounts, SequenceId, SequenceOutput, SequenceSpec
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.model_runner import RunnerConfig, TorchRunner, build_runner
from engine.models.config import read_entry
from engine.prefix_cache import PrefixCache
from engine.scheduler import SchedulerConfig
from engine.speculation.draft_model import DraftProposer
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.self_draft import SelfProposer
from engine.speculation.speculator import Speculator


class TorchRig:
    """``drafts``: None, ngram, self:N, perfect (the target as a draft model with its own cache),
    random, or wrong (which knows ``truth``, the output ids by prompt)."""

    def __init__(
        self,
        entry: Path,
        drafts: str | None = None,
        k: int = 5,
        num_blocks: int = 300,
        block_size: int = 16,
        truth: dict[tuple[int, ...], list[int]] | None = None,
        **config: int,
    ) -> None:
        self._entry = entry
        self._num_blocks, self._block_size = num_blocks, block_size
        self._truth = truth or {}
        runner = self._runner()
        self.pool = BlockPool(num_blocks, block_size, "m", PrefixCache(num_blocks))
        speculator = None
        if drafts is not None:
            speculator = Speculator(self._proposer(drafts, runner), k, runner.vocab_size)
        settings = SchedulerConfig(**config)  # type: ignore[arg-type]
        self.engine = Engine(runner, self.pool, settings, speculator=speculator)
        self.counts: dict[SequenceId, SequenceCounts] = {}
        self._ids = count(1)

    def _runner(self) -> TorchRunner:
        config = read_entry(self._entry).config
        storage = make_storage(config, self._num_blocks, self._block_size, torch.float32)
        return build_runner(RunnerConfig(), self._entry, storage)

    def _proposer(self, drafts: str, runner: TorchRunner) -> Proposer:
        if drafts == "ngram":
            return NgramProposer(2, 4)
        if drafts.startswith("self:"):
            num_layers = int(drafts[len("self:") :])
            return SelfProposer(runner.first_layers(num_layers), num_layers)
        if drafts == "perfect":
            pool = BlockPool(self._num_blocks, self._block_size, "draft")
            return DraftProposer(self._runner(), pool, 8192)
        generator = torch.Generator().manual_seed(1)
        vocab_size = runner.vocab_size

        def at_random(_: object, num_drafts: int) -> list[int]:
            return torch.randint(vocab_size, (num_drafts,), generator=generator).tolist()

        def wrong(sequence, num_drafts: int) -> list[int]:  # type: ignore[no-untyped-def]
            truth = self._truth[sequence.spec.prompt_ids][sequence.num_output :][:num_drafts]
            return [(token_id + 1) % vocab_size for token_id in truth]

        return ScriptedProposer(at_random if drafts == "random" else wrong)

    def generate(
        self, prompts: Sequence[tuple[Sequence[int], Sequence[int], SamplingParams]]
    ) -> list[list[int]]:
        """What follows each prompt and the output that it has already, all at once."""
        outputs: dict[SequenceId, list[int]] = {}
        for prompt_ids, output_ids, params in prompts:
            seq_id = SequenceId(next(self._ids))
            outputs[seq_id] = []
            spec = SequenceSpec(seq_id, "", 1, tuple(prompt_ids), tuple(output_ids), params)
            self.engine.add(spec)
        while self.engine.has_work:
            for event in self.engine.step()[0]:
                assert isinstance(event, SequenceOutput), event
                outputs[event.seq_id] += event.token_ids
                self.counts[event.seq_id] = event.counts
        self.pool.check()
        assert self.pool.counts().in_use == 0
        return list(outputs.values())

    @property
    def acceptance(self) -> float:
        speculation = self.engine.statistics().speculation
        assert speculation is not None
        return speculation.num_accepted_tokens / max(1, speculation.num_draft_tokens)
