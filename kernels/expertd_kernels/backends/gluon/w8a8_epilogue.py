# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""What follows a tile's products in the w8a8 kernels: bias, router weight, activation, rounding, stores.

`C` is a Tile8; `activate` serves a TileFew, too."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertd_kernels.backends.gluon.pieces import _act

LARGEST = gl.constexpr(448.0)
LEAST = gl.constexpr(1e-30)
SIGMOID = gl.constexpr(
    "{\n.reg .f32 t;\nmul.f32 t, $1, 0fBFB8AA3B;\nex2.approx.ftz.f32 t, t;\nadd.f32 t, t, 0f3F800000;\n"
    "rcp.approx.ftz.f32 $0, t;\n}"
)
"""1 / (1 + 2 ** (-log2(e) * v)) in four instructions, to about a unit in the last place of f32; 0 and 1 at the ends."""


@gluon.jit
def sigmoid(v):
    return gl.inline_asm_elementwise(SIGMOID, "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(g, u, C: gl.constexpr):
    """act(gate) * up: pieces._act without divisions, of which an epilogue would have thousands."""
    A: gl.constexpr = C.gemm.act
    if A == "gelu_and_mul":
        y = _act(g, u, C)
    else:
        if C.gemm.limited:
            g = gl.minimum(g, C.gemm.limit)
            u = gl.maximum(gl.minimum(u, C.gemm.limit), -C.gemm.limit)
        if A == "silu_and_mul":
            y = g * sigmoid(g) * u
        elif A == "swigluoai":
            y = (u + C.gemm.beta) * g * sigmoid(C.gemm.alpha * g)
        else:
            gl.static_assert(A == "gelu_tanh_and_mul")
            y = g * sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
    return y


@gluon.jit
def row_of(p, C: gl.constexpr):
    """128 numbers [1, 128], one for each column of an accumulator"""
    return gl.expand_dims(gl.load(p + gl.arange(0, 128, gl.SliceLayout(0, C.MMA))), 0)


@gluon.jit
def _store(v, out, row, ok, column, C: gl.constexpr):
    """v [64, 128] in the accumulator's layout -> out[row, column ..], where ok"""
    L: gl.constexpr = C.LH if v.dtype == gl.float8e4nv else C.LY
    v = gl.convert_layout(v, L)
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L)), 1)
    ok = gl.expand_dims(gl.convert_layout(ok, gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(column + gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    gl.store(out + row.to(gl.int64) * C.gemm.segment + c, v, mask=ok)


@gluon.jit
def _store_h(acc0, acc1, bias, w, out, out_scale, base, ok, col, C: gl.constexpr):
    """activation; rounded to e4m3 unless a scale needs the whole row; rows in the order of the list"""
    if C.gemm.weight:
        acc0 = acc0 * gl.expand_dims(w, 1)
        acc1 = acc1 * gl.expand_dims(w, 1)
    if C.gemm.bias:
        acc0 += row_of(bias + col * 128, C)
        acc1 += row_of(bias + (C.gemm.segment + col * 128), C)
    h = activate(acc0, acc1, C)
    row = base + gl.arange(0, 64, gl.SliceLayout(1, C.MMA))
    if C.gemm.grouped:
        s = gl.maximum(gl.max(gl.abs(h), 1), LEAST) / LARGEST
        gl.store(out_scale + row * (C.gemm.segment // 128) + col, s, mask=ok)
        h = gl.minimum(gl.maximum(h * gl.expand_dims(1.0 / s, 1), -LARGEST), LARGEST)
        _store(h.to(gl.float8e4nv), out, row, ok, col * 128, C)
    elif C.gemm.static:
        h = gl.minimum(gl.maximum(h / gl.load(out_scale), -LARGEST), LARGEST)
        _store(h.to(gl.float8e4nv), out, row, ok, col * 128, C)
    else:
        _store(h.to(gl.bfloat16), out, row, ok, col * 128, C)


@gluon.jit
def _store_y(acc, bias, w, out, route, ok, column, C: gl.constexpr):
    """128 columns of out[route] from `column` on"""
    if C.gemm.bias:
        acc += row_of(bias + column, C)
    if C.gemm.weight:
        acc = acc * gl.expand_dims(w, 1)
    _store(acc.to(gl.bfloat16), out, route, ok, column, C)


@gluon.jit
def epilogue(acc0, acc1, bias, out, out_scale, e, base, n, col, route, w, PART: gl.constexpr, C: gl.constexpr):
    ok = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    b = bias + e * C.rows
    if C.gemm.first:
        _store_h(acc0, acc1, b, w, out, out_scale, base + 64 * PART, ok, col, C)
    else:
        _store_y(acc0, b, w, out, route, ok, col * 256, C)
        if C.half_tiles:
            if 2 * col + 1 < C.rows // 128:
                _store_y(acc1, b, w, out, route, ok, col * 256 + 128, C)
        else:
            _store_y(acc1, b, w, out, route, ok, col * 256 + 128, C)
