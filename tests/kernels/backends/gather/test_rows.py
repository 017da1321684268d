"""collect, deliver and signal in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from interpreted import interpreted
from rows_cases import CASES


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing."""
    with interpreted("rows_cases.py") as ask:
        yield lambda name: ask(name)["failed"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_in_the_interpreter(interpreter, name):
    failed = interpreter(name)
    assert not failed, failed
