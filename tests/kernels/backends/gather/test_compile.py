"""collect compiled for sm_90 by Triton's offline target: what an interpreter does not know."""

import re

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from expertd_kernels.backends.gather import device_code  # noqa: E402

pytestmark = pytest.mark.usefixtures("kept_triton_cache")
KINDS = {
    device_code.WIDENED: ("*bf16", "*i32", "*i32"),
    device_code.AS_CODES: ("*u8", "*fp32", "*i32"),
    device_code.FROM_STAGED: ("*u8", "*fp32", "*bf16"),
}
"""Types of hidden, scales and staged."""


def ptx(what, H=2048):
    types = ["*i64", *KINDS[what], "*i32", "*fp32", "*i32"]
    constants = {"H": H, "K": 8, "BLOCK_H": triton.next_power_of_2(H), "BLOCK_K": 8, "HIDDEN": what}
    kernel = device_code.collect
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    given = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
    source = ASTSource(kernel, signature, given, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


@pytest.mark.parametrize("what", [device_code.WIDENED, device_code.AS_CODES])
def test_rows_are_read_by_elements_since_they_may_lie_anywhere(what):
    """16 of each type a thread; what is asked for together is on its way together."""
    text = ptx(what)
    assert "ld.global.v4" not in text
    assert len(re.findall(r"ld\.global\.b8", text)) == 16
    assert len(re.findall(r"ld\.global\.b16", text)) >= 2 * 16
    assert len(re.findall(r"ld\.global\.b32", text)) >= 16


def test_staged_rows_are_those_of_the_device():
    text = ptx(device_code.FROM_STAGED)
    assert len(re.findall(r"ld\.global\.v4", text)) == 2
    assert "ld.global.b8" not in text, "the table's addresses of hidden states are read"
    assert text.count("e4m3x2") == 8
