"""Backend gluon_w8a8 without a GPU: packing is its own inverse, what it refuses, and the layer's launches with each
kernel replaced by the same arithmetic in torch (the kernels themselves: test_compile.py, tests/gpu)."""

from dataclasses import replace

import pytest
import torch
from vendor import bits, refused

from expertd_kernels import NAMED_DEVICES, Activation, ActivationQuant, Scheme, problem_of, reference, relative_error
from expertd_kernels.backends import gluon_w8a8 as backend
from expertd_kernels.backends.footprint import footprint
from expertd_kernels.backends.gluon.shared.gpu import Gpu
from expertd_kernels.backends.gluon.w8a8.plan import Few8, Plan8, Shape8
from expertd_kernels.backends.rounding import round_groups
from expertd_kernels.backends.scratch import scratch_of
from expertd_kernels.common.protocol import takes_e4m3
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import apply_activation
from expertd_kernels.weights.scheme import Element, ScaleType

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
        ({"scheme": "int4_g128"}, "does not compute on int4 weights"),
        ({"scheme": "e4m3_g128"}, "e4m3_g128: group size 128 (has: channel)"),
        ({"H": 320}, "H = 320 is no multiple of 128"),
        ({"I": 192}, "I = 192 is no multiple of 128"),
        ({"activation": Activation.parse("relu2")}, "does not compute relu2"),
        ({"w2_scheme": "e4m3_channel"}, "w13 and w2 have different schemes"),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, dict) else "",
)
def test_what_the_kernels_do_not_compute_is_refused(change, message):
    w = layer(**{"scheme": "e4m3_block128", **change})
    assert message in refused("gluon_w8a8", w, problem(w))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("how", list(ActivationQuant), ids=lambda a: a.value)
def test_activations_rounded_in_another_way_are_refused(scheme, how):
    w = layer(scheme)
    if how in ROUNDINGS[scheme]:
        backend.pack(replace(w, input_scales=torch.ones(3, 2)), problem(w, activation_quant=how))
    else:
        none = how is ActivationQuant.NONE
        sentence = "are to stay in bf16" if none else f"does not round activations to {how.value}"
        assert sentence in refused("gluon_w8a8", w, problem(w, activation_quant=how))


def test_static_scales_that_the_checkpoint_lacks_are_refused():
    w = layer("e4m3_tensor")
    asked = problem(w, activation_quant=ActivationQuant.E4M3_TENSOR)
    assert "with static scales, and the checkpoint has none" in refused("gluon_w8a8", w, asked)


# ---------------------------------------------------------------- the launches, their kernels replaced by torch


