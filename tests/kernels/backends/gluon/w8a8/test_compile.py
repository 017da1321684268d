"""The w8a8 kernels compiled for sm_90 by Triton's offline target, no GPU needed: they compile, keep to their registers,
spill next to nothing, and ptxas leaves their wgmma instructions asynchronous."""

import re

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from ptxas import assembled, disassembled, predicated_sums  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from expertd_kernels.backends.gluon.w8a8.constants import Gemm8, tile8, tile_few  # noqa: E402
from expertd_kernels.backends.gluon.w8a8.plan import Few8, Plan8  # noqa: E402
from expertd_kernels.backends.gluon.w8a8.prepare import (  # noqa: E402
    copy_to_places,
    prepare,
    round_rows,
    round_to_places,
)
from expertd_kernels.backends.gluon.w8a8.w8a8 import w8a8  # noqa: E402
from expertd_kernels.backends.gluon.w8a8.w8a8_few import w8a8_few  # noqa: E402

REGISTERS = 65536
"""Of an SM; a CTA of these kernels has one to itself."""


pytestmark = pytest.mark.usefixtures("kept_triton_cache")


def gemm(first: bool, grouped: bool, **more) -> Gemm8:
    """Qwen3-30B-A3B's w13 or w2."""
    sizes = {"K": 2048, "segment": 768} if first else {"K": 768, "segment": 2048}
    facts = {"experts": 128, "top_k": 8, "first": first, "grouped": grouped, "weight": False, "bias": False}
    return Gemm8(**(sizes | facts | more))


def compiled(g: Gemm8, plan: Plan8):
    """Triton's compiled kernel of this GEMM under this plan."""
    c = tile8(g, plan, True)
    out = "*fp8e4nv" if g.first and (g.grouped or g.static) else "*bf16"
    x, w = (f"tensordesc<fp8e4nv[{rows}, 128],{c.SB!r}>" for rows in (128, 128))
    types = ["*fp8e4nv", x, "*fp32", w, "*fp32", "*fp32", "*i32", "*i32", "*fp32", out, "*fp32", "*i32", "constexpr"]
    signature = dict(zip(w8a8.arg_names, types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    source = GluonASTSource(w8a8, signature, {(len(types) - 1,): c}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})


def compiled_few(g: Gemm8, plan: Few8, by_route: bool = False):
    """The same of the kernel for few tokens."""
    c = tile_few(g, plan, 64, by_route)
    out = "*fp8e4nv" if g.first and (g.grouped or g.static) else "*fp32" if c.Z > 1 else "*bf16"
    w = f"tensordesc<fp8e4nv[128, 128],{c.SB!r}>"
    pointers = ["*fp8e4nv", "*fp32", w, "*fp32", "*fp32", "*i32", "*i32", "*fp32", out, "*fp32"]
    types = [*pointers, "i32", "constexpr"]
    signature = dict(zip(w8a8_few.arg_names, types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    source = GluonASTSource(w8a8_few, signature, {(len(types) - 1,): c}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})


CASES = [
    # w13 or w2, grouped scales, most bytes spilled (between tiles)
    (True, True, 96),
    (False, True, 64),
    (True, False, 48),
    (False, False, 32),
]


@pytest.mark.parametrize(("first", "grouped", "most_spilled"), CASES)
def test_it_compiles_within_its_registers_and_stays_asynchronous(first, grouped, most_spilled, tmp_path):
    plan = Plan8()
    kernel = compiled(gemm(first, grouped), plan)
    text = assembled(kernel)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    used = re.search(r"Used (\d+) registers", text)
    assert spilled is not None, text
    assert used is not None, text
    assert "wgmma.mma_async instructions are serialized" not in text
    assert int(spilled[1]) <= most_spilled
    lines = disassembled(kernel, tmp_path)
    products = [i for i, line in enumerate(lines) if "QGMMA" in line]
    loops = (8, 8) if not grouped else (8, 8 if first else 4) * 2  # each warpgroup's, of whole and of short blocks
    assert len(products) == sum(loops)
    for loop in loops:
        inside = lines[products[0] : products[loop - 1]]
        products = products[loop:]
        assert not any(" LDL" in line or " STL" in line for line in inside), "the main loop spills"
    assert kernel.metadata.shared <= 232448
    assert 128 * (2 * plan.consumer_registers + plan.producer_registers) <= REGISTERS
    assert 384 * int(used[1]) <= REGISTERS
    assert not predicated_sums(kernel, tmp_path)


def test_the_main_loop_adds_to_fresh_sums_of_128_columns():
    """Each product of 128 columns starts from nothing (predicate false), and is awaited before it is added."""
    ptx = compiled(gemm(True, True), Plan8()).asm["ptx"]
    products = len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx))
    halves = len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n64k32\.f32\.e4m3\.e4m3", ptx))
    assert products == 2 * 2 * 4  # warpgroups, runs of 128 weight rows, columns by 32
    assert halves == products
    assert len(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+0", ptx)) == 2 * 2 * 2


def test_inputs_in_list_order_come_by_bulk_copies_alone():
    kernel = compiled(gemm(True, True), Plan8(listed=True))
    assert "serialized" not in assembled(kernel)
    assert "cp.async.cg" not in kernel.asm["ptx"]


FEW = [
    # w13 or w2, grouped scales, plan, looking for work by route, CTAs an SM
    (True, True, Few8(8, 8, stages=3), True, 2),
    (True, True, Few8(8, 32, stages=3), False, 2),
    (False, True, Few8(8, 16, stages=2), False, 3),
    (False, True, Few8(8, 8, stages=3, parts=3), True, 2),
    (True, False, Few8(8, 16, stages=3), False, 2),
    (False, False, Few8(8, 16, stages=3), False, 2),
]


@pytest.mark.parametrize(("first", "grouped", "plan", "by_route", "ctas"), FEW)
def test_for_few_tokens_several_ctas_fit_an_sm(first, grouped, plan, by_route, ctas):
    more = {"bias": True, "act": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 7.0, "limited": True}
    for facts in ({}, more if first else {"bias": True}):
        kernel = compiled_few(gemm(first, grouped, weight=not first, **facts), plan, by_route)
        text = assembled(kernel)
        assert " 0 bytes spill stores" in text
        assert "serialized" not in text
        used = re.search(r"Used (\d+) registers", text)
        assert used is not None
        assert ctas * 128 * int(used[1]) <= REGISTERS
        assert ctas * (kernel.metadata.shared + 1024) <= 228 * 1024
        assert "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3" in kernel.asm["ptx"]


def test_for_few_tokens_weights_are_asked_for_before_the_wait(tmp_path):
    """The first bulk copies stand before griddepcontrol.wait: they depend on the ids alone."""
    ptx = compiled_few(gemm(True, True), Few8(8, 8), True).asm["ptx"]
    assert 0 < ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait")
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


def test_columns_of_w2_that_its_parts_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="in 4 parts"):
        tile_few(gemm(False, True), Few8(parts=4), 64, True)


