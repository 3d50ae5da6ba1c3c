"""Proposers that know too much, or too little: what tests put in the place of a real one."""

import random
from collections.abc import Callable, Sequence

from support.engines import VOCAB_SIZE, right_ids

from common.types import SequenceId, TokenId
from engine.sequence import Sequence as EngineSequence
from engine.speculation.proposer import Ask

# From a sequence and a number to that many drafts.
Guess = Callable[[EngineSequence, int], Sequence[TokenId]]


class ScriptedProposer:
    """Proposes what ``guess`` says, for every sequence and always."""

    name = "scripted"

    def __init__(self, guess: Guess, is_free: bool = False) -> None:
        self.is_free = is_free
        self.forgotten: list[SequenceId] = []
        self.asked: list[int] = []
        self._guess = guess

    def reach(self, sequence: EngineSequence, limit: int) -> int:
        return limit

    def prepare(self, asks: Sequence[Ask], num_tokens: int) -> list[Ask]:
        return list(asks)

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[TokenId]]:
        self.asked += [ask.num_drafts for ask in asks]
        return [self._guess(ask.sequence, ask.num_drafts) for ask in asks]

    def forget(self, seq_id: SequenceId) -> None:
        self.forgotten.append(seq_id)


def truth(sequence: EngineSequence, num_drafts: int) -> list[TokenId]:
    """What the oracle will say next, by its reference."""
    spec = sequence.spec
    start = sequence.num_output - len(spec.output_ids)
    return right_ids(spec)[start : start + num_drafts]


def perfect() -> ScriptedProposer:
    return ScriptedProposer(truth)


def always_wrong() -> ScriptedProposer:
    def guess(sequence: EngineSequence, num_drafts: int) -> list[TokenId]:
        return [(token_id + 1) % VOCAB_SIZE for token_id in truth(sequence, num_drafts)]

    return ScriptedProposer(guess)


def noisy(seed: int, rate: float) -> ScriptedProposer:
    """Each draft is right with probability ``rate``, and of a random number of them."""
    rng = random.Random(seed)

    def guess(sequence: EngineSequence, num_drafts: int) -> list[TokenId]:
        drafts = truth(sequence, rng.randint(0, num_drafts))
        return [d if rng.random() < rate else rng.randrange(VOCAB_SIZE) for d in drafts]

    return ScriptedProposer(guess)


def hostile(seed: int) -> ScriptedProposer:
    """Random ids, many of them none; too many, too few."""
    rng = random.Random(seed)

    def guess(sequence: EngineSequence, num_drafts: int) -> list[TokenId]:
        low, high = rng.choice([(0, VOCAB_SIZE - 1), (-5, VOCAB_SIZE + 5), (-(2**63), 2**63)])
        return [rng.randint(low, high) for _ in range(rng.randint(0, num_drafts + 2))]

    return ScriptedProposer(guess)
