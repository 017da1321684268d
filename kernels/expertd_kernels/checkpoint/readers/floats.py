"""e4m3 and e2m1 weights with their scales, whatever the tool calls them: shared by the readers of four quant methods.

A caller names the tensors in a `Floats`; this module finds orientation and scale blocks from the shapes, checks them
against each other, and cuts the part.  Scales that multiply and second-level scales that divide are told apart by the
caller.  A block shape is taken from the scale's shape and confirmed by the configuration, never from one of them alone
where they could disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertd_kernels.checkpoint.readers.groups import check_extent
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, ScaleType, Scheme

__all__ = ["Floats", "layout_floats", "read_floats"]

SCALE_TYPES = {
    "F32": ScaleType.F32,
    "F16": ScaleType.F16,
    "BF16": ScaleType.BF16,
    "U8": ScaleType.E8M0,  # a byte beside float codes is an exponent, never a number
    "F8_E8M0": ScaleType.E8M0,
    "F8_E4M3": ScaleType.E4M3,
}
MX_BLOCK = 32


@dataclass(frozen=True)
class Floats:
    """Where the tensors of one unit are.

    element       E4M3 or E2M1
    codes, scale  suffixes; `scale` may also be a sibling's name, see sibling_rows
    block         (rows, cols) of weights a scale as the configuration says; None = it does not say
    second        suffix of the second-level scale, "" = none; divides: the checkpoint divides by it
    input_scale   suffix of the static activation scale, "" = none; input_divides: stored as its reciprocal
    sibling_rows  (first, rows) of the fused tensor that `scale` names among the siblings, which this unit's weights are
    blocks        codes are [rows, blocks, 16] bytes (gpt-oss)
    """

    element: Element
    codes: str
    scale: str
    block: tuple[int, int] | None = None
    second: str = ""
    divides: bool = False
    input_scale: str = ""
    input_divides: bool = False
    sibling_rows: tuple[int, int] | None = None
    blocks: bool = False
    activation: ActivationQuant = ActivationQuant.NONE
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _FloatsPlan:
    """What the shapes say.  transposed: stored [K, N]; repeat: copies of each scale row, where a fused tensor's blocks
    are split; first: the row of those where this unit begins; widen: blocks run along the outputs, see _widened."""

    scheme: Scheme
    n: int
    k: int
    transposed: bool
    repeat: int = 1
    first: int = 0
    widen: bool = False


def layout_floats(unit: Unit, f: Floats) -> Layout:
    """What read_floats will give, by headers alone.  Raises CheckpointError."""
    plan = _plan(unit, f)
    if f.activation.static and not (f.input_scale and unit.has(f.input_scale)):
        suffix = f.input_scale or "input_scale"
        raise unit.error(
            f"tensor {suffix!r} is missing", "the static scale of its input, which the quantization config promises"
        )
    notes = f.notes
    if plan.widen:
        notes += ("scale blocks run along the outputs, which no kernel computes: widened to bf16 (exact)",)
    return Layout(
        plan.scheme,
        plan.n,
        plan.k,
        bias=unit.has("bias"),
        input_scale=bool(f.input_scale) and unit.has(f.input_scale),
        activation=f.activation,
        notes=notes,
    )


def read_floats(unit: Unit, f: Floats) -> Part:
    """The projection's codes and scales as `f` says that they are stored."""
    plan = _plan(unit, f)
    scales = (unit.siblings[f.scale] if f.sibling_rows else unit.stored(f.scale)).read()
    if plan.transposed and scales.dim() == 2:
        scales = scales.t()
    bias = unit.read("bias") if unit.has("bias") else None
    if plan.widen:
        return Part(_widened(unit, unit.read(f.codes).t(), scales), bias=bias)
    return Part(
        _codes(unit, f, plan),
        _scale_rows(scales, plan),
        global_scale=_scalar(unit, f.second, f.divides),
        bias=bias,
        input_scale=_scalar(unit, f.input_scale, f.input_divides, single=True),
    )


