"""Kernel gemv of backend gluon_sm90, without a GPU: how it shares out a layer's weights, what its lanes hold, and what
Triton's offline target makes of it for sm_90."""

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from ptxas import disassembled, resources  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from expertd_kernels.backends.gluon.weight_only.codec import codec_of  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.constants import Gemm  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.gemv import gemv  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.gemv_constants import KEPT, SHARED_MEMORY, Slices, slices  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.plan import TilePlan  # noqa: E402
from expertd_kernels.weights.scheme import Scheme  # noqa: E402

pytestmark = pytest.mark.usefixtures("kept_triton_cache")


def gemm(scheme: str, first: bool, H: int = 2048, I: int = 768, top_k: int = 8, experts: int = 128, **more) -> Gemm:
    """w13 or w2 of a layer; Qwen3-30B-A3B's unless said."""
    Hp, Ip = -(-H // 64) * 64, -(-I // 64) * 64
    facts: dict[str, Any] = (
        {"K": Hp, "rows": 2 * Ip // 64, "x_columns": H, "x_stride": H, "out_columns": Ip}
        if first
        else {"K": Ip, "rows": Hp // 64, "x_columns": Ip, "x_stride": Ip, "out_columns": H}
    )
    facts |= {"experts": experts, "top_k": top_k, "first": first, "gated": first, "weight": not first, "bias": False}
    return Gemm(codec_of(Scheme.parse(scheme)), **(facts | more))


OSS = {"H": 2880, "I": 2880, "top_k": 4, "bias": True}
ACT = {"act": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 7.0, "limited": True}
SMALL = {"H": 1000, "I": 200, "top_k": 6, "experts": 60}


def compiled(g: Gemm, plan: str, even: int = 0):
    p = TilePlan.parse(plan)
    c = slices(g, p, even)
    words, scale = "*i32" if c.codec.planes else "*bf16", f"*i{c.scale_bits}" if c.codec.e8m0 else "*bf16"
    types = ["*bf16", words, scale, "*fp32", "*i32", "*fp32", "*bf16", "fp32", "constexpr"]
    signature = dict(zip(gemv.arg_names, types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    source = GluonASTSource(gemv, signature, {(len(types) - 1,): c}, aligned)
    options = {"num_warps": p.warps, "launch_pdl": True} | ({"maxnreg": p.registers} if p.registers else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


CASES = [
    # scheme, w13 or w2, layer, plan, most registers
    ("int4_g128", True, {}, "gemv: rows 1, tiles 2, warps 8, columns 64, stages 8", 72),
    ("int4_g128", True, {}, "gemv: rows 1, tiles 1, warps 4, columns 64, stages 8", 72),
    ("int4_g128", False, {}, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 16", 104),
    ("int4_g128", True, {"H": 7168, "I": 2048}, "gemv: rows 1, tiles 4, warps 8, columns 64, stages 4", 64),
    ("int4_g128", False, {"H": 7168, "I": 2048}, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 4", 64),
    ("int4_g32_zp", True, SMALL, "gemv: rows 1, tiles 2, warps 4, columns 64, stages 4", 104),
    ("mxfp4", True, OSS | ACT, "gemv: rows 1, tiles 4, warps 8, columns 64, stages 8", 80),
    ("mxfp4", False, OSS, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 8", 104),
    ("int8_channel", True, {}, "gemv: rows 1, tiles 4, warps 4, columns 64, stages 4", 88),
    (
        "e4m3_block128",
        False,
        {"H": 4096, "I": 14336, "top_k": 2},
        "gemv: rows 1, tiles 1, warps 8, columns 64, stages 4",
        128,
    ),
    ("bf16", True, {"weight": True}, "gemv: rows 1, tiles 2, warps 8, columns 64, stages 2", 104),
    ("bf16", False, SMALL | {"bias": True}, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 4", 168),
    (
        "int4_g128",
        True,
        SMALL | {"gated": False, "act": "relu2", "rows": 4},
        "gemv: rows 1, tiles 4, warps 4, columns 64, stages 8",
        128,
    ),
    (
        "int4_g128",
        False,
        {"H": 256, "I": 128, "top_k": 10, "experts": 512},
        "gemv: rows 1, tiles 1, warps 8, columns 64, stages 4",
        128,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{'w13' if c[1] else 'w2'}-{c[3].replace(' ', '')}")
def test_it_compiles_within_its_registers_and_keeps_operands_there(case, tmp_path):
    scheme, first, facts, plan, most = case
    kernel = compiled(gemm(scheme, first, **facts), plan)
    ptx = kernel.asm["ptx"]
    registers, spilled, _ = resources(kernel)
    assert registers <= most
    assert spilled <= 16
    assert kernel.metadata.shared <= 232448
    # words come 16 bytes a lane and become operands where they are: shared memory takes inputs and the last sums only
    assert "ld.global.v4.b32" in ptx or "ld.global.L1" in ptx
    assert len(re.findall(r"st\.shared", ptx)) <= 8
    last_product = ptx.rindex("mma.sync")
    assert ptx.count("st.shared", 0, last_product) == 0


def test_weights_of_w2_are_asked_for_before_w13_has_ended():
    ptx = compiled(gemm("int4_g128", False), "gemv: rows 1, tiles 1, warps 8, columns 64, stages 8").asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    assert ptx.count("ld.global.v4.b32", 0, wait) == 8
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global.v4.b32")
    assert ptx.index("cp.async.cg") > wait  # the inputs are w13's results


def test_each_step_refills_what_it_has_used():
    """Twelve steps, eight under way: four more loads, and no product for steps that there are not."""
    ptx = compiled(gemm("int4_g128", False), "gemv: rows 1, tiles 1, warps 8, columns 64, stages 8").asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 12
    assert ptx.count("mma.sync") == 4 * 12
    loads, products = ([m.start() for m in re.finditer(word, ptx)] for word in ("ld.global.v4.b32", "mma.sync"))
    assert all(products[4 * i] < loads[8 + i] < products[4 * i + 8] for i in range(4))
    assert ptx.count("bar.warp.sync", products[0], loads[-1]) >= 3  # ptxas may not gather the loads


def first_uses(lines: list[str]) -> list[float]:
    """How far from each load in the shortest loop with loads its first use is, as a part of the loop; no use counts 1.

    An instruction's first register is taken for its result, but that of a store; wider operands count by their first
    register, which is what waits for a load."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L_\w+):", line.strip()))}
    loops = []
    for i, line in enumerate(lines):
        to = re.search(r"BRA(?:\.\w+)* .*`\((\.L_\w+)\)", line)
        if to and labels[to[1]] < i:
            body = [m[1] for x in lines[labels[to[1]] : i] if (m := re.search(r"\*/\s+(?:@!?U?P\w+ )?(\S.*?) ?;", x))]
            if any(x.startswith("LDG.E.128") for x in body):
                loops.append(body)
    body = min(loops, key=len)
    found = []
    for i, load in enumerate(body):
        if m := re.match(r"LDG\S* R(\d+),", load):
            words = {f"R{int(m[1]) + j}" for j in range(4 if ".128" in load else 1)}
            later = enumerate(body[i + 1 :] + body[:i], 1)
            sources = ((n, re.findall(r"\bR\d+", x)[0 if x.startswith("ST") else 1 :]) for n, x in later)
            found.append(next((n for n, r in sources if words & set(r)), len(body)) / len(body))
    return found


@pytest.mark.parametrize(
    ("scheme", "first", "plan"),
    [
        ("mxfp4", True, "gemv: rows 1, tiles 4, warps 8, columns 64, stages 8"),
        ("mxfp4", False, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 8"),
        ("mxfp8", True, "gemv: rows 1, tiles 2, warps 8, columns 64, stages 4"),
    ],
)
def test_no_warp_waits_for_exponents_that_it_has_just_asked_for(scheme, first, plan, tmp_path):
    """Bytes of words that a round hands on to the next one would be copied at its end, 85 to 160 instructions of 320 to
    630 behind their loads."""
    kernel = compiled(gemm(scheme, first, **(OSS | (ACT if first else {}))), plan)
    uses = first_uses(disassembled(kernel, tmp_path))
    assert len(uses) >= 8
    assert min(uses) >= 0.6


@pytest.mark.parametrize(
    ("first", "facts", "plan", "even"),
    [
        (False, {}, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 16", 1),
        (True, {}, "gemv: rows 1, tiles 1, warps 4, columns 64, stages 8", 6),
        (False, {"H": 7168, "I": 2048}, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 4", 4),
        (True, {"H": 7168, "I": 2048}, "gemv: rows 1, tiles 4, warps 8, columns 64, stages 8", 3),
    ],
)
def test_an_sm_takes_its_share_of_ctas_and_no_more(first, facts, plan, even):
    shared = compiled(gemm("int4_g128", first, **facts), plan, even).metadata.shared
    assert SHARED_MEMORY // (shared + KEPT) == even
    assert shared <= 227 * 1024


def test_no_share_is_kept_where_inputs_alone_take_more_or_rounds_are_too_coarse():
    c = slices(
        gemm("int4_g128", False, H=4096, I=14336, top_k=2),
        TilePlan.parse("gemv: rows 1, tiles 1, warps 8, columns 64, stages 8"),
        4,
    )
    assert c.input_rounds == c.padded_rounds  # 56 KiB
    c = slices(gemm("int4_g128", False), TilePlan.parse("gemv: rows 1, tiles 1, warps 8, columns 64, stages 16"), 5)
    assert c.input_rounds == c.padded_rounds  # 16 KiB a round


@pytest.mark.parametrize("scheme", ["int4_g32", "mxfp4", "mxfp8", "int8_g32_zp"])
def test_no_load_of_weights_has_a_mask(scheme):
    """With masks LLVM packed the halves of two indices into one 64-bit number and forgot to clear a part of it, where
    a scale covers 32 columns and w2's parts are its experts: addresses that are no multiple of 16 bytes."""
    facts = {"H": 1000, "I": 328, "bias": True}
    for first, plan in (
        (True, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 2"),
        (False, "gemv: rows 1, tiles 1, warps 8, columns 64, stages 8"),
    ):
        ptx = compiled(gemm(scheme, first, **(facts | (ACT if first else {}))), plan).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert not re.search(r"@!?%p\d+ ld\.global\.v", ptx)
        assert not re.search(r"mov\.b64\s+\{_,", ptx)


def shares(c: Slices) -> list[tuple[int, int]]:
    """(slot, step of K) of every part and iteration that counts, by the rule of the kernel's _place."""
    found = []
    for p in range(c.parts):
        for i in range(c.iterations):
            slot = 0 if c.gemm.first else p // c.splits * c.slots + i // c.part_steps
            k = (p if c.gemm.first else p % c.splits) * c.part_steps + i % c.part_steps
            if slot < (1 if c.gemm.first else c.gemm.top_k) and k < c.steps:
                found.append((slot, k))
    return found


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10])
@pytest.mark.parametrize("blocks", [1, 2, 5, 12, 45, 224])
def test_parts_cover_every_step_of_every_expert_once(blocks, top_k):
    for tiles, warps in ((1, 8), (1, 4), (2, 8), (4, 4), (4, 16), (1, 2)):
        p = TilePlan.parse(f"gemv: rows 1, tiles {tiles}, warps {warps}, columns 64, stages 4")
        for first in (True, False):
            size = {"H": 64 * blocks, "I": 64} if first else {"H": 64, "I": 64 * blocks}
            c = slices(gemm("int4_g128", first, **size, top_k=top_k), p)
            assert sorted(shares(c)) == [(s, k) for s in range(1 if first else top_k) for k in range(blocks)]
            assert c.rounds * c.ahead >= c.iterations > (c.rounds - 1) * c.ahead
            assert c.padded_rounds >= c.rounds


def position(layout, register: int, lane: int, warp: int) -> list[int]:
    at = [0] * len(layout.shape)
    for bits, bases in ((register, layout.reg_bases), (lane, layout.lane_bases), (warp, layout.warp_bases)):
        for i, base in enumerate(bases):
            if bits >> i & 1:
                at = [a ^ b for a, b in zip(at, base, strict=True)]
    return at


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "int8_channel", "mxfp4", "mxfp8", "e4m3_block128"])
def test_a_lane_reads_its_own_fragments_and_scales(scheme):
    """Row of packing.py: 16 * slice + 8 * i0 + lane // 4 for words [unit, slice, lane, 4] and for scales [chunk, plane,
    slice, lane // 4, group, i0]; exponents in words of a lane's."""
    for T, W in ((1, 8), (2, 8), (4, 4), (4, 16)):
        c = slices(gemm(scheme, True), TilePlan.parse(f"gemv: rows 1, tiles {T}, warps {W}, columns 64, stages 4"))
        gc, units = c.codec.chunk // c.codec.group, c.codec.units
        words = 2 * gc // c.scales_a_word  # of a lane, plane and chunk
        for warp in range(W):
            part, piece = warp // T, warp % T
            for lane in (0, 1, 7, 19, 31):
                for r in range(4 * units):
                    assert position(c.LQ, r, lane, warp) == [part, (r // 4 * T + piece) * 128 + 4 * lane + r % 4]
                for r in range(words * c.codec.planes):
                    want = ((r // words * T + piece) * 8 + lane // 4) * words + r % words
                    assert position(c.LS, r, lane, warp) == [part, want]


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_lane_reads_the_inputs_of_its_part(parts):
    """The B operand of m16n8k16 keeps column n = lane // 4 and rows 2 * (lane % 4) + {0, 1, 8, 9}; part n % parts is
    column n."""
    c = slices(gemm("int4_g128", True), TilePlan.parse(f"gemv: rows 1, tiles 1, warps {parts}, columns 64, stages 4"))
    for lane in range(32):
        for r in range(16):
            column, copy, part = position(c.LB, r, lane, 0)
            assert copy * parts + part == lane // 4
            assert column == r // 4 * 16 + (r // 2 % 2) * 8 + 2 * (lane % 4) + r % 2


@pytest.mark.parametrize(
    ("scheme", "plan", "message"),
    [
        ("int4_g128", "gemv: rows 1, tiles 3, warps 12, columns 64, stages 4", "want kernel gemv with tiles 1, 2 or 4"),
        ("int4_g128", "gemv: rows 1, tiles 1, warps 16, columns 64, stages 4", "warps 1, 2, 4 or 8 times"),
        ("int4_g128", "block: rows 8, tiles 1, warps 4, columns 64, stages 4", "want kernel gemv"),
        ("int4_g128", "gemv: rows 1, tiles 1, warps 8, columns 512, stages 4", "in whole steps of columns 64"),
    ],
)
def test_plans_that_the_kernel_has_not_are_refused(scheme, plan, message):
    with pytest.raises(ValueError, match=message):
        slices(gemm(scheme, True), TilePlan.parse(plan))
