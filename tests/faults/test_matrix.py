"""The table of docs/reliability.md is that of the tests' markers, and no row is without proof."""

from faults.matrix import PAGE, marked_tests, rendered
from faults.rows import ROWS


def test_every_row_has_a_test_or_a_reason() -> None:
    tests = marked_tests()
    assert [row for row, about in ROWS.items() if not tests[row] and not about.why_not] == []
    assert [row for row, about in ROWS.items() if tests[row] and about.why_not] == []


def test_markers_name_rows_that_exist() -> None:
    assert set(marked_tests()) <= set(ROWS)


def test_all_rows_of_the_list_are_there() -> None:
    assert list(ROWS) == [f"F{i}" for i in range(1, 39)] + [f"V{i}" for i in range(1, 26)]


def test_the_page_has_not_drifted() -> None:
    """If this fails: PYTHONPATH=.:tests python -m faults.matrix"""
    page = PAGE.read_text()
    assert page == rendered(page)
