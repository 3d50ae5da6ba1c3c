"""A model's own arithmetic: the FLOPs a step needs and the bytes it must move, from the config.

Counted as by hand, not measured (two FLOPs a multiply-add, as Kaplan et al. 2020, section 2.1, and
the roofline model of Williams, Waterman, Patterson 2009 count them)::

    FLOPs = tokens  x 2 x weights of the linear layers
          + pairs   x 4 x heads x head size x layers     q.k and p.v, a (token, token seen) pair
          + logits  x 2 x hidden size x vocabulary       only rows that are sampled or scored
    bytes = weights of the linear layers, once a step
          + weights of the head, once a step that has logits
          + KV of the tokens seen, read once a row; KV of the new tokens, written

Norms, rotary embedding, softmax and activations are left out: below one per cent. A step serves
many sequences; the weights that it reads are shared evenly among those that need them, so the
shares of all its rows sum up to the step.
"""

from dataclasses import dataclass

from common.types import ChunkRecord, KVLayout, StepRecord
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes of some work; shares of bytes need not be whole."""

    flops: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.num_bytes + other.num_bytes)

    @property
    def intensity(self) -> float:
        """FLOPs a byte; 0 for no work."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What one unit of each kind of work costs. All zero: a model that computes nothing.

    ``token_flops``: linear layers, a token. ``pair_flops``: attention of one token to one.
    ``logits_flops``: the head, a row. Bytes: ``layer_bytes`` and ``head_bytes`` of the weights, and
    ``kv_bytes`` of one token in all layers.
    """

    token_flops: int = 0
    pair_flops: int = 0
    logits_flops: int = 0
    layer_bytes: int = 0
    head_bytes: int = 0
    kv_bytes: int = 0

    def row(self, start: int, num_tokens: int, num_logits: int) -> Cost:
        """Of one row without its share of the weights: the tokens at ``start`` to ``start +
        num_tokens - 1``, each of which sees all before it and itself."""
        end = start + num_tokens
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return self._work(num_tokens, num_pairs, num_logits, num_read=end)

    def decodes(self, num_rows: int, num_context: int) -> Cost:
        """Of decode rows without their share of the weights: one token and one row of logits each,
        which see ``num_context`` tokens in all."""
        return self._work(num_rows, num_context, num_rows, num_read=num_context)

    def drafts(self, num_drafts: int, num_context: int) -> Cost:
        """What drafts add to the decode rows that they are verified in: the row has read the KV."""
        return self._work(num_drafts, num_context, num_drafts, num_read=0)

    def _work(self, num_tokens: int, num_pairs: int, num_logits: int, num_read: int) -> Cost:
        return Cost(
            num_tokens * self.token_flops
            + num_pairs * self.pair_flops
            + num_logits * self.logits_flops,
            (num_read + num_tokens) * self.kv_bytes,
        )

    def weight_share(self, step: StepRecord, has_logits: bool) -> float:
        """Bytes of weights that fall to one row of a step."""
        share = self.layer_bytes / step.num_sequences
        return share + self.head_bytes / step.num_rows_with_logits if has_logits else share


def model_costs(config: ModelConfig, weight_itemsize: float, layout: KVLayout) -> ModelCosts:
    """``weight_itemsize``: bytes a weight as it lies in memory."""
    attended = config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    # q, k, v and output; gate, up and down.
    of_layer = config.hidden_size * (attended + 2 * kv_size + attended)
    of_layer += 3 * config.hidden_size * config.intermediate_size
    in_layers = config.num_layers * of_layer
    in_head = config.hidden_size * config.vocab_size
    return ModelCosts(
        token_flops=2 * in_layers,
        pair_flops=4 * attended * config.num_layers,
        logits_flops=2 * in_head,
        layer_bytes=round(in_layers * weight_itemsize),
        head_bytes=round(in_head * weight_itemsize),
        kv_bytes=layout.block_bytes // layout.block_size,
    )


def costs_without_weights(layout: KVLayout) -> ModelCosts:
    """Of the models that move KV and compute nothing."""
    return ModelCosts(kv_bytes=layout.block_bytes // layout.block_size)


def chunk_cost(costs: ModelCosts, step: StepRecord, chunk: ChunkRecord) -> Cost:
    """Of one of the step's chunks, with its share of the weights."""
    share = costs.weight_share(step, has_logits=chunk.num_logits > 0)
    return costs.row(chunk.start, chunk.num_tokens, chunk.num_logits) + Cost(0.0, share)


def prefill_cost(costs: ModelCosts, step: StepRecord) -> Cost:
    """Of all the step's chunks."""
    return sum((chunk_cost(costs, step, chunk) for chunk in step.chunks), Cost())


def decode_cost(costs: ModelCosts, step: StepRecord) -> Cost:
    """Of all the step's decodes, with their share of the weights."""
    num_rows = step.num_decode_tokens
    if num_rows == 0:
        return Cost()
    rows = costs.decodes(num_rows, step.num_decode_context)
    rows += costs.drafts(step.num_draft_tokens, step.num_draft_context)
    share = costs.weight_share(step, has_logits=True)
    return rows + Cost(0.0, num_rows * share)
