# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code before the GEMMs: activations rounded to e4m3, in the same launch as the grouping of the routes."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.gluon.routing import group_routes
from expertd_kernels.backends.triton_kernels.route import ranks


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
        s = tl.maximum(tl.max(tl.abs(v), 2), 1e-30) / 448.0
        v = tl.reshape(v / s[:, :, None], [R, B])
    elif STATIC:
        s = tl.load(scale)
        v = v / s
    else:
        s = tl.maximum(tl.max(tl.abs(v), 1), 1e-30) / 448.0
        v = v / s[:, None]
    return tl.minimum(tl.maximum(v, -448.0), 448.0).to(tl.float8e4nv), s


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


@triton.jit(do_not_specialize=["n", "n_rows"])
def prepare(
    ids, counts, lists, n, x, q, scale, n_rows,
    E: tl.constexpr, TH: tl.constexpr, CH: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    FEW: tl.constexpr = False,
):  # fmt: skip
    """The first E programs group the routes (routing.group_routes), the others round the inputs.  FEW: the next kernel
    reads the ids before it waits for this one, so it must not begin before they are there."""
    if FEW:
        gdc_wait()
        gdc_launch_dependents()
    else:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) < E:
        group_routes(ids, counts, lists, n, TH, CH, False)
    else:
        _round(x, q, scale, tl.program_id(0) - E, n_rows, COLUMNS, GROUPED, STATIC, R, B)


@triton.jit(do_not_specialize=["n"])
def count_routes(ids, table, n, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr):
    """table [programs, EP] int32: the routes of each expert in each C ids; `place_routes` follows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    r = chunk * C + tl.arange(0, C)
    v = tl.load(ids + r, mask=r < n, other=-1)
    here = (v >= 0) & (v < E)
    tl.store(table + chunk * EP + tl.arange(0, EP), tl.histogram(tl.where(here, v, 0), EP, mask=here))


@triton.jit(do_not_specialize=["n", "n_chunks"])
def place_routes(
    ids, table, counts, lists, places, n, n_chunks, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """lists, counts as group_routes leaves them, from the table of count_routes; a program a chunk of C ids, S of them
    at a time; BC: chunks of the table that are added up at a time.  places [n] int32: the inverse of lists, -1 where a
    route goes nowhere."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    experts = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    for c0 in range(0, n_chunks, BC):
        c = c0 + tl.arange(0, BC)
        h = tl.load(table + c[:, None] * EP + experts[None, :], mask=(c < n_chunks)[:, None], other=0)
        total += tl.sum(h, 0)
        before += tl.sum(tl.where((c < chunk)[:, None], h, 0), 0)
    if chunk == 0:
        tl.store(counts + experts, total, mask=experts < E)
    base = tl.cumsum(total, 0) - total + before
    for s in range(0, C, S):
        r = chunk * C + s + tl.arange(0, S)
        v = tl.load(ids + r, mask=r < n, other=-1)
        here = (v >= 0) & (v < E)
        at = tl.sum(tl.where(v[:, None] == experts[None, :], base[None, :], 0), 1) + ranks(ids, v, r, n)
        tl.store(lists + at, r, mask=here)
        tl.store(places + r, tl.where(here, at, -1), mask=r < n)
        base += tl.histogram(tl.where(here, v, 0), EP, mask=here)


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
        gdc_wait()
    PARTS: tl.constexpr = (COLUMNS + B - 1) // B
    part = tl.program_id(0) % PARTS
    row = tl.program_id(0) // PARTS * R + tl.arange(0, R)
    k = part * B + tl.arange(0, B)
    v, s = _rounded(x, scale, row, k, n_rows, COLUMNS, GROUPED, STATIC, R, B)
    for j in tl.static_range(TOPK):
        at = tl.load(places + row * TOPK + j, mask=row < n_rows, other=-1)
        _keep(v, s, q, scale, at, k, part, at >= 0, COLUMNS, GROUPED, STATIC, B)
