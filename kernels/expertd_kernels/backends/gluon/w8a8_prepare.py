# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code before the GEMMs: activations rounded to e4m3, in the same launch as the grouping of the routes."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.gluon.routing import group_routes


@triton.jit
def _round(
    x, q, scale, program, n_rows, COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """R rows x B columns of x [n_rows, COLUMNS] bf16 -> q e4m3, scale = absolute maximum / 448.  GROUPED: scale
    [n_rows, COLUMNS / 128]; STATIC: scale [1] is given; else [n_rows], and B >= COLUMNS."""
    PARTS: tl.constexpr = (COLUMNS + B - 1) // B
    row = program // PARTS * R + tl.arange(0, R)
    k = program % PARTS * B + tl.arange(0, B)
    at = row.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    here = (row < n_rows)[:, None] & (k < COLUMNS)[None, :]
    v = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if GROUPED:
        v = tl.reshape(v, [R, B // 128, 128])
        s = tl.maximum(tl.max(tl.abs(v), 2), 1e-30) / 448.0
        g = program % PARTS * (B // 128) + tl.arange(0, B // 128)
        GROUPS: tl.constexpr = COLUMNS // 128
        p = scale + row[:, None] * GROUPS + g[None, :]
        tl.store(p, s, mask=(row < n_rows)[:, None] & (g < GROUPS)[None, :])
        v = tl.reshape(v / s[:, :, None], [R, B])
    elif STATIC:
        v = v / tl.load(scale)
    else:
        s = tl.maximum(tl.max(tl.abs(v), 1), 1e-30) / 448.0
        tl.store(scale + row, s, mask=row < n_rows)
        v = v / s[:, None]
    v = tl.minimum(tl.maximum(v, -448.0), 448.0)
    tl.store(q + at, v.to(tl.float8e4nv), mask=here)


@triton.jit(do_not_specialize=["n", "n_rows"])
def prepare(
    ids, counts, lists, n, x, q, scale, n_rows,
    E: tl.constexpr, TH: tl.constexpr, CH: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The first E programs group the routes (routing.group_routes), the others round the inputs."""
    gdc_launch_dependents()
    gdc_wait()
    if tl.program_id(0) < E:
        group_routes(ids, counts, lists, n, TH, CH, False)
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


@triton.jit(do_not_specialize=["n"])
def list_rows(lists, x, scale, out, out_scale, n, TOPK: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr):
    """out[i], out_scale[i] = x, scale of the token of lists[i]; rows of WORDS int32, SCALES f32 (0: none).  Places
    beyond the last route hold anything."""
    gdc_launch_dependents()
    gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.maximum(tl.load(lists + i), 0), n - 1).to(tl.int64) // TOPK
    k = tl.arange(0, triton.next_power_of_2(WORDS))
    tl.store(out + i * WORDS + k, tl.load(x + token * WORDS + k, mask=k < WORDS), mask=k < WORDS)
    if SCALES > 0:
        g = tl.arange(0, triton.next_power_of_2(SCALES))
        tl.store(out_scale + i * SCALES + g, tl.load(scale + token * SCALES + g, mask=g < SCALES), mask=g < SCALES)
