"""Cases of the row `triton`, as data, and the body that runs one: pack, unpack, compute, compare.

The body runs on any device; on a CPU it needs TRITON_INTERPRET=1 in the environment before triton is imported, so there
tests/kernels/backends/test_triton.py runs this file as a program of its own:

    python triton_cases.py        reads case names from stdin, one a line; answers each with one line of JSON
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from expertd_kernels import Activation, ActivationKind, ActivationQuant, Element, ScaleType, Scheme
from expertd_kernels.backends.rounding import round_groups, round_mx, round_static
from expertd_kernels.common.problem import Device
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import apply_activation, reference
from expertd_kernels.weights.numerics import relative_error, tolerance

BF16, F16, F32 = ScaleType.BF16, ScaleType.F16, ScaleType.F32
GROUP128, TOKEN = ActivationQuant.E4M3_GROUP128, ActivationQuant.E4M3_TOKEN
STATIC, INT8, MX = ActivationQuant.E4M3_TENSOR, ActivationQuant.INT8_TOKEN, ActivationQuant.MXFP8


@dataclass(frozen=True)
class Case:
    """One layer and one batch.

    routing     "random", "nowhere" (a third of the routes is -1), "one" (all tokens to the same experts), "none"
    remembered  the second call is a replay, as on a GPU
    bm, tile    rows a block, and fields of the plan's tiles, to override
    """

    scheme: str | Scheme
    scale: ScaleType | None = None
    w2_scheme: str | None = None
    E: int = 3
    H: int = 64
    I: int = 48
    k: int = 2
    M: int = 4
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    act_order: bool = False
    on_input: bool = False
    quant: ActivationQuant = ActivationQuant.NONE
    routing: str = "random"
    dtype: torch.dtype = torch.bfloat16
    scale_factor: float = 1.0
    remembered: bool = False
    rows: int | None = None
    tile: dict[str, Any] = field(default_factory=dict)

    def scheme_value(self) -> Scheme:
        return Scheme.parse(self.scheme, self.scale) if isinstance(self.scheme, str) else self.scheme


def _acts() -> dict[str, Case]:
    kinds = {
        "gelu": Activation(ActivationKind.GELU_AND_MUL),
        "gelu_tanh": Activation(ActivationKind.GELU_TANH_AND_MUL),
        "swigluoai": Activation(ActivationKind.SWIGLUOAI, 1.702, 1.0, 0.5),
        "swigluoai_other": Activation(ActivationKind.SWIGLUOAI, 1.1, 0.25, None),
        "silu_limit": Activation(limit=0.4),
        "relu2": Activation(ActivationKind.RELU2),
    }
    return {f"act_{n}": Case("bf16", activation=a, H=32, I=32, bias=n == "swigluoai") for n, a in kinds.items()}


ON_ACCUMULATOR, ON_OPERAND = {"weighted": False}, {"weighted": True}
ODD = Scheme(Element.INT4, 1, 20, BF16, zeros=True)
SCHEMES: dict[str, Case] = {
    # each scheme; K = 256 is one full K block of int4, I = 40 and 72 leave tails in rows and columns
    "bf16": Case("bf16", H=72, I=40),
    "f16": Case("f16"),
    "f32": Case("f32"),
    "int4_g128": Case("int4_g128", H=256, I=128, M=3, tile=ON_ACCUMULATOR),
    "int4_g128_weighted": Case("int4_g128", H=256, I=128, M=3, tile=ON_OPERAND),
    "int4_g64_f16": Case("int4_g64", F16, H=256, I=64, M=3, tile=ON_ACCUMULATOR),
    "int4_g64_f16_weighted": Case("int4_g64", F16, H=64, I=64, M=3, tile=ON_OPERAND),
    "int4_g32_f32_zp": Case("int4_g32_zp", F32, H=64, I=64, tile=ON_ACCUMULATOR),
    "int4_g32_f32_zp_weighted": Case("int4_g32_zp", F32, H=64, I=64, tile=ON_OPERAND),
    "int4_g32": Case("int4_g32", H=96, I=32),
    "int4_g32_zp": Case("int4_g32_zp", H=128, I=32, tile=ON_ACCUMULATOR),
    "int4_g32_zp_weighted": Case("int4_g32_zp", H=128, I=32, tile=ON_OPERAND),
    "int4_g48": Case("int4_g48", H=96, I=48),
    "int4_g20_zp": Case(ODD, H=40, I=20),
    "int4_channel": Case("int4_channel", H=72, I=40),
    "int4_channel_zp": Case("int4_channel_zp", F16, H=72, I=40),
    "int4_large_scales": Case("int4_g32", H=64, I=32, scale_factor=2.0**12, tile=ON_OPERAND),
    "int8_g32": Case("int8_g32", H=64, I=32, tile=ON_ACCUMULATOR),
    "int8_g64_zp": Case("int8_g64_zp", H=128, I=64, tile=ON_ACCUMULATOR),
    "int8_g32_zp_f32_weighted": Case("int8_g32_zp", F32, H=64, I=32, tile=ON_OPERAND),
    "int8_g64_weighted": Case("int8_g64", H=128, I=64, tile=ON_OPERAND),
    "int8_channel": Case("int8_channel", H=72, I=40),
    "int8_channel_zp": Case("int8_channel_zp", F32),
    "mxfp4": Case("mxfp4", H=128, I=96),
    "mxfp4_two_blocks": Case("mxfp4", H=352, I=32, E=2, M=2, tile={"k_blocks": 2}),
    "mxfp8": Case("mxfp8", H=96, I=32),
    "nvfp4": Case("nvfp4", H=64, I=48),
    "e4m3_tensor": Case("e4m3_tensor", H=72, I=40),
    "e4m3_channel": Case("e4m3_channel", BF16, H=72, I=40),
    "e4m3_block32": Case("e4m3_block32", H=72, I=40, E=2, M=2, tile=ON_ACCUMULATOR),
    "e4m3_block32_weighted": Case("e4m3_block32", H=72, I=40, E=2, M=2, tile=ON_OPERAND),
    "e4m3_block128_ragged": Case("e4m3_block128", H=144, I=40, E=2, M=2),
    "mixed": Case("int4_g32", w2_scheme="int8_channel", H=64, I=40),
}
SMALL: dict[str, Case] = {
    **SCHEMES,
    # features
    "bias": Case("int4_g32", H=64, I=32, bias=True),
    "act_order": Case("int4_g32_zp", H=64, I=32, act_order=True),
    "act_order_bf16": Case("bf16", H=40, I=24, act_order=True),
    "on_input": Case("int8_channel", k=1, on_input=True, bias=True, E=3),
    "grouped_rows": Case("bf16", k=1, E=3, M=7),
    "nowhere": Case("int4_g32", H=32, I=32, routing="nowhere", M=8),
    "no_route": Case("bf16", H=32, I=32, routing="none", M=3),
    "one_expert": Case("bf16", H=32, I=32, routing="one", E=9, k=1, M=19, rows=16),
    "one_token": Case("int4_g32", H=64, I=32, M=1, E=9),
    "one_token_nowhere": Case("bf16", H=32, I=32, M=1, E=9, k=3, routing="nowhere"),
    "many_routes": Case("bf16", H=16, I=16, E=5, k=4, M=70, tile={"weight_rows": 16}),
    "more_routes": Case("bf16", H=16, I=16, E=10, k=10, M=103, rows=64, tile={"weight_rows": 16}),
    "f32_in": Case("bf16", H=32, I=32, dtype=torch.float32),
    "remembered": Case("int4_g32", H=64, I=32, E=9, k=4, M=5, bias=True, remembered=True),
    "remembered_f32": Case("bf16", H=32, I=32, dtype=torch.float32, remembered=True),
    "remembered_w8a8": Case("e4m3_block128", H=144, I=32, E=2, M=2, quant=GROUP128, remembered=True),
    "bm32_group": Case("bf16", H=32, I=32, E=2, M=40, rows=32, tile={"together": 2, "weight_rows": 16}),
    # rounded activations
    "w8a8_block128": Case("e4m3_block128", H=144, I=40, quant=GROUP128),
    "w8a8_channel": Case("e4m3_channel", H=72, I=40, quant=TOKEN, bias=True),
    "w8a8_tensor": Case("e4m3_tensor", H=64, I=32, quant=TOKEN, on_input=True, k=1),
    "w8a8_static": Case("e4m3_tensor", H=144, I=72, quant=STATIC),
    "w8a8_static_channel": Case("e4m3_channel", H=72, I=40, quant=STATIC, bias=True),
    "w8a8_int8": Case("int8_channel", H=272, I=72, quant=INT8, bias=True, routing="nowhere"),
    "w8a8_int8_tensor": Case("int8_tensor", H=64, I=32, quant=INT8, on_input=True, k=1),
    "w8a8_mxfp8": Case("mxfp8", H=160, I=64, quant=MX),
    "w4a8_token": Case("int4_g64", F16, H=192, I=128, M=8, quant=TOKEN, bias=True),
    "w4a8_group": Case("int4_g128", H=384, I=256, E=2, M=2, quant=GROUP128),
    "w4a8_channel": Case("int4_channel", H=144, I=72, M=24, quant=GROUP128, routing="nowhere"),
    "w4a8_g32": Case("int4_g32", F32, H=160, I=32, quant=TOKEN, on_input=True, k=1),
    "w4a8_zp_token": Case("int4_g64_zp", H=192, I=128, quant=TOKEN, bias=True),
    "w4a8_zp_group": Case("int4_g128_zp", F32, H=384, I=256, E=2, M=2, quant=GROUP128),
    "w4a8_zp_channel": Case("int4_channel_zp", H=144, I=72, M=24, quant=GROUP128, routing="nowhere"),
    "w4a8_int8": Case("int4_g64", F16, H=192, I=128, M=8, quant=INT8, bias=True),
    "w4a8_int8_channel": Case("int4_channel", H=144, I=72, quant=INT8, on_input=True, k=1),
    "w4a8_int8_zp": Case("int4_g32_zp", H=160, I=96, quant=INT8, activation=Activation.parse("swigluoai")),
    "w4a8_int8_channel_zp": Case("int4_channel_zp", F32, H=144, I=72, quant=INT8, routing="nowhere"),
    "w4a8_mxfp4": Case("mxfp4", H=160, I=96, quant=MX, bias=True),
    **_acts(),
}


def large() -> dict[str, Case]:
    """For a GPU: sizes that fill tiles, many experts, several blocks an expert, chunks, tails, tall tiles."""
    silu, oss = Activation(), Activation.parse("swigluoai")
    out = {}
    for name in ("int4_g128", "int4_g128_zp", "int4_g32", "int8_channel", "int8_g128_zp", "mxfp4", "mxfp8", "nvfp4",
                 "e4m3_block128", "e4m3_channel", "bf16", "f16", "f32", "int4_channel_zp"):  # fmt: skip
        for E, M in ((8, 1), (60, 7), (128, 64), (8, 1000), (60, 4096)):
            H, I = (512, 384) if "g128" in name else (480, 288)
            out[f"{name}-E{E}-M{M}"] = Case(name, E=E, H=H, I=I, k=4, M=M, activation=silu, routing="nowhere")
    for M in (1, 33, 600):
        out[f"gptoss-M{M}"] = Case("mxfp4", E=16, H=2880, I=2880, k=4, M=M, activation=oss, bias=True)
        out[f"experts512-M{M}"] = Case("int4_g128", E=512, H=256, I=128, k=8, M=M)
        out[f"f16scales-M{M}"] = Case("int4_g128", F16, E=16, H=512, I=256, k=4, M=M)
        out[f"f32scales-zp-M{M}"] = Case("int4_g64_zp", F32, E=16, H=512, I=256, k=4, M=M)
        out[f"act_order-M{M}"] = Case("int4_g128", E=16, H=512, I=256, k=4, M=M, act_order=True)
        out[f"odd-M{M}"] = Case(ODD, E=16, H=520, I=260, k=4, M=M)
        for scheme, quant in (
            ("e4m3_block128", GROUP128), ("e4m3_channel", TOKEN), ("e4m3_tensor", STATIC), ("int8_channel", INT8),
            ("mxfp8", MX), ("mxfp4", MX), ("int4_g32", TOKEN), ("int4_channel", GROUP128), ("int4_g32_zp", TOKEN),
            ("int4_g64", INT8), ("int4_g64_zp", INT8), ("int4_channel_zp", INT8),
        ):  # fmt: skip
            out[f"rounded-{scheme}-M{M}"] = Case(scheme, E=16, H=480, I=328, k=4, M=M, quant=quant)
    out["chunks"] = Case("int4_g128", E=4, H=128, I=128, k=2, M=20000)
    return out


LARGE = large()


def weights_of(c: Case, device: torch.device | str) -> Weights:
    """Signed scales where the type has a sign; some scales zero; scale_factor on top."""
    s = c.scheme_value()
    w = random_weights(
        s,
        c.E,
        c.H,
        c.I,
        activation=c.activation,
        bias=c.bias,
        act_order=c.act_order,
        signed_scales=s.element.quantized,
        w2_scheme=c.w2_scheme,
        seed=3,
        device=device,
    )
    if c.quant is STATIC:  # experts of different ranges; 448 steps reach 9, and 90 for products
        ranges = torch.linspace(0.5, 1.0, c.E, device=device)
        w = replace(w, input_scales=torch.stack((0.02 * ranges, 0.2 * ranges), 1))
    if not s.element.quantized or s.scale is ScaleType.E8M0:
        return w
    assert w.w13.scales is not None
    scales = (w.w13.scales.float() * c.scale_factor).to(w.w13.scales.dtype)
    if s.rows == 1:
        scales[:, 1::7] = 0.0
    return replace(w, w13=replace(w.w13, scales=scales))


def inputs_of(c: Case, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, ids, w = random_inputs(c.M, c.H, c.E, c.k, seed=5, dtype=c.dtype, device=device)
    if c.scale_factor != 1.0:
        x = x / c.scale_factor
    if c.routing == "nowhere":
        ids = torch.where((torch.arange(ids.numel(), device=ids.device) % 3 == 1).view_as(ids), -1, ids)
    elif c.routing == "none":
        ids = torch.full_like(ids, -1)
    elif c.routing == "one":
        ids = ids[:1].expand_as(ids).contiguous()
    return x, ids, w


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def same_bits(a: Weights, b: Weights) -> str:
    """ "" if every tensor and fact agrees bit for bit, else the first that does not."""
    for name in ("w13", "w2"):
        p, q = getattr(a, name), getattr(b, name)
        if (p.scheme, p.shape, p.segments) != (q.scheme, q.shape, q.segments):
            return f"{name}: {q.scheme} {q.shape}"
        left, right = dict(p.tensors()), dict(q.tensors())
        if left.keys() != right.keys():
            return f"{name}: fields {sorted(right)}"
        for field_name, t in left.items():
            u = right[field_name]
            if t.dtype != u.dtype or not torch.equal(_bytes(t), _bytes(u)):
                return f"{name}.{field_name}"
    return "" if a.activation == b.activation else "activation"


def remember(experts: Any) -> None:
    """Let the interpreter's launches be recorded and replayed, with all arguments in the order of the signature."""

    class Compiled:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: self.kernel[grid](*arguments)

    def launch(call: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        kernel[grid](*args, **constants)
        tensors = (call.x, call.ids, call.weights, call.out)
        call.recording.add(Compiled(kernel), grid, kernel.arg_names, args, constants, tensors)

    experts._replays, experts._launch = True, launch


def rounded_rows(x: torch.Tensor, how: ActivationQuant, static: float) -> torch.Tensor:
    """x [M, K] rounded as `how` says, as f32 numbers."""
    x, K = x.float(), x.shape[1]
    if how is STATIC:
        return round_static(x, torch.tensor(static)).float() * static
    if how in (GROUP128, MX):
        x = torch.nn.functional.pad(x, (0, -K % 128))
        codes, scale = round_groups(x) if how is GROUP128 else round_mx(x)
        factor = scale if how is GROUP128 else torch.exp2(scale.float() - 127)
        return (codes.float().view(*factor.shape, -1) * factor[..., None]).view(x.shape)[:, :K]
    top = x.abs().amax(1, keepdim=True).clamp_min(1e-12)
    if how is INT8:
        return (x / top * 127).round() * top / 127
    return (x / top * 448).to(torch.float8_e4m3fn).float() * top / 448


def on_rounded_rows(c: Case, weights: Weights, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The reference, with both GEMMs' inputs rounded as the case says: only the kernel's own arithmetic is left."""
    scales = weights.input_scales
    first, second = (0.0, 0.0) if scales is None else scales.amax(0).tolist()
    one, out = replace(weights.w13, bias=None), torch.zeros(x.shape, device=x.device)
    w13, w2, rows = one.dequantize(), weights.w2.dequantize(), rounded_rows(x, c.quant, first)
    for t, j in (ids >= 0).nonzero().tolist():
        e, factor = int(ids[t, j]), w[t, j]
        h = w13[e] @ rows[t] * (factor if c.on_input else 1.0)
        h = h if weights.w13.bias is None else h + weights.w13.bias[e]
        h = apply_activation(h[None], weights.activation).bfloat16()
        y = w2[e] @ rounded_rows(h, c.quant, second)[0]
        y = y if weights.w2.bias is None else y + weights.w2.bias[e]
        out[t] += y if c.on_input else y * factor
    return out


def run(c: Case, device: torch.device | str, kind: Device, calls: int = 2) -> dict[str, Any]:
    """relative_error, own_error (without what rounding the activations costs), tolerance,
    unpacked ("" or what differs), repeated (all calls give the same bits)."""
    from expertd_kernels.backends import triton as backend

    weights = weights_of(c, device)
    problem = problem_of(weights, kind, top_k=c.k, activation_quant=c.quant, router_weight_on_input=c.on_input)
    packed = backend.pack(weights, problem)
    experts = backend.experts(packed, problem)
    if c.rows or c.tile:
        plan = experts.plan(c.M, c.k)
        tiles = {n: replace(getattr(plan, n), **c.tile) for n in ("w13", "w2")}
        changed = replace(plan, rows=c.rows or plan.rows, **tiles)
        experts.plan = lambda tokens, top_k: changed
    if c.remembered and str(device) == "cpu":
        remember(experts)
    x, ids, w = inputs_of(c, device)
    outs = []
    for again in (x, x.clone())[:calls]:
        out = torch.full_like(x, float("nan"))
        experts(again, ids, w, router_weight_on_input=c.on_input, out=out)
        outs.append(out)
    if c.remembered:
        assert experts._replays, "the replay did not repeat the first call"
        assert len(experts._recordings) == 1
    rows = torch.linspace(0, c.M - 1, min(c.M, 64)).long().to(x.device)
    ref = reference(weights, x[rows], ids[rows], w[rows], router_weight_on_input=c.on_input)
    finite = bool(torch.isfinite(outs[0]).all())
    rounded = c.quant is not ActivationQuant.NONE
    own = on_rounded_rows(c, weights, x[rows], ids[rows], w[rows]) if rounded else ref
    return {
        "relative_error": relative_error(outs[0][rows], ref) if finite else float("inf"),
        "own_error": relative_error(outs[0][rows], own) if finite else float("inf"),
        "tolerance": tolerance("bf16", c.quant),
        "unpacked": same_bits(weights, backend.unpack(packed)),
        "repeated": torch.equal(outs[0], outs[-1]),
    }


def calls_of(name: str) -> int:
    """Of a case in the interpreter: one where it differs from others by scheme or activation alone, of which nothing
    outlives a call; two of every way to route, to round and to replay."""
    return 1 if name in SCHEMES or name.startswith("act_") else 2


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        name = line.strip()
        try:
            answer = run(SMALL[name], "cpu", Device("cpu", "interpreter"), calls_of(name))
        except Exception as e:
            answer = {"failed": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
