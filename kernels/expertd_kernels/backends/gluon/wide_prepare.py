# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code before kernel `wide`: each token's input and router weights put to the places of its routes."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["n_rows"])
def place_inputs(
    x, places, weights, placed, placed_weights, n_rows, TOPK: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """placed [n_rows * TOPK, STRIDE], placed_weights [n_rows * TOPK]: row places[r] is that of route r (-1: nowhere).
    R rows, B columns a program."""
    PARTS: tl.constexpr = (COLUMNS + B - 1) // B
    part = tl.program_id(0) % PARTS
    row = tl.program_id(0) // PARTS * R + tl.arange(0, R)
    k = part * B + tl.arange(0, B)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    here = (row < n_rows)[:, None] & (k < COLUMNS)[None, :]
    v = tl.load(x + row.to(tl.int64)[:, None] * COLUMNS + k[None, :], mask=here, other=0.0)
    for j in tl.static_range(TOPK):
        r = row * TOPK + j
        at = tl.load(places + r, mask=row < n_rows, other=-1)
        if part == 0:
            w = tl.load(weights + r, mask=at >= 0, other=0.0)
            tl.store(placed_weights + at, w, mask=at >= 0)
        tl.store(
            placed + at.to(tl.int64)[:, None] * STRIDE + k[None, :], v,
            mask=(at >= 0)[:, None] & (k < COLUMNS)[None, :],
        )  # fmt: skip
