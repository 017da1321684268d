"""Numbers as people write them: both ways, and what is refused."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.common.ranges import LIMIT, format_ranges, merged, parse_ranges, runs


@given(st.sets(st.integers(0, 200), min_size=1))
def test_the_text_of_numbers_means_them(numbers: set[int]) -> None:
    assert parse_ranges(format_ranges(numbers)) == tuple(sorted(numbers))


def test_by_hand() -> None:
    assert parse_ranges("0-3,7, 9 - 10") == (0, 1, 2, 3, 7, 9, 10)
    assert parse_ranges("7,0-2,1-3") == (0, 1, 2, 3, 7)
    assert parse_ranges(f"{LIMIT - 1}") == (LIMIT - 1,)
    assert format_ranges([7, 3, 2, 1, 0, 70]) == "0-3,7,70"
    assert format_ranges([]) == ""
    assert runs({7, 0, 1, 2}) == [(0, 2), (7, 7)]


@pytest.mark.parametrize("text", ["", "3-1", "a", "-1", "1-", "1,,2", "1.5", "٣", "0-9999999999999"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="want numbers and ranges as 0-3,7"):
        parse_ranges(text)


@pytest.mark.parametrize("text", ["0-99999999999", "0-2000000", str(LIMIT)])
def test_numbers_that_would_fill_the_memory(text: str) -> None:
    with pytest.raises(ValueError, match=r"want numbers below 2\^20"):
        parse_ranges(text)


def test_ranges_that_are_written_again_and_again_cost_nothing() -> None:
    begun = time.process_time()
    assert len(parse_ranges(",".join(["0-1048575"] * 4096))) == 1 << 20
    with pytest.raises(ValueError, match="1048576 numbers, want at most 1000"):
        parse_ranges(",".join(["0-1048575"] * 4096), most=1000)
    assert time.process_time() - begun < 5, "expanded one by one it takes minutes"
    with pytest.raises(ValueError, match="at most 4096 ranges"):
        parse_ranges(",".join(["0-1048575"] * 4097))
    with pytest.raises(ValueError, match="want numbers and ranges") as said:
        parse_ranges("0," * 4000 + "x")
    assert len(str(said.value)) < 200, "what was got is cut"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=20))
def test_ranges_that_meet_or_overlap_are_one(found: list[tuple[int, int]]) -> None:
    pairs = merged((first, first + more) for first, more in found)
    numbers = {n for first, more in found for n in range(first, first + more + 1)}
    assert pairs == runs(numbers)
    assert parse_ranges(",".join(f"{first}-{first + more}" for first, more in found)) == tuple(sorted(numbers))


def test_as_many_numbers_and_ranges_as_are_wanted_and_no_more() -> None:
    assert len(parse_ranges("0-9", most=10)) == 10
    with pytest.raises(ValueError, match="10 numbers, want at most 9"):
        parse_ranges("0-9", most=9)
    assert parse_ranges(",".join(["1"] * 4096)) == (1,)
    with pytest.raises(ValueError, match="at most 4096 ranges"):
        parse_ranges(",".join(["1"] * 4097))