def test_every_feature_compiles():
    """Bias, swigluoai with limits, router weight on the input, a number of experts that is no power of two, a last
    column tile that is half empty."""
    more = {"experts": 5, "top_k": 3, "bias": True}
    act = {"act": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 7.0, "limited": True, "weight": True}
    layers = (
        gemm(True, True, K=1152, segment=384, **more, **act),
        gemm(False, True, K=384, segment=1152, **more),
        gemm(True, False, static=True),
    )
    for g in layers:
        assert "serialized" not in assembled(compiled(g, Plan8()))


@pytest.mark.parametrize("grouped", [True, False])
def test_the_kernels_before_the_gemms_compile(grouped):
    rounding = {"COLUMNS": 2048, "GROUPED": grouped, "STATIC": False, "R": 4, "B": 1024 if grouped else 2048}
    inputs = ["*bf16", "*fp8e4nv", "*fp32", "i32"]
    routes = ["*i32", "*i16", "*i32", "*i32", "i32", "i32", *inputs]
    cases = (
        (prepare, routes, {"E": 60, "EP": 0, "C": 256, "BC": 4, **rounding, "FEW": True, "PDL": True}),
        (prepare, routes, {"E": 60, "EP": 64, "C": 512, "BC": 64, **rounding, "FEW": False, "PDL": True}),
        (round_rows, inputs, rounding),
        (round_to_places, ["*bf16", "*i32", "*fp8e4nv", "*fp32", "i32"], {"TOPK": 8, **rounding, "PDL": True}),
    )
    if grouped:
        listed = {"TOPK": 8, "COLUMNS": 2048, "R": 4, "B": 1024, "PDL": True}
        copied = ["*fp8e4nv", "*fp32", "*i32", "*fp8e4nv", "*fp32", "i32"]
        cases = (*cases, (copy_to_places, copied, listed))
    for kernel, types, constants in cases:
        names = kernel.arg_names
        signature = dict(zip(names, types + ["constexpr"] * len(constants), strict=True))
        aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
        source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
        out = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
        assert "griddepcontrol.wait" in out.asm["ptx"]
        if "COLUMNS" in constants:
            assert "ld.global.v4" in out.asm["ptx"], "inputs are not fetched 16 bytes at a time"


def test_sizes_that_straddle_a_scale_are_refused():
    with pytest.raises(ValueError, match="want multiples of 128"):
        tile8(gemm(True, True, K=2000), Plan8(), True)
    with pytest.raises(ValueError, match="want depth from 1"):
        Plan8(depth=4)  # the gather would wait for slots that wait for it
