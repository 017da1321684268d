"""Whole layers of the rows `gluon_sm90` and `gluon_w8a8` compiled for sm_90 as they are launched, no GPU needed: which
kernels a call starts, that their main loops keep to registers and barriers, and how many CTAs a multiprocessor takes.

test_triton_versions.py runs this file under other versions of Triton."""

import re

import pytest

pytest.importorskip("triton.experimental.gluon")

from dry_gpu import launches, layer

from expertd_kernels.weights.scheme import ActivationQuant

pytestmark = pytest.mark.usefixtures("kept_triton_cache")

SORTED = ["count_routes", "place_routes"]
CASES = [
    # model, scheme, activations, tokens, kernels, least CTAs of a multiprocessor of the two GEMMs
    ("qwen3-30b-a3b", "int4_g128", "none", 1, ["gemv", "gemv"], (7, 3)),
    ("qwen3-30b-a3b", "int4_g128", "none", 8, ["block", "block", "combine"], (5, 5)),
    ("qwen3-30b-a3b", "int4_g128", "none", 128, ["table_routes", "block", "block", "combine"], (6, 6)),
    ("qwen3-30b-a3b", "int4_g128", "none", 256, ["group_few", "both", "combine"], (2,)),
    ("qwen3-30b-a3b", "int4_g128", "none", 1024, [*SORTED, "block", "block", "combine"], (3, 3)),
    ("qwen3-30b-a3b", "int4_g128", "none", 2048, [*SORTED, "both", "combine"], (1,)),
    ("qwen3-30b-a3b", "e4m3_block128", "none", 2048, [*SORTED, "both", "combine"], (1,)),
    ("gpt-oss-120b", "mxfp4", "none", 2, ["gemv", "gemv"], (3, 2)),
    ("qwen3-30b-a3b", "mxfp4", "none", 2, ["gemv", "gemv"], (3, 2)),  # a share of the CTAs, no more
    ("gpt-oss-120b", "mxfp4", "none", 2048, [*SORTED, "block", "block", "combine"], (3, 3)),
    ("qwen3-30b-a3b", "bf16", "none", 1, ["gemv", "gemv"], (3, 1)),
    ("qwen3-30b-a3b", "bf16", "none", 32, ["table_routes", "block", "block", "combine"], (4, 4)),
    ("qwen3-30b-a3b", "bf16", "none", 2048, [*SORTED, "wide", "wide", "combine"], (1, 1)),
    ("qwen3-30b-a3b", "e4m3_block128", "e4m3_group128", 8, ["prepare", "w8a8_few", "w8a8_few", "combine"], (3, 3)),
    ("qwen3-30b-a3b", "e4m3_block128", "e4m3_group128", 256, ["prepare", "w8a8", "w8a8", "combine"], (1, 1)),
    ("qwen3-30b-a3b", "e4m3_block128", "e4m3_group128", 2048,
     [*SORTED, "round_to_places", "w8a8", "w8a8", "combine"], (1, 1)),
    ("qwen3-30b-a3b", "e4m3_channel", "e4m3_token", 8,
     ["prepare", "w8a8_few", "round_rows", "w8a8_few", "combine"], (3, 3)),
]  # fmt: skip
PRODUCTS = ("gemv", "block", "both", "ws", "wide", "w8a8", "w8a8_few")
MOST_BARRIERS = {"block": 5, "ws": 2, "wide": 2, "w8a8": 2}
"""In a stage, where nothing but stages is in the loop.  The persistent kernels need one for the slot that they free."""
MOST_SPILLS = {"w8a8": 4}
"""Accesses of local memory in a main loop: from 3.7 on ptxas reloads up to four numbers of one of four loops."""


def reused_barriers(ttgir: str) -> list[str]:
    """Names of barriers whose shared memory is free for other data before the kernel ends: neither a partition of
    warps uses them nor is their end written down."""
    names = re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\S*xi64,", ttgir)
    kept = re.findall(r"ttg\.(?:warp_specialize|local_dealloc)[( ](.*)", ttgir)
    return [name for name in names if not any(re.search(rf"{re.escape(name)}\b", line) for line in kept)]


MANY = 1024
"""Tokens from which on a call is compiled in `make soak`: its kernels take longest, and test_compile.py of each row has
one of each."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=f"{c[1]}-{c[2]}-{c[0]}-{c[3]}", marks=[pytest.mark.soak] if c[3] >= MANY else [])
        for c in CASES
    ],
)
def test_a_call_compiles(case, tmp_path):
    model, scheme, rounding, tokens, kernels, least = case
    found = launches(layer(model, scheme, ActivationQuant(rounding)), model, tokens)
    assert [launch.kernel for launch in found] == kernels
    for launch in found:
        assert launch.compiled.metadata.shared <= 227 * 1024
    for launch in found:
        if launch.kernel not in PRODUCTS:
            assert launch.registers(tmp_path)[1] == 0, f"{launch.kernel} spills"
    gemms = [launch for launch in found if launch.kernel in PRODUCTS]
    for launch in gemms:
        assert not reused_barriers(launch.compiled.asm["ttgir"]), f"{launch.kernel}: see triton_versions.keep_alive"
    for launch, ctas in zip(gemms, least, strict=True):
        loops = launch.loops(tmp_path)
        assert loops or launch.kernel == "gemv", "no loop has products: is the disassembly read rightly?"
        assert launch.ctas(tmp_path) >= ctas
        assert max((loop.spills for loop in loops), default=0) <= MOST_SPILLS.get(launch.kernel, 0)
        if launch.kernel in MOST_BARRIERS:
            stages = min(loops, key=lambda loop: loop.instructions)
            assert stages.barriers <= MOST_BARRIERS[launch.kernel]
