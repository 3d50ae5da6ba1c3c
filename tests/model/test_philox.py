"""The noise is what its specification says, to the bit."""

import math

import numpy as np
import pytest

from engine.philox import MAX_GUMBEL, MIN_GUMBEL, gumbel, philox4x32, uniform, words

# Known answers published with Random123 (kat_vectors, philox4x32 with 10 rounds).
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)[:, None]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox4x32(column(counter), column(key))[:, 0].tolist() == expected


def test_key_is_the_seed_and_counter_is_group_and_position() -> None:
    seed, position, group = 0x0123456789ABCDEF, 0x1_0000_0002, 7
    expected = philox4x32(column([group, 2, 1, 0]), column([0x89ABCDEF, 0x01234567]))
    one = np.array([seed], np.uint64), np.array([position], np.uint64)
    random = words(*one, np.array([3, group], np.uint64))
    assert random[:, 1].tolist() == expected[:, 0].tolist()


def test_noise_of_the_ends_is_finite_and_within_its_bounds() -> None:
    ends = np.array([0, 2**32 - 1], np.uint64)
    u = uniform(ends)
    assert u.dtype == np.float32
    assert u[0] == 2.0**-24
    assert u[1] == 1 - 2.0**-24
    low, high = gumbel(ends).tolist()
    assert MIN_GUMBEL < low < -2.81
    assert 16.63 < high < MAX_GUMBEL


def test_gumbel_has_its_mean_and_variance() -> None:
    one = np.array([42], np.uint64)
    noise = gumbel(words(one, one, np.arange(50_000, dtype=np.uint64)))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
