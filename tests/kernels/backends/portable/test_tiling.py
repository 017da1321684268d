"""The host side of the row `triton`: plans, block bounds, layouts and scratch memory, as plain functions."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertd_kernels.backends.portable.layout import FLOAT, layout_of, pack_matrix, unpack_matrix
from expertd_kernels.backends.portable.replay import Recording, proves
from expertd_kernels.backends.portable.route import block_bound, expert_bins
from expertd_kernels.backends.portable.tiling import Facts, make_plan, stage_bytes
from expertd_kernels.sources.synthetic import random_matrix
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

SCHEMES = ("int4_g32", "int4_g128_zp", "int4_channel", "int8_g64", "int8_channel_zp", "mxfp4", "mxfp8", "nvfp4",
           "e4m3_block128", "e4m3_tensor", "bf16", "f16", "f32")  # fmt: skip
TOKENS = (1, 2, 8, 33, 128, 500, 2048, 8192)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.sampled_from([8, 16, 64]))
def test_no_routing_makes_more_blocks_than_the_bound(rows, bm):
    routes = sum(rows)
    assert sum(-(-r // bm) for r in rows) <= block_bound(routes, len(rows), bm)


@pytest.mark.parametrize("experts", [1, 127, 128, 256, 512])
def test_there_is_a_bin_beyond_the_last_expert(experts):
    bins = expert_bins(experts)
    assert bins > experts
    assert bins & (bins - 1) == 0


@pytest.mark.parametrize(
    ("scheme", "shared_kib", "narrowest"), list(itertools.product(SCHEMES, (64, 99, 227), (8, 16)))
)
def test_every_plan_fits_its_layout_and_its_device(scheme, shared_kib, narrowest):
    s = Scheme.parse(scheme)
    for hidden, inner, experts in ((2048, 768, 128), (2880, 2880, 32), (7168, 2048, 256)):
        w13, w2 = layout_of(s, 2 * inner, hidden, 2), layout_of(s, hidden, inner, 1)
        facts = Facts(experts, 8, 2, w13, w2, hidden, inner, 132, shared_bytes=shared_kib * 1024, narrowest=narrowest)
        for tokens in TOKENS:
            plan = make_plan(facts, tokens)
            assert plan.rows >= narrowest
            for tile, lay, segments in ((plan.w13, w13, 2), (plan.w2, w2, 1)):
                fits = tile.stages * stage_bytes(tile, plan.rows, lay, segments, False) <= facts.shared_bytes
                assert fits or tile.stages == 1
                assert lay.elem == FLOAT or lay.sw % tile.containers == 0
                assert segments * tile.weight_rows * plan.rows <= 128 * 32 * tile.warps, (
                    "accumulators beyond the registers"
                )


def odd_shapes():
    for name in SCHEMES:
        yield name, None
    yield "int4_g64_zp", ScaleType.F16
    yield "int8_g32_zp", ScaleType.F32
    yield "int4_g20", ScaleType.BF16
    yield "e4m3_block32", ScaleType.BF16


@pytest.mark.parametrize(("name", "scale"), list(odd_shapes()))
@pytest.mark.parametrize("shape", [(3, 52, 160), (1, 34, 320), (2, 16, 100)])
def test_unpacking_gives_back_every_bit(name, scale, shape):
    E, N, K = shape
    scheme = Scheme.parse(name, scale)
    if scheme.group_size and K % scheme.group_size:
        K = 2 * scheme.group_size
    g = torch.Generator().manual_seed(1)
    q = random_matrix(
        scheme, (E, N, K), segments=2, bias=True, act_order=True, signed_scales=scheme.element.quantized, generator=g
    )
    tensors, lay = pack_matrix(q)
    again, _ = pack_matrix(q)
    back = unpack_matrix(tensors, lay, scheme, (E, N, K), 2)
    for (name_a, a), (name_b, b) in zip(q.tensors(), back.tensors(), strict=True):
        assert name_a == name_b
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name_a
    assert all(torch.equal(tensors[n].view(torch.uint8), again[n].view(torch.uint8)) for n in tensors)


def test_packed_bytes_are_close_to_those_of_the_format():
    g = torch.Generator().manual_seed(1)
    for name, most in (("int4_g128", 1.0), ("mxfp4", 1.0), ("int8_channel", 1.01), ("e4m3_block128", 1.0)):
        scheme = Scheme.parse(name)
        tensors, _ = pack_matrix(random_matrix(scheme, (2, 512, 1024), segments=2, generator=g))
        packed = sum(t.numel() * t.element_size() for t in tensors.values())
        assert packed <= most * 2 * scheme.nbytes(512, 1024, 2), name


def test_large_scales_are_not_folded_into_the_codes():
    g = torch.Generator().manual_seed(1)
    q = random_matrix(Scheme(Element.INT4, 1, 32, ScaleType.BF16), (1, 32, 64), generator=g)
    assert pack_matrix(q)[1].fold == 1
    q.scales[0, 3, 1] = 100.0
    assert pack_matrix(q)[1].fold == 0


def test_a_recording_replays_with_other_tensors_and_keeps_none_of_them():
    seen = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: seen.append((grid, args))

    first, second = ([torch.full((2,), float(i)) for i in range(4)] for _ in range(2))
    weights = torch.ones(1)
    recording = Recording()
    args = [first[0], weights, 5, first[3]]
    recording.add(Compiled(), (7,), ["x", "w", "n", "out", "B", "A"], args, {"A": 1, "B": 2, "num_warps": 4}, first)
    assert all(a is not t for launch in recording.launches for a in launch.arguments for t in first)
    recording.run(*second)
    ((grid, arguments),) = seen
    assert grid == (7, 1, 1)
    assert arguments[0] is second[0]
    assert arguments[1] is weights
    assert arguments[2:3] + arguments[4:] == (5, 2, 1)
    assert arguments[3] is second[3]


@pytest.mark.parametrize(("fault", "proven"), [(None, True), ("other result", False), ("raises", False)])
def test_a_recording_that_does_not_repeat_its_call_is_not_used(fault, proven, caplog):
    x, ids, weights, out = (torch.full((4, 2), 1.5) for _ in range(4))
    out[0, 0] = float("nan")

    class Compiled:
        def __getitem__(self, grid):
            def launch(x, out):
                if fault == "raises":
                    raise TypeError("function takes 61 arguments")
                out.fill_(1.5)
                out[0, 0] = float("nan")
                out[3, 1] += fault is not None

            return launch

    recording = Recording()
    recording.add(Compiled(), (1,), ["x", "out"], [x, out], {}, (x, ids, weights, out))
    assert proves(recording, x, ids, weights, out) is proven
    assert bool(caplog.records) is not proven
