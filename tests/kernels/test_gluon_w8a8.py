"""Backend gluon_w8a8 without a GPU: packing is its own inverse, what it refuses, and the layer's launches with each
kernel replaced by the same arithmetic in torch (the kernels themselves: test_gluon_w8a8_compile.py, tests/gpu)."""

from dataclasses import replace

import pytest
import torch
from vendor import bits

from expertd_kernels import NAMED_DEVICES, Activation, ActivationQuant, Scheme, problem_of, reference, relative_error
from expertd_kernels.backends import gluon_w8a8 as backend
from expertd_kernels.backends.gluon import calls
from expertd_kernels.backends.gluon.w8a8_plan import Plan8
from expertd_kernels.float32 import apply_activation
from expertd_kernels.oracle import Refused
from expertd_kernels.scheme import Element, ScaleType
from expertd_kernels.synthetic import random_inputs, random_weights

SCHEMES = ("e4m3_block128", "e4m3_channel", "e4m3_tensor")
BY_ROW = (ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_TENSOR)
ROUNDINGS = {"e4m3_block128": (ActivationQuant.E4M3_GROUP128,), "e4m3_channel": BY_ROW, "e4m3_tensor": BY_ROW}


def layer(scheme, E=3, H=256, I=128, **more):
    return random_weights(scheme, E, H, I, signed_scales=True, **more)


def problem(w, **more):
    grouped = w.w13.scheme.rows == 128
    how = ActivationQuant.E4M3_GROUP128 if grouped else ActivationQuant.E4M3_TOKEN
    if w.input_scales is not None:
        how = ActivationQuant.E4M3_TENSOR
    return problem_of(w, NAMED_DEVICES["sm90"], top_k=2, **{"activation_quant": how, **more})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_gives_back_every_bit_and_packing_shares_no_memory(scheme):
    w = layer(scheme, bias=True)
    before = bits(w)
    packed = backend.pack(w, problem(w))
    assert bits(backend.unpack(packed)) == before
    for t in packed.tensors.values():
        t.view(-1).view(torch.uint8).fill_(1)
    assert bits(w) == before


@pytest.mark.parametrize("kind", [ScaleType.BF16, ScaleType.F16, ScaleType.E8M0])
def test_scales_of_other_types_come_back_as_they_were(kind):
    w = random_weights(Scheme(Element.E4M3, 128, 128, kind), 2, 384, 256)
    assert bits(backend.unpack(backend.pack(w, problem(w)))) == bits(w)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "int4_g128"}, "has no layout for int4_g128 weights"),
        ({"scheme": "e4m3_g128"}, "has no layout for e4m3_g128 weights"),
        ({"H": 320}, r"\[256, 320\] in 2 segments; want multiples of 128"),
        ({"I": 192}, r"\[384, 256\] in 2 segments; want multiples of 128"),
        ({"activation": Activation.parse("relu2")}, "activation relu2 has no gate"),
        ({"w2_scheme": "e4m3_channel"}, "scales of different kinds"),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, dict) else "",
)
def test_what_the_kernels_do_not_compute_is_refused(change, message):
    w = layer(**{"scheme": "e4m3_block128", **change})
    with pytest.raises(Refused, match=message):
        backend.pack(w, problem(w))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("how", list(ActivationQuant), ids=lambda a: a.value)
def test_activations_rounded_in_another_way_are_refused(scheme, how):
    w = layer(scheme)
    if how in ROUNDINGS[scheme]:
        backend.pack(replace(w, input_scales=torch.ones(3, 2)), problem(w, activation_quant=how))
    else:
        with pytest.raises(Refused, match=f"rounds activations as e4m3_.*, {how.value} is asked"):
            backend.pack(w, problem(w, activation_quant=how))


def test_static_scales_that_the_checkpoint_lacks_are_refused():
    w = layer("e4m3_tensor")
    with pytest.raises(Refused, match="the checkpoint has none"):
        backend.pack(w, problem(w, activation_quant=ActivationQuant.E4M3_TENSOR))


# ---------------------------------------------------------------- the launches, their kernels replaced by torch


