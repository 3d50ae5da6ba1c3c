"""The tie rule itself: what it lets pass, and what it does not."""

import pytest
from support.parity import Golden, ParityCheck

GOLDEN = Golden("g", [1], [10, 11, 12, 13], [20, 21, 22, 23], [5.0] * 4, [4.0, 4.9995, 4.0, 4.0])


def test_equal_ids() -> None:
    check = ParityCheck()
    assert check.compare(GOLDEN, [10, 11, 12, 13]) is None
    check.finish()
    assert check.num_compared == 4


def test_a_tie_is_printed_and_the_comparison_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    check = ParityCheck()
    assert check.compare(GOLDEN, [10, 21, 7, 7]) == 2
    assert check.compare(GOLDEN, [12, 13], 2) is None
    check.finish()
    assert "tie: g[1]: 21 instead of 11" in capsys.readouterr().out


@pytest.mark.parametrize("ids", [[10, 22, 12, 13], [20, 11, 12, 13], [10, 11, 12], []])
def test_what_is_no_tie_fails(ids: list[int]) -> None:
    """Not the reference's second; second but far behind; too few."""
    with pytest.raises(AssertionError, match=r"g:|not a tie"):
        ParityCheck().compare(GOLDEN, ids)


def test_too_many_ties_fail() -> None:
    check = ParityCheck()
    for _ in range(2):
        check.compare(GOLDEN, [10, 21, 0, 0])
    with pytest.raises(AssertionError, match="2 ties in 4 tokens"):
        check.finish()
