"""Single flight: of sequences with the same new prefix, one computes it and the others wait for it.

1. lead      a sequence is admitted: it *leads* every full block that it is about to compute
2. follow    another comes to the head of its line, and the block after its hits has a leader: it
             steps out of the line, until the last block that they have in common is indexed
3. advance   the leader's blocks are indexed: those who waited for them take their old place in the
             line, which is the first of their age, and hit
4. land      the leader ended, failed or was preempted before that: they go back all the same, and
             the oldest of them leads

A leader is running, so it has tokens in every step or ends; followers wait for nothing else, and
nobody follows a follower. So no two can wait for each other, and whoever is back in line has either
more hits than before or one leader less in the world. Keys are compared, not contents: with keys
that collide somebody waits in vain, and then computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.block_keys import BlockKey
from common.types import SequenceId
from engine.sequence import Sequence


@dataclass(slots=True)
class _Flight:
    """Blocks ``first .. end - 1`` of the leader are not indexed yet. ``followers`` come with the
    number of the block that each waits for."""

    first: int
    end: int
    followers: list[tuple[int, Sequence]] = field(default_factory=list)


class SingleFlight:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leaders: dict[BlockKey, Sequence] = {}
        self._flights: dict[SequenceId, _Flight] = {}
        # Whom each follower follows.
        self._followed: dict[SequenceId, SequenceId] = {}

    @property
    def num_followers(self) -> int:
        return len(self._followed)

    def lead(self, sequence: Sequence) -> None:
        """Its blocks from ``num_indexed`` on are about to be computed."""
        end = len(sequence.token_ids) // self._block_size
        if not _takes_part(sequence) or sequence.num_indexed >= end:
            return
        flight = _Flight(sequence.num_indexed, end)
        self._flights[sequence.seq_id] = flight
        for key in _keys(sequence, flight.first, flight.end):
            self._leaders.setdefault(key, sequence)

    def follow(self, sequence: Sequence, num_hits: int) -> bool:
        """Has the sequence, ``num_hits`` of whose blocks are cached, wait for a leader, if any."""
        if not self._leaders or not _takes_part(sequence):
            return False
        end = len(sequence.token_ids) // self._block_size
        leader: Sequence | None = None
        last = num_hits
        for number, key in enumerate(_keys(sequence, num_hits, end), start=num_hits):
            if key not in self._leaders:
                break
            leader, last = self._leaders[key], number
        if leader is None:
            return False
        self._flights[leader.seq_id].followers.append((last, sequence))
        self._followed[sequence.seq_id] = leader.seq_id
        return True

    def unfollow(self, sequence: Sequence) -> None:
        """It waits no longer: it was aborted."""
        flight = self._flights[self._followed.pop(sequence.seq_id)]
        flight.followers = [entry for entry in flight.followers if entry[1] is not sequence]

    def advance(self, sequence: Sequence) -> list[Sequence]:
        """More blocks of the sequence are indexed; returns those who waited for them."""
        flight = self._flights.get(sequence.seq_id)
        if flight is None:
            return []
        if sequence.num_indexed >= flight.end:
            return self.land(sequence)
        self._release_keys(sequence, flight, sequence.num_indexed)
        ready = [follower for number, follower in flight.followers if number < flight.first]
        flight.followers = [entry for entry in flight.followers if entry[0] >= flight.first]
        return self._freed(ready)

    def land(self, sequence: Sequence) -> list[Sequence]:
        """The sequence leads nobody any more; returns all who waited for it."""
        flight = self._flights.pop(sequence.seq_id, None)
        if flight is None:
            return []
        self._release_keys(sequence, flight, flight.end)
        return self._freed([follower for _, follower in flight.followers])

    def _release_keys(self, sequence: Sequence, flight: _Flight, until: int) -> None:
        for key in _keys(sequence, flight.first, until):
            if self._leaders.get(key) is sequence:
                del self._leaders[key]
        flight.first = until

    def _freed(self, followers: list[Sequence]) -> list[Sequence]:
        for follower in followers:
            del self._followed[follower.seq_id]
        return followers


def _takes_part(sequence: Sequence) -> bool:
    """Prompt log-probabilities need every position computed, whatever is cached."""
    return sequence.chain is not None and not sequence.wants_prompt_logprobs


def _keys(sequence: Sequence, first: int, end: int) -> Iterator[BlockKey]:
    assert sequence.chain is not None
    for number in range(first, end):
        yield sequence.chain.entry(number, sequence.token_ids)[0]