class Launches:
    """Stands for a kernel: kernel[grid](...) calls `run`."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return lambda *args, **options: self.run(grid, *args)


def _group_routes(ids, counts, lists, n, E):
    flat = ids.flatten()[:n].long()
    here = ((flat >= 0) & (flat < E)).nonzero()[:, 0]
    order = here[torch.sort(flat[here], stable=True).indices]
    counts.copy_(torch.bincount(flat[here], minlength=E))
    lists.fill_(-7)
    lists[: len(order)] = order.int()


def _round_rows(grid, x, q, scale, n_rows, columns, grouped, static, R, B):
    groups = columns // 128 if grouped else 1
    assert grid[0] == -(-n_rows // R) * -(-columns // B)
    assert grouped or columns <= B
    v = torch.nan_to_num(x[:n_rows].float()).view(n_rows, groups, columns // groups)
    if static:
        s = scale.view(1, 1)
    else:
        s = v.abs().amax(2).clamp_min(1e-30) / 448
        scale.view(-1)[: n_rows * groups] = s.flatten()
    q[:n_rows] = (v / s[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(n_rows, columns)


def _list_rows(grid, lists, x, scale, out, out_scale, n, top_k, words, scales):
    assert x.shape[1] == words
    token = lists[:n].clamp(0, n - 1).long() // top_k
    out[:n] = x[token]
    if scales:
        out_scale[:n] = scale[token]


def _prepare(grid, ids, counts, lists, n, x, q, scale, n_rows, E, threads, chunk, *rounding):
    assert threads * chunk % 32 == 0
    _group_routes(ids, counts, lists, n, E)
    _round_rows((grid[0] - E,), x, q, scale, n_rows, *rounding)


def _numbers(q, scale, rows):
    K = q.shape[1]
    groups = scale.shape[1]
    return (q[rows].float().view(len(rows), groups, K // groups) * scale[rows][:, :, None]).view(len(rows), K)


def _w8a8(grid, x, xd, xs, wd, ws, bias, counts, lists, tw, out, out_scale, t):
    """What the kernel promises: see its docstring."""
    g, at = t.gemm, 0
    K, rows = g.K, t.rows
    assert xd.base is x
    assert wd.shape == [g.experts * rows * K // 128, 128]
    for e in range(g.experts):
        place = torch.arange(at, at + int(counts[e]))
        at += int(counts[e])
        route = lists[place].long()
        row = place if t.listed else route // g.top_k
        v = x[row].float() * xs if g.static else _numbers(x, xs, row)
        w = wd.base.view(-1, 128)[e * rows * K // 128 :][: rows * K // 128].float()
        w = torch.cat([torch.cat(list(run.split(128)), 1) for run in w.split(K)])  # K / 128 blocks of 128 rows a run
        spread = ws[e].repeat_interleave(128, 0).repeat_interleave(128, 1) if g.grouped else ws[e][:, None]
        y = v @ (w * spread).t()
        weight = tw.flatten()[route][:, None]
        if g.first and g.weight:
            y = y * weight
        y = y + (bias.view(g.experts, rows)[e] if g.bias else 0.0)
        if not g.first:
            out[route] = (y * weight if g.weight else y).to(out.dtype)
            continue
        a = Activation.parse(g.act)
        h = apply_activation(y, replace(a, alpha=g.alpha, beta=g.beta, limit=g.limit if g.limited else None))
        if g.grouped:
            h = h.view(len(place), g.segment // 128, 128)
            s = h.abs().amax(2).clamp_min(1e-30) / 448
            out_scale[place] = s
            h = (h / s[:, :, None]).view(len(place), g.segment)
        elif g.static:
            h = (h / out_scale).clamp(-448, 448)
        out[place] = h.to(out.dtype)


def _combine(grid, y, ids, out, H, E, top_k, width, pdl):
    assert grid[1] * width >= H
    M = grid[0]
    here = ((ids >= 0) & (ids < E))[:, :, None]
    out.copy_(torch.where(here, y[: M * top_k].float().view(M, top_k, H), 0.0).sum(1).to(out.dtype))


@pytest.fixture
def emulated(monkeypatch):
    """The layer's module with kernels replaced, and a CPU in the place of the GPU."""
    pytest.importorskip("triton.experimental.gluon")
    from expertd_kernels.backends.gluon import w8a8_layer as module

    kernels = {
        "prepare": _prepare,
        "round_rows": _round_rows,
        "list_rows": _list_rows,
        "w8a8": _w8a8,
        "combine": _combine,
    }
    for name, run in kernels.items():
        monkeypatch.setattr(module, name, Launches(run))
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module.torch, "device", lambda *a: "cpu")
    monkeypatch.setattr(
        module.torch.cuda, "get_device_properties", lambda d: type("P", (), {"multi_processor_count": 132})
    )
    return module


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_the_launches_make_a_layer(emulated, scheme, tokens, listed):
    w = layer(scheme, E=4, H=384, I=256, bias=True, activation=Activation.parse("swigluoai"))
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(tokens, 384, 4, 2, seed=tokens)
    if tokens > 1:
        ids[0, 0], ids[1] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert experts(x, ids, weights, out=out, plan=Plan8(listed=listed)) is out
    assert relative_error(out, reference(w, x, ids, weights)) < 6e-2


def test_static_scales_round_by_the_largest_of_all_experts(emulated):
    w = layer("e4m3_tensor", E=4, H=384, I=256)
    given = torch.tensor([[0.002, 0.001], [0.011, 0.0007], [0.004, 0.05], [0.001, 0.002]])
    w = replace(w, input_scales=given)
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(50, 384, 4, 2, seed=1)
    assert relative_error(experts(x, ids, weights), reference(w, x, ids, weights)) < 6e-2
    assert experts._space(50, 2).x_scale.tolist() == pytest.approx([0.011])
    assert experts._space(50, 2).h_scale.tolist() == pytest.approx([0.05])


def test_the_router_weight_on_the_input_and_pieces(emulated, monkeypatch):
    monkeypatch.setattr(calls, "MAX_TOKENS", 32)
    w = layer("e4m3_block128", E=4, H=256, I=128)
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(77, 256, 4, 1, seed=3)
    weights = weights * 0.5
    out = experts(x, ids, weights, router_weight_on_input=True)
    assert relative_error(out, reference(w, x, ids, weights, router_weight_on_input=True)) < 6e-2


def test_inputs_of_another_shape_or_type_are_refused(emulated):
    w = layer("e4m3_block128")
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(5, 256, 3, 2)
    with pytest.raises(ValueError, match="want bf16"):
        experts(x.float(), ids, weights)
    with pytest.raises(ValueError, match=r"want bf16 \[M, 256\]"):
        experts(x[:, :128], ids, weights)
    with pytest.raises(ValueError, match="k up to 32"):
        experts(x, torch.zeros(5, 33), torch.zeros(5, 33))


@pytest.mark.parametrize(
    ("tokens", "top_k", "listed"), [(511, 2, False), (512, 2, True), (8192, 1, True), (8192, 8, False)]
)
def test_inputs_are_copied_into_list_order_where_few_experts_share_a_token(tokens, top_k, listed):
    assert Plan8.of(tokens, top_k).listed is listed
