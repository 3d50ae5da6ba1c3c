"""The arithmetic of engine/flops.py beside torch's own count and the weights that are loaded."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.tiny_models import VOCAB_SIZE, TinyModel
from torch.utils.flop_counter import FlopCounterMode

from common.types import KVLayout
from engine.flops import ModelCosts, model_costs
from engine.models.config import read_entry

Tiny = Callable[[str], TinyModel]
NUM_TOKENS = 33


def costs_of(model: TinyModel) -> ModelCosts:
    config = read_entry(model.entry).config
    layout = KVLayout(
        num_layers=config.num_layers,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype="float32",
        model_fingerprint="f",
    )
    return model_costs(config, 4, layout)


@pytest.mark.parametrize("name", ["llama-tied-mha", "mistral", "qwen3"])
def test_flops_are_those_that_torch_counts(tiny: Tiny, name: str) -> None:
    """Of the whole square of attention, which is what torch computes; logits of all positions."""
    model = tiny(name)
    costs = costs_of(model)
    token_ids = torch.arange(NUM_TOKENS)[None] % VOCAB_SIZE
    reference = copy.deepcopy(model.reference)
    reference.set_attn_implementation("eager")  # the other ways are not counted
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(token_ids)
    ours = NUM_TOKENS * (costs.token_flops + costs.logits_flops) + NUM_TOKENS**2 * costs.pair_flops
    assert counter.get_total_flops() == ours


@pytest.mark.parametrize("name", ["llama-tied-mha", "mistral", "qwen3"])
def test_bytes_are_those_of_the_matrices(tiny: Tiny, name: str) -> None:
    model = tiny(name)
    costs = costs_of(model)
    parameters = dict(model.reference.named_parameters())
    matrices = {name: p for name, p in parameters.items() if p.dim() == 2}
    embedding = matrices.pop("model.embed_tokens.weight")
    head = matrices.pop("lm_head.weight", embedding)
    assert costs.layer_bytes == sum(p.nbytes for p in matrices.values())
    assert costs.head_bytes == head.nbytes
