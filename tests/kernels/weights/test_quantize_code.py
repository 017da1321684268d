"""The kernels that quantize on a GPU: their bits in Triton's interpreter, and that their arithmetic is IEEE's when they
are compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

from interpreted import interpreted
from quantize_cases import CASES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from expertd_kernels.weights import quantize_code


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing."""
    with interpreted("quantize_cases.py") as ask:
        yield lambda name: ask(name)["failed"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_in_the_interpreter(interpreter, name):
    failed = interpreter(name)
    assert not failed, failed


INT4 = {"w": "*i16", "codes": "*u8", "scales": "*i16", "blocks": "i32", **{f"d{i}": "fp32" for i in range(5)}}
MXFP4 = {"w": "*i16", "codes": "*u8", "scales": "*u8", "blocks": "i32"}


@pytest.mark.parametrize(
    ("kernel", "arguments", "constants"),
    [
        (quantize_code.int4_kernel, INT4, {"C": 128, "BLOCKS": 16}),
        (quantize_code.mxfp4_kernel, MXFP4, {"BLOCKS": 64}),
    ],
    ids=["int4", "mxfp4"],
)
def test_no_step_is_fused_or_approximate(kernel, arguments, constants):
    source = ASTSource(kernel, arguments | dict.fromkeys(constants, "constexpr"), constants)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, "num_warps": 4})
    steps = set(re.findall(r"^\s+(?:@\S+ )?((?:add|sub|mul|div|fma|mad)\.\S*f32)", made.asm["ptx"], re.M))
    assert steps == {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"}
    assert ".ftz" not in made.asm["ptx"]
