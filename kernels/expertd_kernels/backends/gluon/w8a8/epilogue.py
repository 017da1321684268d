# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""What follows a tile's products in the w8a8 kernels: bias, router weight, activation, rounding, stores.

`C` is a Tile8; `activate` serves a TileFew, too."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertd_kernels.backends.gluon.weight_only.pieces import _act, sigmoid

LARGEST = gl.constexpr(448.0)
LEAST = gl.constexpr(1e-30)
GATE = gl.constexpr("{\n.reg .f32 t;\ntanh.approx.f32 t, $2;\nfma.rn.f32 $0, $1, t, $1;\n}")
"""$1 * (1 + tanh $2): one special function where sigmoid needs two.  It is right to about 2 ** -11 of 2 * $1, which is
enough for results that are rounded to three bits of the largest of their group."""


@gluon.jit
def _gate(g, v, ROUGH: gl.constexpr):
    """g / (1 + exp(-v))"""
    if ROUGH:
        y = gl.inline_asm_elementwise(GATE, "=f,f,f", [0.5 * g, 0.5 * v], dtype=gl.float32, is_pure=True, pack=1)
    else:
        y = g * sigmoid(v)
    return y


@gluon.jit
def activate(g, u, C: gl.constexpr, ROUGH: gl.constexpr = False):
    """act(gate) * up: pieces._act without divisions, of which an epilogue would have thousands.  ROUGH: gates by
    tanh.approx, where the result is rounded to e4m3 here"""
    A: gl.constexpr = C.gemm.act
    if A == "gelu_and_mul":
        y = _act(g, u, C)
    else:
        if C.gemm.limited:
            g = gl.minimum(g, C.gemm.limit)
            u = gl.maximum(gl.minimum(u, C.gemm.limit), -C.gemm.limit)
        if A == "silu_and_mul":
            y = _gate(g, g, ROUGH) * u
        elif A == "swigluoai":
            y = _gate(g, C.gemm.alpha * g, ROUGH) * (u + C.gemm.beta)
        else:
            gl.static_assert(A == "gelu_tanh_and_mul")
            y = _gate(g, 1.5957691216057308 * (g + 0.044715 * g * g * g), ROUGH) * u
    return y


@gluon.jit
def row_of(p, acc):
    """numbers [1, N], one for each column of acc [64, N]"""
    return gl.expand_dims(gl.load(p + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))), 0)


@gluon.jit
def _store(v, out, row, ok, column, C: gl.constexpr):
    """v [64, N] in the accumulator's layout -> out[row, column ..], where ok"""
    N: gl.constexpr = v.shape[1]
    L: gl.constexpr = C.LY if v.dtype != gl.float8e4nv else C.LH if N == 128 else C.LH64
    v = gl.convert_layout(v, L)
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L)), 1)
    ok = gl.expand_dims(gl.convert_layout(ok, gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(column + gl.arange(0, N, gl.SliceLayout(0, L)), 0)
    gl.store(out + row.to(gl.int64) * C.gemm.segment + c, v, mask=ok)


@gluon.jit
def _h(acc0, acc1, bias, w, column, C: gl.constexpr):
    """the intermediate from this column on, before it is rounded"""
    if C.gemm.weight:
        w = gl.expand_dims(gl.convert_layout(w, gl.SliceLayout(1, acc0.type.layout)), 1)
        acc0 = acc0 * w
        acc1 = acc1 * w
    if C.gemm.bias:
        acc0 += row_of(bias + column, acc0)
        acc1 += row_of(bias + (C.gemm.segment + column), acc1)
    return activate(acc0, acc1, C, C.gemm.grouped or C.gemm.static)


@gluon.jit
def _store_rounded(h, s, out, row, ok, column, C: gl.constexpr):
    """h / s is at most 448 and what rounding adds, which the conversion takes back"""
    _store((h * gl.expand_dims(1.0 / s, 1)).to(gl.float8e4nv), out, row, ok, column, C)


@gluon.jit
def _store_h(acc0, acc1, bias, w, out, out_scale, base, ok, col, C: gl.constexpr):
    """activation; rounded to e4m3 unless a scale needs the whole row; rows in the order of the list"""
    h = _h(acc0, acc1, bias, w, col * 128, C)
    row = base + gl.arange(0, 64, gl.SliceLayout(1, C.MMA))
    if C.gemm.grouped:
        s = gl.maximum(gl.max(gl.abs(h), 1), LEAST) / LARGEST
        gl.store(out_scale + row * (C.gemm.segment // 128) + col, s, mask=ok)
        _store_rounded(h, s, out, row, ok, col * 128, C)
    elif C.gemm.static:
        h = gl.minimum(gl.maximum(h / gl.load(out_scale), -LARGEST), LARGEST)
        _store(h.to(gl.float8e4nv), out, row, ok, col * 128, C)
    else:
        _store(h.to(gl.bfloat16), out, row, ok, col * 128, C)


@gluon.jit
def _store_y(acc, bias, out, route, ok, column, C: gl.constexpr):
    """128 columns of out[route] from `column` on"""
    if C.gemm.bias:
        acc += row_of(bias + column, acc)
    _store(acc.to(gl.bfloat16), out, route, ok, column, C)


@gluon.jit
def store_half_h(
    acc0, acc1, bias, w, out, out_scale, e, base, n, col, largest, met, turn, PART: gl.constexpr, C: gl.constexpr
):
    """As _store_h for a block of up to 64 tokens: this part has 64 of the 128 columns.  A row's scale is that of both
    parts: each leaves its largest numbers in largest [4, 64] f32 (by turns in one row of two, so that the other part
    has read what was there before) and says so at its barrier."""
    L: gl.constexpr = gl.SliceLayout(1, C.MMA64)
    r = gl.arange(0, 64, L)
    column = col * 128 + 64 * PART
    h = _h(acc0, acc1, bias + e * C.rows, w, column, C)
    most = gl.max(gl.abs(h), 1)
    largest.index(2 * turn + PART).store(most)
    mbarrier.arrive(met.index(PART), count=1)
    mbarrier.wait(met.index(1 - PART), turn)
    s = gl.maximum(gl.maximum(most, largest.index(2 * turn + 1 - PART).load(L)), LEAST) / LARGEST
    if PART == 0:
        gl.store(out_scale + (base + r) * (C.gemm.segment // 128) + col, s, mask=r < n)
    _store_rounded(h, s, out, base + r, r < n, column, C)


@gluon.jit
def store_half_y(acc, bias, out, e, n, col, route, PART: gl.constexpr, C: gl.constexpr):
    """128 of the 256 columns of a block of up to 64 tokens"""
    ok = gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    if 2 * col + PART < C.rows // 128:
        _store_y(acc, bias + e * C.rows, out, route, ok, col * 256 + 128 * PART, C)


@gluon.jit
def epilogue(acc0, acc1, bias, out, out_scale, e, base, n, col, route, w, PART: gl.constexpr, C: gl.constexpr):
    ok = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    b = bias + e * C.rows
    if C.gemm.first:
        _store_h(acc0, acc1, b, w, out, out_scale, base + 64 * PART, ok, col, C)
    else:
        _store_y(acc0, b, out, route, ok, col * 256, C)
        if C.half_tiles:
            if 2 * col + 1 < C.rows // 128:
                _store_y(acc1, b, out, route, ok, col * 256 + 128, C)
        else:
            _store_y(acc1, b, out, route, ok, col * 256 + 128, C)