class Launches:
    """Stands for a kernel: kernel[grid](...) calls `run`."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return lambda *args, **options: self.run(grid, *args)


def _known(ids, n, E):
    flat = ids.flatten()[:n].long()
    return flat[(flat >= 0) & (flat < E)]


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


def _round_to_places(grid, x, places, q, scale, n_rows, top_k, columns, grouped, static, R, B, pdl):
    rounded = torch.empty(x.shape, dtype=q.dtype)
    scales = scale if static else torch.empty(n_rows, scale.shape[1])
    _round_rows(grid, x, rounded, scales, n_rows, columns, grouped, static, R, B)
    to = places[: n_rows * top_k].long()
    token = torch.arange(n_rows).repeat_interleave(top_k)[to >= 0]
    q[to[to >= 0]] = rounded[token]
    if not static:
        scale[to[to >= 0]] = scales[token]


def _copy_to_places(grid, x, x_scale, places, q, scale, n_rows, top_k, columns, R, B, pdl):
    assert grid[0] == -(-n_rows // R) * -(-columns // B)
    to = places[: n_rows * top_k].long()
    token = torch.arange(n_rows).repeat_interleave(top_k)[to >= 0]
    q[to[to >= 0]], scale[to[to >= 0]] = x[token], x_scale[token]


def _prepare(grid, ids, table, counts, lists, n, chunks, x, q, scale, n_rows, E, padded, rows, columns, *rounding):
    if padded:
        assert rows * (chunks - 1) < n <= rows * chunks
        assert torch.equal(table[:chunks, :E].sum(0), torch.bincount(_known(ids, n, E), minlength=E))
    else:
        assert n <= rows * columns * 32, "more steps than bits"
    _group_routes(ids, counts, lists, n, E)
    _round_rows((grid[0] - (chunks if padded else E),), x, q, scale, n_rows, *rounding[:-2])


def _count_routes(grid, ids, table, n, E, padded, chunk, pdl):
    flat = ids.flatten().long()
    assert grid[0] * chunk >= n > (grid[0] - 1) * chunk
    assert padded >= E
    table.fill_(-7)
    for c, part in enumerate(flat.split(chunk)):
        table[c] = torch.bincount(part[(part >= 0) & (part < E)], minlength=padded)


def _place_routes(grid, ids, table, counts, lists, places, n, chunks, E, padded, chunk, some, pdl):
    assert grid == (chunks,)
    assert some >= 1
    _group_routes(ids, counts, lists, n, E)
    assert torch.equal(table[:chunks, :E].sum(0), counts)
    here = int(counts.sum())
    places.fill_(-1)
    places[lists[:here].long()] = torch.arange(here).int()


def _numbers(q, scale, rows):
    K = q.shape[1]
    groups = scale.shape[1]
    return (q[rows].float().view(len(rows), groups, K // groups) * scale[rows][:, :, None]).view(len(rows), K)


def _products(t, listed, e, x, xs, wd, ws, place, route, part):
    """The rows at `place` times the expert's weights, over one of the parts of K; scales applied."""
    g, K, rows = t.gemm, t.gemm.K, t.rows
    row = place if listed else route // g.top_k
    v = x[row].float() * xs if g.static else _numbers(x, xs, row)
    w = wd.base.view(-1, 128)[e * rows * K // 128 :][: rows * K // 128].float()
    w = torch.cat([torch.cat(list(run.split(128)), 1) for run in w.split(K)])  # K / 128 blocks of 128 rows a run
    w = w * (ws[e].repeat_interleave(128, 0).repeat_interleave(128, 1) if g.grouped else ws[e][:, None])
    return v[:, part] @ w[:, part].t()


def _intermediate(g, y, place, out, out_scale):
    """w13's epilogue: activation and rounding."""
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


def _w8a8(grid, x, xd, xs, wd, ws, bias, counts, lists, tw, out, out_scale, tickets, t):
    """What the kernel promises: see its docstring."""
    g, at = t.gemm, 0
    if t.listed:
        assert (xd.base.data_ptr(), xd.shape) == (x.data_ptr(), list(x.shape)), "a view of another size"
    assert tickets[0] == 0, "the call before left its tickets"
    tickets[0] = 3
    assert wd.shape == [g.experts * t.rows * g.K // 128, 128]
    for e in range(g.experts):
        place = torch.arange(at, at + int(counts[e]))
        at += int(counts[e])
        route = lists[place].long()
        y = _products(t, t.listed, e, x, xs, wd, ws, place, route, slice(None))
        weight = tw.flatten()[route][:, None]
        if g.first and g.weight:
            y = y * weight
        y = y + (bias.view(g.experts, t.rows)[e] if g.bias else 0.0)
        if g.first:
            _intermediate(g, y, place, out, out_scale)
        else:
            out[route] = (y * weight if g.weight else y).to(out.dtype)


def _w8a8_few(grid, x, xs, wd, ws, bias, ids, lists, tw, out, out_scale, n, t):
    """Expert by expert, as the kernel finds them from the ids."""
    g, flat = t.gemm, ids.flatten().long()
    assert n == len(flat) <= t.routes
    assert grid[0] == t.column_tiles * t.Z * (n if t.by_route else g.experts)
    for e in range(g.experts):
        at, count = int(((flat >= 0) & (flat < e)).sum()), int((flat == e).sum())
        place = torch.arange(at, at + count)
        route = lists[place].long()
        weight = tw.flatten()[route][:, None]
        for z in range(t.Z):
            part = slice(z * g.K // t.Z, (z + 1) * g.K // t.Z)
            y = _products(t, not g.first, e, x, xs, wd, ws, place, route, part)
            if g.first and g.weight:
                y = y * weight
            y = y + (bias.view(g.experts, t.rows)[e] if g.bias and z == 0 else 0.0)
            if g.first:
                _intermediate(g, y, place, out, out_scale)
            else:
                out[z * n + route] = (y * weight if g.weight else y).to(out.dtype)


def _combine(grid, y, ids, out, H, E, top_k, width, pdl, parts, done, counters, weights):
    assert grid[1] * width >= H
    assert counters == (0 if done is None else len(done))
    if done is not None:
        done.zero_()
    M = grid[0]
    here = ((ids >= 0) & (ids < E))[:, :, None]
    y = y[: parts * M * top_k].float().view(parts, M, top_k, H).sum(0)
    if weights is not None:
        y = y * weights[:, :, None]
    out.copy_(torch.where(here, y, 0.0).sum(1).to(out.dtype))


@pytest.fixture
def emulated(monkeypatch):
    """The layer's module with kernels replaced, and a CPU in the place of the GPU."""
    pytest.importorskip("triton.experimental.gluon")
    from expertd_kernels.backends.gluon.shared import launches
    from expertd_kernels.backends.gluon.w8a8 import experts as module

    kernels = {
        "prepare": _prepare,
        "w8a8_few": _w8a8_few,
        "round_rows": _round_rows,
        "round_to_places": _round_to_places,
        "copy_to_places": _copy_to_places,
        "w8a8": _w8a8,
    }
    for name, run in kernels.items():
        monkeypatch.setattr(module, name, Launches(run))
    for name, run in {"count_routes": _count_routes, "place_routes": _place_routes, "combine": _combine}.items():
        monkeypatch.setattr(launches, name, Launches(run))
    monkeypatch.setattr(module, "current_gpu", lambda: Gpu(torch.device("cpu"), "none", 132))
    return module


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 40, 700, 2100])
def test_the_launches_make_a_layer(emulated, scheme, tokens, listed):
    w = layer(scheme, E=4, H=384, I=256, bias=True, activation=Activation.parse("swigluoai"))
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(tokens, 384, 4, 2, seed=tokens)
    if tokens > 1:
        ids[0, 0], ids[1] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert experts(x, ids, weights, out=out, plan=Plan8(listed=listed)) is out
    assert relative_error(out, reference(w, x, ids, weights)) < 6e-2


FEW = ((Few8(8, 8), Few8(8, 8, parts=2)), (Few8(8, 16), Few8(16, 32)))


@pytest.mark.parametrize("few", FEW, ids=["parts", "whole"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_launches_for_few_tokens_make_a_layer(emulated, scheme, tokens, few):
    w = layer(scheme, E=9, H=384, I=512, bias=True, activation=Activation.parse("swigluoai"))
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(tokens, 384, 9, 2, seed=tokens)
    if tokens > 1:
        ids[0, 0], ids[1] = -1, 99
    out = torch.full_like(x, float("nan"))
    experts(x, ids, weights, out=out, plan=Plan8(few=few))
    assert relative_error(out, reference(w, x, torch.where(ids < 9, ids, -1), weights)) < 6e-2


PLANS = (Plan8(few=FEW[0]), Plan8(few=FEW[1]), Plan8(), Plan8(listed=True))


@pytest.mark.parametrize("plan", PLANS, ids=["parts", "few", "gathered", "listed"])
@pytest.mark.parametrize("on_input", [False, True])
def test_inputs_that_are_e4m3_already_are_taken_as_they_are(emulated, plan, on_input):
    """The bits of a call with what they stand for, where they are what that would be rounded to; scales of any kind are
    right, too, and more than a call's: nothing is rounded a second time."""
    tokens, H, E = 40, 384, 9
    w = layer("e4m3_block128", E=E, H=H, I=512)
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    assert takes_e4m3(experts)
    x, ids, weights = random_inputs(tokens, H, E, 2, seed=tokens)
    ids[0, 0], ids[1] = -1, -1
    more = {"plan": plan, "router_weight_on_input": on_input}
    out = torch.full_like(x, float("nan"))
    codes, scales = round_groups(x)
    assert experts.of_e4m3(codes, scales, ids, weights, out=out, **more) is out
    assert torch.equal(out, experts(x, ids, weights, **more))

    powers = torch.exp2(torch.ceil(torch.log2(scales)))
    codes = (x.float().view(tokens, -1, 128) / powers[:, :, None]).to(torch.float8_e4m3fn)
    meant = (codes.float() * powers[:, :, None]).view(tokens, H).bfloat16()
    codes = codes.view(tokens, H)
    experts.of_e4m3(codes, powers, ids, weights, out=out, **more)
    right = reference(w, meant, ids, weights, router_weight_on_input=on_input)
    assert relative_error(out, right) < 0.8 * relative_error(experts(meant, ids, weights, **more), right)


def test_e4m3_inputs_in_pieces_and_those_that_are_refused(emulated):
    w = layer("e4m3_block128", E=4, H=256, I=128)
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(77, 256, 4, 2, seed=3)
    codes, scales = round_groups(x)
    whole = experts.of_e4m3(codes, scales, ids, weights, out=torch.empty_like(x))
    experts.most_tokens = 32
    assert torch.equal(experts.of_e4m3(codes, scales, ids, weights, out=torch.full_like(x, float("nan"))), whole)
    for odd in (
        (x, scales),
        (codes, scales.double()),
        (codes[:, :128], scales),
        (codes, scales[:, :1]),
        (codes[1:], scales),
    ):
        with pytest.raises(ValueError, match="want"):
            experts.of_e4m3(*odd, ids, weights, out=torch.empty_like(x))
    other = layer("e4m3_channel", E=4)
    by_row = emulated.W8A8Experts(backend.pack(other, problem(other)), problem(other))
    assert not takes_e4m3(by_row)
    with pytest.raises(ValueError, match="groups of 128"):
        by_row.of_e4m3(codes, scales, ids, weights, out=torch.empty_like(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_table_says_whether_a_layer_takes_e4m3(emulated, scheme):
    row = next(b for b in BACKENDS if b.name == "gluon_w8a8")
    w = layer(scheme)
    asked = problem(w)
    assert row.takes_e4m3(asked) == takes_e4m3(emulated.W8A8Experts(backend.pack(w, asked), asked))


def test_static_scales_round_by_the_largest_of_all_experts(emulated):
    w = layer("e4m3_tensor", E=4, H=384, I=256)
    given = torch.tensor([[0.002, 0.001], [0.011, 0.0007], [0.004, 0.05], [0.001, 0.002]])
    w = replace(w, input_scales=given)
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    x, ids, weights = random_inputs(50, 384, 4, 2, seed=1)
    assert relative_error(experts(x, ids, weights), reference(w, x, ids, weights)) < 6e-2
    used = experts._scratch(Shape8(4, 2, 384, 256), 50, 1)
    assert used["x_scale"].tolist() == used["listed_scale"].tolist() == pytest.approx([0.011])
    assert used["h_scale"].tolist() == pytest.approx([0.05])


def test_layers_of_other_shapes_and_schemes_share_one_scratch(emulated):
    """Each call finds what the one before left, or anything else: never in its answer, nor in the counters."""
    scratch = scratch_of(torch.device("cpu"))
    sizes = {"e4m3_block128": (3, 256, 512), "e4m3_channel": (9, 384, 256), "e4m3_tensor": (4, 640, 128)}
    layers = []
    for scheme, (E, H, I) in sizes.items():
        w = layer(scheme, E=E, H=H, I=I)
        layers.append((w, emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))))
    few = Plan8(few=(Few8(8, 8), Few8(8, 8, parts=2)))
    for tokens, plan in ((40, Plan8()), (700, Plan8(listed=True)), (3, few), (90, Plan8(listed=True)), (7, few)):
        for w, experts in layers:
            if plan is few and experts.intermediate_size % 512:
                continue
            x, ids, weights = random_inputs(tokens, w.hidden_size, w.num_experts, 2, seed=tokens)
            right = reference(w, x, ids, weights)
            for rubbish in (None, 0x7F, 0xFF):
                if rubbish is not None:
                    scratch.memory(0).fill_(rubbish)
                out = experts(x, ids, weights, out=torch.full_like(x, float("nan")), plan=plan)
                assert relative_error(out, right) < 6e-2
                assert not scratch.words.any(), "counters that another layer would start from"
    assert len({experts._scratch(Shape8(w.num_experts, 2, w.hidden_size, experts.intermediate_size), 40, 1)["counts"]
                .untyped_storage().data_ptr() for w, experts in layers}) == 1  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_holds_the_bytes_that_its_sizes_say(emulated, scheme):
    w = layer(scheme, E=4, H=384, I=256, bias=True)
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    matrices = (experts._w13, experts._w2)
    held = sum(t.untyped_storage().nbytes() for m in matrices for t in (m.codes.base, m.scales, m.bias))
    assert footprint("gluon_w8a8", problem(w), 64).weights_bytes == held


def test_a_launch_that_fails_leaves_no_tickets_to_other_layers(emulated, monkeypatch):
    from expertd_kernels.backends.gluon.shared import launches

    def broken(*args):
        raise RuntimeError("no such kernel")

    first, second = layer("e4m3_block128"), layer("e4m3_channel", E=5, H=384)
    made = [emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w)) for w in (first, second)]
    x, ids, weights = random_inputs(40, 256, 3, 2)
    with monkeypatch.context() as patch:
        patch.setattr(launches, "combine", Launches(broken))
        with pytest.raises(RuntimeError, match="no such kernel"):
            made[0](x, ids, weights, plan=Plan8())
    x, ids, weights = random_inputs(40, 384, 5, 2)
    assert relative_error(made[1](x, ids, weights, plan=Plan8()), reference(second, x, ids, weights)) < 6e-2


def test_the_router_weight_on_the_input_and_pieces(emulated):
    w = layer("e4m3_block128", E=4, H=256, I=128)
    experts = emulated.W8A8Experts(backend.pack(w, problem(w)), problem(w))
    experts.most_tokens = 32
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
    ("tokens", "top_k", "H", "listed"),
    [
        (511, 2, 4096, False),
        (512, 2, 4096, True),
        (8192, 1, 4096, True),
        (1400, 8, 4096, False),
        (1500, 8, 4096, True),
        (700, 8, 7168, False),
        (1000, 8, 7168, True),
    ],
)
def test_inputs_are_rounded_into_list_order_from_the_size_on_where_it_pays(tokens, top_k, H, listed):
    assert Plan8.of(tokens, Shape8(8, top_k, H, 14336)).listed is listed


