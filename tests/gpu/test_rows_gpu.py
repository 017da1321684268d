"""collect, deliver and signal on a GPU, with callers' memory pinned: the cases of the interpreter, rounding exact."""

import pytest

pytest.importorskip("triton")

from rows_cases import CASES, GPU

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_a_case_on_the_device(name):
    if not GPU:
        pytest.skip("runs on an accelerator, this machine has none")
    CASES[name]()