def _plan(unit: Unit, f: Floats) -> _FloatsPlan:
    n, k, transposed = _orientation(unit, f)
    stored = unit.siblings.get(f.scale) if f.sibling_rows else unit.stored(f.scale)
    if stored is None:
        raise unit.error(
            f"tensor {f.scale!r} is missing beside experts", "one scale for each block of the fused weights"
        )
    kind = SCALE_TYPES.get(stored.dtype)
    if kind is None:
        raise unit.error(f"scales are {stored.dtype}", " or ".join(SCALE_TYPES), f.scale)
    total = f.sibling_rows[1] if f.sibling_rows else n
    along_outputs = transposed and kind is ScaleType.E8M0 and stored.shape == (k, -(-n // MX_BLOCK))
    if along_outputs and f.element is Element.E4M3:
        return _FloatsPlan(Scheme(Element.BF16), n, k, True, widen=True)
    rows, cols = _block(unit, f, stored.shape[::-1] if transposed else stored.shape, (total, k), kind)
    if f.second:
        unit.expect(f.second, None, "F32")
    if f.input_scale and unit.has(f.input_scale):
        unit.expect(f.input_scale, None, "F32", "BF16", "F16")
    first, repeat = 0, 1
    if f.sibling_rows and rows > 1 and total != n:
        fine = math.gcd(rows, n)  # a block of the fused scales may hold the last gate rows and the first up rows
        rows, repeat, first = fine, rows // fine, f.sibling_rows[0] // fine
    return _FloatsPlan(
        Scheme(f.element, rows, cols, kind, global_scale=bool(f.second)), n, k, transposed, repeat, first
    )


def _orientation(unit: Unit, f: Floats) -> tuple[int, int, bool]:
    """(n, k, stored input-first) of the codes.  The shape decides; for a square matrix the family does."""
    per_byte = 2 if f.element is Element.E2M1 else 1
    dtypes = ("U8", "I8") if f.element is Element.E2M1 else ("F8_E4M3",)
    t = unit.expect(f.codes, None, *dtypes)
    shape = t.shape
    if f.blocks:
        if len(shape) != 3 or shape[2] * per_byte != MX_BLOCK:
            raise unit.error(f"shape {list(shape)}", "[rows, K / 32, 16]", f.codes)
        shape = (shape[0], shape[1] * shape[2])
    if len(shape) != 2:
        raise unit.error(f"shape {list(t.shape)}", "a matrix", f.codes)
    straight = (shape[0], shape[1] * per_byte)
    turned = (shape[1], shape[0] * per_byte)
    wanted = (unit.n or None, unit.k or None)

    def fits(nk: tuple[int, int]) -> bool:
        return all(w is None or w == have for w, have in zip(wanted, nk, strict=True))

    orders = [(straight, False)] + ([(turned, True)] if unit.fused and not f.blocks else [])
    if unit.transposed:
        orders.reverse()
    for nk, transposed in orders:
        if fits(nk):
            return *nk, transposed
    raise unit.error(
        f"shape {list(t.shape)}, that is {straight[0]} x {straight[1]} weights",
        f"{unit.n or 'any'} outputs x {unit.k or 'any'} inputs, as config.json says",
        f.codes,
    )


def _block(unit: Unit, f: Floats, shape: tuple[int, ...], nk: tuple[int, int], kind: ScaleType) -> tuple[int, int]:
    """(rows, cols) of weights that share a scale, from the scale's shape [as if stored output-first]."""
    n, k = nk
    if math.prod(shape) == 1 and kind is not ScaleType.E8M0 and not (f.block and f.block != (WHOLE, WHOLE)):
        return WHOLE, WHOLE
    if shape in ((n,), (n, 1)) and kind is not ScaleType.E8M0 and f.block in (None, (1, WHOLE)):
        return 1, WHOLE
    if len(shape) == 4 and shape[1] == shape[3] == 1:  # [row blocks, 1, column blocks, 1]
        shape = (shape[0], shape[2])
    if kind is ScaleType.E8M0 and f.element is Element.E2M1:
        candidates = [(1, MX_BLOCK)]
    elif f.block is not None:
        candidates = [f.block]
    elif kind is ScaleType.E8M0:
        candidates = [(1, MX_BLOCK)]
    elif kind is ScaleType.E4M3:
        candidates = [(1, 16)]
    else:
        candidates = [(128, 128)]
    for rows, cols in candidates:
        for extent, size in ((rows, n), (cols, k)):
            check_extent(unit, "weight_block_size, block_structure or group_size of", extent, size)
        if shape == Scheme(f.element, rows, cols, kind).scale_shape(n, k):
            return rows, cols
    shapes = [list(Scheme(f.element, r, c, kind).scale_shape(n, k)) for r, c in candidates]
    raise unit.error(
        f"scale shape {list(shape)} for {n} x {k} weights",
        " or ".join(f"{s} (blocks of {r or n} x {c or k})" for s, (r, c) in zip(shapes, candidates, strict=True)),
        f.scale,
    )


def _codes(unit: Unit, f: Floats, plan: _FloatsPlan) -> Tensor | Stored:
    """Canonical codes: unread where the file's bytes are they already."""
    if not plan.transposed:
        stored = unit.stored(f.codes)
        return replace(stored, shape=(plan.n, plan.k // 2)) if f.blocks else stored
    codes = unit.read(f.codes)  # e2m1 is packed along K here, too: [K/2, N]
    return codes.view(torch.uint8).t() if codes.dtype is torch.int8 else codes.t()


def _scale_rows(scales: Tensor, plan: _FloatsPlan) -> Tensor:
    """The unit's own scales as [scale rows, scale cols]."""
    rows, cols = plan.scheme.scale_shape(plan.n, plan.k)
    if scales.dim() == 4:
        scales = scales[:, 0, :, 0]
    scales = scales.reshape(-1, cols)
    if plan.repeat > 1:
        scales = scales.repeat_interleave(plan.repeat, dim=0)
    return scales[plan.first : plan.first + rows]


def _scalar(unit: Unit, suffix: str, divides: bool, single: bool = False) -> Tensor | None:
    """A number of its own as a multiplier [1] (or [2] for gate and up).  f64 where the checkpoint stores the reciprocal
    of a second-level scale; f32 for a reciprocal input scale (single)."""
    if not suffix or not unit.has(suffix):
        return None
    value = unit.read(suffix).reshape(-1).float()
    if value.numel() != 1 and (single or value.numel() != 2 or unit.projection != "gate_up"):
        raise unit.error(f"{value.numel()} numbers", "one", suffix)
    if not bool(torch.isfinite(value).all()):
        raise unit.error("a scale is NaN or infinite", "finite numbers", suffix)
    if (divides or single) and not bool((value != 0).all()):
        raise unit.error("is 0, and is divided by", "a number above 0", suffix)
    if single and not bool((value > 0).all()):
        raise unit.error(f"is {float(value):g}, and activations are divided by it", "a number above 0", suffix)
    if not divides:
        return value
    return 1.0 / value if single else 1.0 / value.double()


def _widened(unit: Unit, codes: Tensor, scales: Tensor) -> Tensor:
    """[n, k] bf16 of e4m3 codes [n, k] and e8m0 scales [ceil(n / 32), k].  4 significant bits times a power of two fit
    bf16, short of its ends: anything that does not is an error."""
    exponents = scales.float().sub_(127.0).repeat_interleave(MX_BLOCK, dim=0)[: codes.shape[0]]
    exact = codes.float() * torch.exp2(exponents)
    out = exact.to(torch.bfloat16)
    if not (torch.equal(out.float(), exact) and bool(torch.isfinite(exact).all())):
        raise unit.error("e4m3 times its e8m0 scale does not fit bf16", "weights of 2 ** -120 to 2 ** 120")
    return out
