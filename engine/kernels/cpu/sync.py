"""How the threads of a team share a step: items of work, taken one by one, phase by phase.

A phase ends when all its items are done, not when all threads have come: a thread whose core was
taken away holds up the others for one item at most, and one that comes late finds nothing left to
take. Each phase has a cache line of shared int64 words, zeroed before a step: 0 counts items taken,
1 items done. A thread that waits lets others have its core after a while, since where cores are
fewer than threads it may be waiting for one of them.
"""

from numba import njit

from engine.kernels.cpu.simd import atomic_add, atomic_load, yield_core

WORDS = 8  # int64 of a phase: a cache line
_LINE = 8 * WORDS
_SPINS = 5_000


@njit(nogil=True, cache=True)
def take(words, phase):
    """The next item of a phase that nobody has taken; there may be none."""
    return atomic_add(words + _LINE * phase, 1)


@njit(nogil=True, cache=True)
def done(words, phase):
    """One item, that this thread took, is done."""
    atomic_add(words + _LINE * phase + 8, 1)


@njit(nogil=True, cache=True)
def wait(words, phase, num_items):
    """Returns when all items of a phase are done."""
    spins = 0
    while atomic_load(words + _LINE * phase + 8) < num_items:
        spins += 1
        if spins > _SPINS:
            yield_core()