QWEN3, MIXTRAL, DEEPSEEK = Shape8(128, 8, 2048, 768), Shape8(8, 2, 4096, 14336), Shape8(64, 8, 7168, 2048)


@pytest.mark.parametrize(
    ("shape", "few"),
    [(QWEN3, (1, 8, 32)), (MIXTRAL, (1, 8, 32)), (DEEPSEEK, (1, 8, 32))],
    ids=["qwen3", "mixtral", "deepseek"],
)
def test_few_tokens_an_expert_take_the_kernel_that_reads_weights(shape, few):
    took = [m for m in (1, 8, 32, 128, 512, 2048) if Plan8.of(m, shape).few]
    assert took == list(few)
    assert not any(Plan8.of(m, shape, batch_invariant=True).few for m in few)


@pytest.mark.parametrize(("shape", "parts"), [(QWEN3, 1), (MIXTRAL, 4), (DEEPSEEK, 1), (Shape8(16, 1, 5120, 8192), 8)])
def test_one_token_splits_w2_where_its_tiles_do_not_fill_the_gpu(shape, parts):
    few = Plan8.of(1, shape).few
    assert few is not None
    assert parts == few[1].parts
    assert shape.I % (256 * parts) == 0


def test_columns_that_are_no_multiple_of_two_stages_take_the_other_kernel():
    assert Plan8.of(1, Shape8(8, 2, 4096, 384)).few is None
