"""Routes counted and placed by chunks in Triton's interpreter, and inputs rounded to their places."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from interpreted import interpreted
from w8a8_prepare_cases import CASES


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing."""
    with interpreted("w8a8_prepare_cases.py") as ask:
        yield lambda name: ask(name)["failed"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_in_the_interpreter(interpreter, name):
    failed = interpreter(name)
    assert not failed, failed
