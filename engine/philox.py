"""Counter-based noise: the Gumbel variate of (seed, position, token id), the same everywhere.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), section 3.3. The key is the 64-bit seed, the counter (id // 4, position low, position
high, 0); one evaluation gives four words, one for each of four neighbouring ids. Invariant I3 of
docs/design.md: nothing else goes into the noise, so a sequence goes on anywhere as it would have.
"""

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]

IDS_PER_COUNTER = 4
# Bounds of -ln(-ln u) over every u that `uniform` can give.
MIN_GUMBEL = -2.82
MAX_GUMBEL = 16.64

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_NUM_ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counter: UInt64s, key: UInt64s) -> UInt64s:
    """Words ``[4, n]`` of counters ``[4, n]``, which they replace, under keys ``[2, n]`` or one
    key ``[2, 1]``. Each element holds 32 bits in 64, for the products."""
    c0, c1, c2, c3 = counter
    product0, product1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(_NUM_ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=product0)
        np.multiply(c2, _MULTIPLIERS[1], out=product1)
        np.right_shift(product1, _WORD_BITS, out=c0)
        c0 ^= c1
        c0 ^= key[0]
        np.right_shift(product0, _WORD_BITS, out=c2)
        c2 ^= c3
        c2 ^= key[1]
        np.bitwise_and(product1, _LOW_WORD, out=c1)
        np.bitwise_and(product0, _LOW_WORD, out=c3)
        key = (key + _KEY_STEPS) & _LOW_WORD
    return counter


def words(seeds: UInt64s, positions: UInt64s, groups: UInt64s) -> UInt64s:
    """Random words ``[4, n]``: column i is of the ids ``4 * groups[i] + (0, 1, 2, 3)``.

    ``groups`` is ``[n]``; ``seeds`` and ``positions`` are ``[n]``, or ``[1]`` for one sequence.
    """
    counter = np.zeros((4, len(groups)), np.uint64)
    counter[0] = groups
    counter[1] = positions & _LOW_WORD
    counter[2] = positions >> _WORD_BITS
    return philox4x32(counter, np.stack((seeds & _LOW_WORD, seeds >> _WORD_BITS)))


def uniform(random: UInt64s) -> Float32s:
    """Words to u in (0, 1): 23 bits and a half, since with 24 fp32 would round the greatest u to 1
    and its Gumbel variate to infinity."""
    return ((random >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)


def gumbel(random: UInt64s) -> Float32s:
    """Words to Gumbel variates -ln(-ln u), fp32."""
    noise: Float32s = -np.log(-np.log(uniform(random)))
    return noise
