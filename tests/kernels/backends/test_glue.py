"""The kernels around other packages' GEMMs in Triton's interpreter, alone and in layers of the rows that use them."""

import pytest
from glue_cases import CASES
from interpreted import interpreted


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing."""
    with interpreted("glue_cases.py") as ask:
        yield lambda name: ask(name)["failed"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_in_the_interpreter(interpreter, name):
    failed = interpreter(name)
    assert not failed, failed
