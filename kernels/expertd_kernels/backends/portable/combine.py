# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""out[t] = sum over j of weight[t, j] * y[t * k + j], in float32 and in the order of j; -1 routes add nothing."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from expertd_kernels.backends.portable.unpack import to_bf16

__all__ = ["combine"]


@triton.jit
def combine(
    y_ptr, ids_ptr, weights_ptr, out_ptr, out_stride,
    H: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """y [M * TOP_K, H] bf16; ids, weights [M, TOP_K]; out [M, H].  Program (column tile, token)."""
    if PDL:
        gdc_wait()
    t = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    inside = h < H
    acc = tl.zeros([BH], tl.float32)
    for j in tl.static_range(TOP_K):
        e = tl.load(ids_ptr + t * TOP_K + j)
        width = tl.where((e >= 0) & (e < E), H, 0)
        y = tl.load(y_ptr + (t * TOP_K + j) * H + h, mask=h < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            y = y * tl.where(width > 0, tl.load(weights_ptr + t * TOP_K + j), 0.0)
        acc += y
    if out_ptr.dtype.element_ty == tl.bfloat16:
        acc = to_bf16(acc, SOFT)
    tl.store(out_ptr + t * out_stride + h, acc, mask=inside)
