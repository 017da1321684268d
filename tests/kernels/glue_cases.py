"""Cases of the kernels around the GEMMs of other packages (backends/glue.py), and of the rows that are made of both:
whole layers through stand-ins for the packages that keep to their contracts and multiply in f32.

On a CPU the kernels need TRITON_INTERPRET=1 in the environment before triton is imported, so backends/test_glue.py runs
this file as a program of its own:

    python glue_cases.py        reads case names from stdin, one a line; answers each with one line of JSON
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import marlin_checks
import torch
from interpreted import answer_cases

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, problem_of
from expertd_kernels.backends import deepgemm, glue, humming, marlin
from expertd_kernels.backends.glue_space import capacity
from expertd_kernels.backends.rounding import round_groups
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error, tolerance
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

KINDS = [Activation(), Activation(limit=0.5), Activation.parse("swigluoai"), Activation(ActivationKind.GELU_AND_MUL),
         Activation(ActivationKind.GELU_TANH_AND_MUL), Activation(ActivationKind.RELU2)]  # fmt: skip
HUMMING_SCHEMES = (
    "int4_g32", "int4_g128", "int4_g64_zp", "int4_channel", "int8_g128", "int8_channel_zp", "mxfp4", "mxfp8",
    "e4m3_block128",
)  # fmt: skip
MARLIN_SCHEMES = ("int4_g32", "int4_g128", "int4_g64_zp", "int4_channel", "int8_g128", "int8_channel", "mxfp4",
                  "e4m3_g128", "e4m3_channel", "e4m3_block128", "e4m3_tensor")  # fmt: skip
STORED = (ScaleType.BF16, ScaleType.F16, ScaleType.E8M0)
BLOCKS = tuple(Scheme(Element.E4M3, 128, 128, kind) for kind in STORED)
"""128 x 128 blocks with scales of every type."""
CPU = torch.device("cpu")


def layer(scheme, H=256, I=128, E=5, **kw):
    return random_weights(scheme, E, H, I, **kw)


def problem(w, how=ActivationQuant.NONE):
    packages = dict(assumed_packages(BACKENDS))
    return problem_of(w, NAMED_DEVICES["sm90"], top_k=2, packages=packages, activation_quant=how)


def inputs(M, E, k, H=256, nowhere=True):
    """A token and a route that are computed elsewhere, where there are as many."""
    x, ids, weights = random_inputs(M, H, max(E, k), k, seed=M)
    ids = (ids % E).contiguous()
    if nowhere and M > 3:
        ids[2], ids[3, 0] = -1, -1
    return x, ids, weights


# ---------------------------------------------------------------------------------------------------------- places


def check_places(M, k, E, alignment, nowhere=True):
    """Every tensor that place_rows writes, against what its text says."""
    x, ids, weights = inputs(M, E, k, H=8, nowhere=nowhere)
    call = glue.Glue(x, ids, weights, E, {}, alignment)
    for t in call.parts.values():
        t.fill_(-77)
    places = call.place(alignment, routes=True, experts=True, blocks=True)
    assert places.rows == capacity(M * k, E, alignment)
    assert places.rows % alignment == 0
    flat = ids.flatten().tolist()
    want, start = {}, 0
    for e in range(E):
        mine = [r for r, other in enumerate(flat) if other == e]
        assert int(places.start[e]) == start
        for i, r in enumerate(mine):
            want[start + i] = (r, e)
        blocks = -(-len(mine) // alignment)
        at = start // alignment
        assert places.block[at : at + blocks].tolist() == [e] * blocks
        start += blocks * alignment
    assert int(places.end) == start
    assert places.end.shape == (1,)
    assert places.row.tolist() == [next((at for at, (r, _) in want.items() if r == n), -1) for n in range(M * k)]
    nobody = (M * k, -1)
    assert places.route[:start].tolist() == [want.get(at, nobody)[0] for at in range(start)]
    assert places.expert.tolist() == [want.get(at, nobody)[1] for at in range(places.rows)]


def nowhere_at_all():
    ids = torch.full((3, 2), -1, dtype=torch.int32)
    call = glue.Glue(torch.zeros(3, 8), ids, torch.ones(3, 2), 4, {}, 128)
    places = call.place(128, experts=True)
    assert not int(places.end)
    assert set(places.expert.tolist()) == {-1}
    assert set(places.row.tolist()) == {-1}


# ---------------------------------------------------------------------------------------------------------- humming


class Layer:
    """The package's HummingLayer by its documented schema, in f32."""

    def __init__(self, shape_n, shape_k, weight_config, num_experts, has_bias, torch_dtype, pad_n_to_multiple):
        assert pad_n_to_multiple == 128
        self.n, self.k, self.config, self.e = shape_n, shape_k, weight_config, num_experts
        self.has_bias, self.ready = has_bias, False
        assert torch_dtype is torch.bfloat16
        assert weight_config["quant_method"] == "humming"

    def load_from_tensors(self, tensors):
        assert set(tensors) == {"weight", "weight_scale"} | ({"bias"} if self.has_bias else set()) | (
            {"zero_point"} if self.config["has_zero_point"] else set()
        )
        self.t = tensors

    def to(self, device):
        return self

    def transform(self):
        dtype, group = self.config["dtype"], self.config["group_size"] or self.k
        wide = {"uint4": 4, "float4e2m1": 4, "uint8": 8, "float8e4m3": 8}[dtype]
        weight, scale = self.t["weight"], self.t["weight_scale"]
        assert weight.dtype == torch.int32
        assert weight.shape == (self.e, self.n, self.k * wide // 32)
        codes = self._split(weight, wide)
        if dtype.startswith("uint"):
            zero = torch.tensor(float(1 << (wide - 1)))
            if self.config["has_zero_point"]:
                words = self.t["zero_point"]
                assert words.shape == (self.e, self.n * wide // 32, self.k // group)
                zero = self._split(words.transpose(1, 2).contiguous(), wide).transpose(1, 2).float()
                zero = zero.repeat_interleave(group, 2)
            w = codes.float() - zero
        elif dtype == "float4e2m1":
            w = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes.long()]
        else:
            w = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        if self.config.get("scale_dtype") == "float8e8m0":
            assert scale.dtype == torch.float8_e8m0fnu
        else:
            assert scale.dtype == (torch.float32 if "group_size_n" in self.config else torch.bfloat16)
        rows = self.config.get("group_size_n", 1)
        assert scale.shape == (self.e, self.n // rows, self.k // group)
        self.w = w * scale.float().repeat_interleave(rows, 1).repeat_interleave(group, 2)
        self.ready = True
        self.humming_config = SimpleNamespace(n=self.n, to_str=lambda: f"layer {self.n}")

    @staticmethod
    def _split(words, wide):
        """[..., W] int32 -> [..., W * 32 / wide]: fields, low bits first."""
        return torch.stack([(words >> at) & ((1 << wide) - 1) for at in range(0, 32, wide)], -1).flatten(-2)

    def __call__(self, x, outputs, tuning_config, compute_config, valid_shape_m, top_k=1, **places):
        assert self.ready
        tuning, kind = json.loads(tuning_config), json.loads(compute_config)["gemm_type"]
        assert x.is_contiguous()
        assert x.dtype == outputs.dtype == torch.bfloat16
        assert x.shape[1] == self.k
        assert outputs.shape == (valid_shape_m, self.n)
        outputs.fill_(float("nan"))
        for rows, e, into in self._rows(tuning["block_shape"][0], kind, x.shape[0], top_k, **places):
            y = x[rows].float() @ self.w[e].t()
            outputs[into] = (y + self.t["bias"][e].float() if self.has_bias else y).to(torch.bfloat16)

    def _rows(
        self, block, kind, tokens, top_k, expert_layout=None, sorted_ids=None, expert_ids=None, num_tokens_padded=None
    ):
        """(rows of the input, expert, rows of the output) of each piece, by the package's two contracts."""
        if kind == "grouped_contiguous":
            assert expert_layout.dtype in (torch.int32, torch.int64)
            assert expert_layout.shape == (self.e + 1,)
            for e in range(self.e):
                rows = list(range(int(expert_layout[e]), int(expert_layout[e + 1])))
                yield rows, e, rows
            return
        assert kind == "indexed"
        assert sorted_ids.dtype == expert_ids.dtype == num_tokens_padded.dtype == torch.int32
        assert num_tokens_padded.shape == (1,)
        end = int(num_tokens_padded)
        assert end % block == 0
        assert end <= sorted_ids.numel()
        for at in range(0, end, block):
            routes = [r for r in sorted_ids[at : at + block].tolist() if r < tokens * top_k]
            yield [r // top_k for r in routes], int(expert_ids[at // block]), routes


def heuristics(config, shape_m, *, gemm_type, device):
    """Blocks that differ between the matrices, as the package's do."""
    assert shape_m > 0
    return {"block_shape": (16 if config.n == 256 else 8, 128, 64), "num_stages": 3}


VENDOR = SimpleNamespace(HummingLayer=Layer, get_heuristics_config=heuristics)


def humming_experts(w):
    compiled = []
    packed = humming.pack(w, problem(w))
    return humming.HummingExperts(packed, VENDOR, CPU, lambda *a: compiled.append(a)), compiled


def humming_layer(scheme, activation=KINDS[0], M=7):
    w = layer(scheme, E=3, activation=activation, bias=True, seed=5)
    run, _ = humming_experts(w)
    check_layer(run, w, *inputs(M, 3, 2), 1e-2)


def humming_sorted(scheme):
    """So few experts that the rows are sorted."""
    w = layer(scheme, E=1, bias=True, seed=5)
    run, _ = humming_experts(w)
    check_layer(run, w, *inputs(60, 1, 2), 1e-2)
    assert run.plan(60, 2).grouped


def humming_compiles_once_for_a_power_of_two():
    w = layer("int4_g32", E=3)
    run, compiled = humming_experts(w)
    for M in (5, 6, 8, 7):
        run(*inputs(M, 3, 2))
    assert len(compiled) == 2
    run(*inputs(9, 3, 2))
    assert len(compiled) == 4
    assert {c[0] for c in compiled} == {f"layer {w.w13.shape[1]}", f"layer {w.w2.shape[1]}"}


# ----------------------------------------------------------------------------------------------------------- marlin


class MarlinGemm:
    """Stands in for sglang's moe_wna16_marlin_gemm: its contract, checked, and a product in f32 with the weights that
    are packed in the tensors it is given."""

    def __init__(self, packed):
        w = marlin.unpack(packed)
        self.dense = {name: m.dequantize() for name, m in (("w13", w.w13), ("w2", w.w2))}
        self.tensors = packed.tensors

    def __call__(self, a, c, *, b_q_weight, b_scales, b_zeros_or_none, b_q_type, workspace, sorted_token_ids,
                 expert_ids, num_tokens_post_padded, moe_block_size, top_k, mul_topk_weights, size_m, size_n, size_k,
                 is_ep, use_fp32_reduce, **absent):  # fmt: skip
        name = next(n for n in self.dense if torch.equal(self.tensors[f"{n}.codes"], b_q_weight))
        marlin_checks.shapes(a, c, b_q_weight, size_m, size_n, size_k, top_k, b_q_type)
        marlin_checks.scales(b_scales, b_zeros_or_none, size_n, size_k, b_q_type)
        marlin_checks.blocks(size_n, size_k, moe_block_size)
        marlin_checks.workspace(workspace, size_n, sorted_token_ids, moe_block_size, 1)
        assert torch.equal(b_scales.view(torch.uint8), self.tensors[f"{name}.scales"].view(torch.uint8))
        zeros = self.tensors.get(f"{name}.zeros")
        assert (b_q_type == "uint4") == (b_zeros_or_none is not None) == (zeros is not None)
        assert not absent.pop("topk_weights").isnan().any()
        assert not any(t is not None for t in absent.values())
        dense = self.dense[name]
        assert 0 <= size_n - dense.shape[1] < 128
        assert size_k == dense.shape[2]
        assert (a.dtype, c.dtype, c.shape[1], mul_topk_weights, is_ep) == (
            torch.bfloat16,
            torch.bfloat16,
            size_n,
            False,
            False,
        )
        assert workspace.dtype == sorted_token_ids.dtype == torch.int32
        assert use_fp32_reduce
        assert moe_block_size in marlin.BLOCKS
        rows = int(num_tokens_post_padded)
        assert rows % moe_block_size == 0
        for at in range(0, rows, moe_block_size):
            e = int(expert_ids[at // moe_block_size])
            for route in sorted_token_ids[at : at + moe_block_size].tolist():
                if route < size_m * top_k:
                    c[route] = float("nan")  # padded rows: whatever is there must not be read
                    c[route, : dense.shape[1]] = (dense[e] @ a[route // top_k].float()).bfloat16()


MARLIN_TYPES = SimpleNamespace(
    **{name: name for name in ("uint4b8", "uint4", "uint8b128", "float8_e4m3fn", "float4_e2m1f")}
)


def marlin_experts(w):
    packed = marlin.pack(w, problem(w))
    return marlin.MarlinExperts(packed, MarlinGemm(packed), MARLIN_TYPES, CPU)


def marlin_layer(scheme, activation=KINDS[0], M=7, H=256, I=128):
    w = layer(scheme, H, I, 3, activation=activation, bias=True, seed=5)
    check_layer(marlin_experts(w), w, *inputs(M, 3, 2, H), 1e-2)


# --------------------------------------------------------------------------------------------------------- deepgemm


class Package:
    """Stands in for deep_gemm: its contract, checked, and a product in f32.  Blocks without an expert are NaN."""

    def __init__(self, alignment=128):
        self.alignment = alignment

    def get_mk_alignment_for_contiguous_layout(self):
        return self.alignment

    def _product(self, x, weights, d, grouped_layout):
        (M, K), (E, N, k) = x.shape, weights.shape
        assert k == K
        assert tuple(d.shape) == (M, N)
        assert (d.dtype, grouped_layout.dtype) == (torch.bfloat16, torch.int32)
        assert tuple(grouped_layout.shape) == (M,)
        assert grouped_layout.is_contiguous()
        d.fill_(float("nan"))
        assert M % self.alignment == 0
        for at in range(0, M, self.alignment):
            block = slice(at, at + self.alignment)
            experts = grouped_layout[block]
            e = int(experts[0])
            assert set(experts.tolist()) <= {e, -1}, "a block holds rows of one expert"
            assert -1 <= e < E
            valid = experts >= 0
            assert bool((valid[:-1] | ~valid[1:]).all()), "and those stand first"
            if e >= 0:
                d[block] = (x[block].float() @ weights[e].float().t()).bfloat16()

    def m_grouped_bf16_gemm_nt_contiguous(self, a, b, d, grouped_layout):
        assert a.dtype == b.dtype == torch.bfloat16
        assert a.is_contiguous()
        assert a.shape[1] % 64 == 0
        self._product(a, b, d, grouped_layout)

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout):
        (x, sx), (w, sw) = a, b
        assert x.dtype == w.dtype == torch.float8_e4m3fn
        assert sx.dtype == sw.dtype == torch.float32
        assert tuple(sx.shape) == (x.shape[0], x.shape[1] // 128)
        assert sx.stride() == (1, x.shape[0]), "rows last in memory, as the package would transpose them"
        assert tuple(sw.shape) == (w.shape[0], w.shape[1] // 128, w.shape[2] // 128)
        big = sw.repeat_interleave(128, 1).repeat_interleave(128, 2)
        self._product(x.float() * sx.repeat_interleave(128, 1), w.float() * big, d, grouped_layout)


def rounding_of(w):
    return ActivationQuant.E4M3_GROUP128 if w.w13.scheme.element is Element.E4M3 else ActivationQuant.NONE


def deepgemm_experts(w, alignment=128):
    return deepgemm.DeepGemmExperts(deepgemm.pack(w, problem(w, rounding_of(w))), Package(alignment), CPU)


def deepgemm_layer(scheme, activation=KINDS[0], bias=True):
    w = layer(scheme, activation=activation, bias=bias, seed=5)
    how = rounding_of(w)
    x, ids, weights = inputs(9, 5, 2)
    run = deepgemm_experts(w)
    out = check_layer(run, w, x, ids, weights, tolerance("bf16", how))
    if how is not ActivationQuant.NONE:  # as the package's own rounding, but for its reciprocal
        codes, scale = round_groups(x)
        exact = codes.float() * scale.repeat_interleave(128, 1)
        assert relative_error(out, reference(w, exact, ids, weights)) < tolerance("bf16", how)


# ----------------------------------------------------------------------------------------------------------- common


def check_layer(run, w, x, ids, weights, limit):
    out = torch.full_like(x, float("nan"))
    assert run(x, ids, weights, out=out) is out
    error = relative_error(out, reference(w, x, ids, weights))
    assert error < limit, error
    assert not out[(ids < 0).all(dim=1)].any()
    again = torch.full_like(out, float("nan"))
    assert torch.equal(run(x, ids, weights, out=again), out)
    return out


def pieces(make, scheme):
    """Pieces, the router weight on the input, f32 and strided tensors, no tokens."""
    w = layer(scheme)
    limit = tolerance("bf16", rounding_of(w))
    run = make(w)
    x, ids, weights = inputs(11, 5, 1, nowhere=False)
    weights = weights * 0.5
    whole = run(x, ids, weights, router_weight_on_input=True)
    want = reference(w, x, ids, weights, router_weight_on_input=True)
    assert relative_error(whole, want) < limit
    before, glue.MOST_ROUTES = glue.MOST_ROUTES, 4
    try:
        assert torch.equal(run(x, ids, weights, router_weight_on_input=True), whole)
    finally:
        glue.MOST_ROUTES = before
    strided = torch.full((256, 11), float("nan")).t()
    got = run(x.float(), ids.long(), weights.double(), router_weight_on_input=True, out=strided)
    assert got is strided
    assert relative_error(got, want) < limit
    assert run(x[:0], ids[:0], weights[:0]).shape == (0, 256)


def stored_scales(scheme):
    w = layer(scheme)
    check_layer(deepgemm_experts(w), w, *inputs(9, 5, 2), tolerance("bf16", ActivationQuant.E4M3_GROUP128))


CASES = {
    **{
        f"places M{M} k{k} E{E} by {a}": partial(check_places, M, k, E, a)
        for M, k, E in ((1, 1, 1), (1, 4, 8), (7, 2, 3), (40, 3, 16), (33, 2, 512), (300, 4, 5))
        for a in (1, 8, 40, 128)
    },
    "places: nowhere at all": nowhere_at_all,
    **{f"humming {s}": partial(humming_layer, s) for s in HUMMING_SCHEMES},
    **{f"humming {a.name} {i}": partial(humming_layer, "int4_g32", a) for i, a in enumerate(KINDS)},
    **{f"humming {s.name} {s.scale.value}": partial(humming_layer, s) for s in BLOCKS},
    **{f"marlin {s}": partial(marlin_layer, s) for s in MARLIN_SCHEMES},
    **{f"marlin {a.name} {i}": partial(marlin_layer, "int4_g32", a) for i, a in enumerate(KINDS)},
    **{
        f"marlin {s} H = {H} I = {I}": partial(marlin_layer, s, H=H, I=I)
        for s, H, I in (("mxfp4", 320, 320), ("int4_g64_zp", 192, 64), ("e4m3_channel", 192, 64))
    },
    "marlin padded before relu2": partial(marlin_layer, "int4_g32", KINDS[-1], H=192, I=64),
    "marlin M = 1": partial(marlin_layer, "int4_g64_zp", M=1),
    "marlin in pieces": partial(pieces, lambda w: marlin_experts(w), "int4_g32"),
    "humming M = 1": partial(humming_layer, "mxfp4", M=1),
    **{f"humming sorted {s}": partial(humming_sorted, s) for s in ("int4_g64_zp", "mxfp4")},
    "humming compiles once for a power of two": humming_compiles_once_for_a_power_of_two,
    "humming in pieces": partial(pieces, lambda w: humming_experts(w)[0], "int4_g32"),
    **{
        f"deepgemm {s} {a.name} {i}": partial(deepgemm_layer, s, a)
        for s in ("bf16", "e4m3_block128")
        for i, a in enumerate(KINDS)
    },
    "deepgemm without bias": partial(deepgemm_layer, "e4m3_block128", bias=False),
    **{f"deepgemm {s} in pieces": partial(pieces, deepgemm_experts, s) for s in ("bf16", "e4m3_block128")},
    **{f"deepgemm {s.scale.value} scales": partial(stored_scales, s) for s in BLOCKS},
}


def main() -> None:
    torch.set_num_threads(1)
    answer_cases(CASES)


if __name__ == "__main__":
    main()
