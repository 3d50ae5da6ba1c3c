"""The model's arithmetic against a case computed by hand, and against what a model really does."""

from dataclasses import replace

import pytest
from support.engines import GREEDY, Rig, spec_of

from common.types import ChunkRecord, KVLayout, SequenceId, StepRecord
from engine.flops import Cost, ModelCosts, chunk_cost, decode_cost, model_costs, prefill_cost
from engine.models.config import ModelConfig, RopeConfig

# Two layers of hidden size 8: 2 heads of 4, 1 KV head, inner size 12, vocabulary 10.
CONFIG = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tied_head=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig("default", 10000.0),
)
LAYOUT = KVLayout(
    num_layers=2, block_size=4, num_kv_heads=1, head_size=4, dtype="float32", model_fingerprint="m"
)
# By hand: q 8x8, k 8x4, v 8x4, o 8x8 = 192; gate, up and down 8x12 each = 288; 480 a layer.
LAYER_WEIGHTS = 2 * 480
HEAD_WEIGHTS = 8 * 10
# A pair: q.k over 2 heads of 4 values, and p.v as much, two FLOPs each, in 2 layers.
PAIR_FLOPS = 2 * (2 * 4 + 2 * 4) * 2
# Keys and values of 4 values in 2 layers, 4 bytes each.
KV_BYTES = 2 * 4 * 2 * 4


@pytest.fixture
def costs() -> ModelCosts:
    return model_costs(CONFIG, 4, LAYOUT)


def test_units(costs: ModelCosts) -> None:
    assert costs == ModelCosts(
        token_flops=2 * LAYER_WEIGHTS,
        pair_flops=PAIR_FLOPS,
        logits_flops=2 * HEAD_WEIGHTS,
        layer_bytes=4 * LAYER_WEIGHTS,
        head_bytes=4 * HEAD_WEIGHTS,
        kv_bytes=KV_BYTES,
    )


def test_a_mixed_step_by_hand(costs: ModelCosts) -> None:
    """A chunk of 3 tokens at position 5 in mid-prompt, and two decodes that see 7 and 9 tokens."""
    chunk = ChunkRecord(SequenceId(1), start=5, num_tokens=3)
    step = StepRecord(1, 0.0, 1.0, 3, 2, 3, (chunk,), num_decode_context=7 + 9)
    # The chunk's tokens see 6, 7 and 8; three rows share the layers, two the head.
    assert chunk_cost(costs, step, chunk) == Cost(
        3 * 2 * LAYER_WEIGHTS + (6 + 7 + 8) * PAIR_FLOPS,
        (8 + 3) * KV_BYTES + 4 * LAYER_WEIGHTS / 3,
    )
    decodes = decode_cost(costs, step)
    assert decodes.flops == 2 * (2 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS) + (7 + 9) * PAIR_FLOPS
    assert decodes.num_bytes == pytest.approx(
        (7 + 1 + 9 + 1) * KV_BYTES + 2 * (4 * LAYER_WEIGHTS / 3 + 4 * HEAD_WEIGHTS / 2)
    )
    whole = prefill_cost(costs, step) + decodes
    kv = (8 + 3 + 16 + 2) * KV_BYTES
    assert whole.num_bytes == pytest.approx(4 * (LAYER_WEIGHTS + HEAD_WEIGHTS) + kv)
    assert whole.intensity == pytest.approx(whole.flops / whole.num_bytes)


def test_a_step_without_logits_reads_no_head(costs: ModelCosts) -> None:
    chunk = ChunkRecord(SequenceId(1), start=0, num_tokens=2)
    step = StepRecord(1, 0.0, 1.0, 2, 0, 1, (chunk,))
    assert prefill_cost(costs, step).num_bytes == 4 * LAYER_WEIGHTS + (2 + 2) * KV_BYTES
    assert decode_cost(costs, step) == Cost()
    assert Cost().intensity == 0.0


def test_a_prompt_costs_the_same_in_one_chunk_or_three(costs: ModelCosts) -> None:
    """The FLOPs: every token sees the same tokens. Weights are read once a chunk."""
    parts = [costs.row(0, 5, 0), costs.row(5, 2, 0), costs.row(7, 4, 1)]
    assert sum(part.flops for part in parts) == costs.row(0, 11, 1).flops
    decodes = costs.decodes(2, 12 + 13)
    assert decodes == costs.row(11, 1, 1) + costs.row(12, 1, 1)


def test_what_the_engine_records() -> None:
    """A prompt of 10 in chunks of 4, then 5 tokens more, whose decodes see 11 to 14 tokens."""
    rig = Rig(max_num_batched_tokens=4)
    rig.run(spec_of(range(10), replace(GREEDY, max_tokens=5)))
    chunks = [chunk for record in rig.records for chunk in record.chunks]
    assert [(c.start, c.num_tokens, c.num_logits) for c in chunks] == [
        (0, 4, 0),
        (4, 4, 0),
        (8, 2, 1),
    ]
    contexts = [record.num_decode_context for record in rig.records if record.num_decode_tokens]
    assert contexts == [11, 12, 13, 14]
