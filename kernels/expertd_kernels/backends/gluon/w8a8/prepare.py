# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code before the GEMMs: activations rounded to e4m3, in the same launch as the grouping of the routes."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.gather.rounding import largest_of, to_codes
from expertd_kernels.backends.gluon.shared.routing import group_few, place


@triton.jit
def _rounded(
    x, scale, row, k, n_rows, COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Rows `row` [R], columns k [B] of x [n_rows, COLUMNS] bf16 -> e4m3 [R, B], scales = absolute maximum / 448.
    GROUPED: [R, B / 128] f32; STATIC: scale [1] is given; else [R], and B >= COLUMNS."""
    here = (row < n_rows)[:, None] & (k < COLUMNS)[None, :]
    v = tl.load(x + row.to(tl.int64)[:, None] * COLUMNS + k[None, :], mask=here, other=0.0).to(tl.float32)
    if GROUPED:
        v = tl.reshape(v, [R, B // 128, 128])
        s = largest_of(v)
        v = tl.reshape(v / s[:, :, None], [R, B])
    elif STATIC:
        s = tl.load(scale)
        v = v / s
    else:
        s = tl.maximum(tl.max(tl.abs(v), 1), 1e-30) / 448.0
        v = v / s[:, None]
    return to_codes(v), s


@triton.jit
def _keep(
    v, s, q, scale, row, k, part, here, COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """What _rounded gave, to the rows `row` of q [*, COLUMNS] and scale where `here`; part: which B columns."""
    if GROUPED:
        g = part * (B // 128) + tl.arange(0, B // 128)
        GROUPS: tl.constexpr = COLUMNS // 128
        tl.store(scale + row[:, None] * GROUPS + g[None, :], s, mask=here[:, None] & (g < GROUPS)[None, :])
    elif not STATIC:
        tl.store(scale + row, s, mask=here)
    at = row.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    tl.store(q + at, v, mask=here[:, None] & (k < COLUMNS)[None, :])


@triton.jit
def _round(
    x, q, scale, program, n_rows, COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """R rows x B columns of x [n_rows, COLUMNS] bf16 -> the same rows of q e4m3 and of scale; see _rounded."""
    PARTS: tl.constexpr = (COLUMNS + B - 1) // B
    row = program // PARTS * R + tl.arange(0, R)
    k = program % PARTS * B + tl.arange(0, B)
    v, s = _rounded(x, scale, row, k, n_rows, COLUMNS, GROUPED, STATIC, R, B)
    _keep(v, s, q, scale, row, k, program % PARTS, row < n_rows, COLUMNS, GROUPED, STATIC, B)


@triton.jit
def _spread(
    v, s, places, q, scale, row, k, part, n_rows, TOPK: tl.constexpr, COLUMNS: tl.constexpr, GROUPED: tl.constexpr,
    STATIC: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Rows `row` as _rounded gives them to the places [n_rows, TOPK] of their routes; see _keep."""
    for j in tl.static_range(TOPK):
        at = tl.load(places + row * TOPK + j, mask=row < n_rows, other=-1)
        _keep(v, s, q, scale, at, k, part, at >= 0, COLUMNS, GROUPED, STATIC, B)


@triton.jit(do_not_specialize=["n", "chunks", "n_rows"])
def prepare(
    ids, table, counts, lists, n, chunks, x, q, scale, n_rows,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs group the routes, the others round the inputs.  EP > 0: routing.place, `chunks` programs
    behind count_routes, where x is there before the wait; else routing.group_few, with a tile of [C, BC].  FEW: the
    next kernel reads the ids before it waits for this one, so it must not begin before they are there."""
    if PDL:
        if FEW:
            gdc_wait()
        gdc_launch_dependents()
        if EP == 0:
            gdc_wait()
    if EP > 0:
        if tl.program_id(0) < chunks:
            place(ids, table, counts, lists, None, n, chunks, E, EP, C, BC, PDL)
        else:
            _round(x, q, scale, tl.program_id(0) - chunks, n_rows, COLUMNS, GROUPED, STATIC, R, B)
    elif tl.program_id(0) < E:
        group_few(ids, counts, lists, n, C, BC, False)
    else:
        _round(x, q, scale, tl.program_id(0) - E, n_rows, COLUMNS, GROUPED, STATIC, R, B)


@triton.jit(do_not_specialize=["n_rows"])
def round_rows(
    x, q, scale, n_rows, COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The intermediate of a layer whose rows have one scale each."""
    gdc_launch_dependents()
    gdc_wait()
    _round(x, q, scale, tl.program_id(0), n_rows, COLUMNS, GROUPED, STATIC, R, B)


@triton.jit(do_not_specialize=["n_rows"])
def round_to_places(
    x, places, q, scale, n_rows, TOPK: tl.constexpr, COLUMNS: tl.constexpr, GROUPED: tl.constexpr,
    STATIC: tl.constexpr, R: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each row of x [n_rows, COLUMNS], rounded, to the places [n_rows, TOPK] of its routes in q [n_rows * TOPK, ...]
    and scale; see _rounded."""
    if PDL:
        gdc_launch_dependents()
    PARTS: tl.constexpr = (COLUMNS + B - 1) // B
    part = tl.program_id(0) % PARTS
    row = tl.program_id(0) // PARTS * R + tl.arange(0, R)
    k = part * B + tl.arange(0, B)
    v, s = _rounded(x, scale, row, k, n_rows, COLUMNS, GROUPED, STATIC, R, B)
    if PDL:
        gdc_wait()  # x is older than the kernel before, the places are not
    _spread(v, s, places, q, scale, row, k, part, n_rows, TOPK, COLUMNS, GROUPED, STATIC, B)


@triton.jit(do_not_specialize=["n_rows"])
def copy_to_places(
    x, x_scale, places, q, scale, n_rows, TOPK: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As round_to_places, of rows that are rounded by groups already: x e4m3 [n_rows, COLUMNS], x_scale."""
    if PDL:
        gdc_launch_dependents()
    PARTS: tl.constexpr = (COLUMNS + B - 1) // B
    GROUPS: tl.constexpr = COLUMNS // 128
    part = tl.program_id(0) % PARTS
    row = tl.program_id(0) // PARTS * R + tl.arange(0, R)
    k = part * B + tl.arange(0, B)
    g = part * (B // 128) + tl.arange(0, B // 128)
    there = row < n_rows
    v = tl.load(x + row.to(tl.int64)[:, None] * COLUMNS + k[None, :], mask=there[:, None] & (k < COLUMNS)[None, :])
    s = tl.load(x_scale + row[:, None] * GROUPS + g[None, :], mask=there[:, None] & (g < GROUPS)[None, :])
    if PDL:
        gdc_wait()  # as there
    _spread(v, s, places, q, scale, row, k, part, n_rows, TOPK, COLUMNS, True, False, B)
