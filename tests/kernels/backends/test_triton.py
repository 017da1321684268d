"""The row `triton` in Triton's interpreter: every scheme and feature at tiny sizes, against the float32 reference."""

import pytest
from interpreted import interpreted
from triton_cases import SMALL


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> the case's answer."""
    with interpreted("triton_cases.py") as ask:
        yield ask


@pytest.mark.parametrize("name", SMALL)
def test_a_layer_agrees_with_the_reference(interpreter, name):
    answer = interpreter(name)
    assert "failed" not in answer, answer["failed"]
    assert answer["unpacked"] == "", f"unpack(pack(w)) differs in {answer['unpacked']}"
    assert answer["relative_error"] <= answer["tolerance"]
    assert answer["own_error"] <= 1e-2
    assert answer["repeated"], "a second call gave other bits"  # where the case makes one: triton_cases.calls_of
