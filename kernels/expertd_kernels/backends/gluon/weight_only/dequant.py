# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code: packed codes and scales -> the bf16 A operand of wgmma, in registers.

A bf16 is linear in its low eight bits, subnormals included: bits q (0..255) are the number q * 2**-133.  So a mask
turns packed codes into pairs of bf16, and one fused multiply-add applies offset and scale with a single rounding:

    int    (q - 8) * s   = q * s' + c        s' = s * 2**133, c = -8 * s  (int8: q = code + 128, c = -128 * s)
    zero   (q - z) * s   = (q * 2**127 + z') * s'      the inner sum is exact
    float  bits as they stand, exponent field and sign in place: e2m1 * 2**-126, e4m3 * 2**-120; then * s'
    float2 the same, s' as the sum of two bf16: bits * s1 + (bits * s2)

all times 2**-shift, which the epilogue undoes.  int4 rows of i0 = 1 are read as 16 * q: their s' is 16 times smaller.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_INT4 = "{\n.reg .b32 t;\n"
for _w in (0, 1):
    _INT4 += (
        f"and.b32 ${4 * _w}, ${8 + _w}, 0x000F000F;\nand.b32 ${4 * _w + 1}, ${8 + _w}, 0x00F000F0;\n"
        f"shr.u32 t, ${8 + _w}, 8;\n"
        f"and.b32 ${4 * _w + 2}, t, 0x000F000F;\nand.b32 ${4 * _w + 3}, t, 0x00F000F0;\n"
    )
_E2M1 = "{\n.reg .b32 t;\n"
for _w in (0, 1):
    _x, _o = f"${8 + _w}", 4 * _w
    _E2M1 += (
        f"and.b32 ${_o}, {_x}, 0x81C081C0;\n"
        f"shf.r.wrap.b32 t, {_x}, {_x}, 6;\nand.b32 ${_o + 1}, t, 0x81C081C0;\n"
        f"shf.r.wrap.b32 t, {_x}, {_x}, 3;\nand.b32 ${_o + 2}, t, 0x81C081C0;\n"
        f"and.b32 t, {_x}, 0x001B001B;\nmul.lo.u32 t, t, 4228;\nand.b32 ${_o + 3}, t, 0x81C081C0;\n"
    )
_INT8 = "{\n.reg .b32 t;\n"
for _w in (0, 1):
    _INT8 += (
        f"and.b32 ${2 * _w}, ${4 + _w}, 0x00FF00FF;\nshr.u32 t, ${4 + _w}, 8;\nand.b32 ${2 * _w + 1}, t, 0x00FF00FF;\n"
    )
_E4M3 = "{\n.reg .b32 t, u;\n"
for _w in (0, 1):
    _x, _o = f"${4 + _w}", 2 * _w
    _E4M3 += (
        f"and.b32 ${_o}, {_x}, 0x87F087F0;\nshl.b32 t, {_x}, 4;\nand.b32 t, t, 0x80F080F0;\n"
        f"shr.u32 u, {_x}, 4;\nand.b32 u, u, 0x07000700;\nor.b32 ${_o + 1}, t, u;\n"
    )
_OUT8, _OUT4 = ",".join(["=&r"] * 8 + ["r"] * 2), ",".join(["=&r"] * 4 + ["r"] * 2)

INT4 = gl.constexpr(_INT4 + "}")
E2M1 = gl.constexpr(_E2M1 + "}")
INT8 = gl.constexpr(_INT8 + "}")
E4M3 = gl.constexpr(_E4M3 + "}")
OUT8, OUT4 = gl.constexpr(_OUT8), gl.constexpr(_OUT4)
BF4 = gl.constexpr((gl.bfloat16,) * 4)
BF8 = gl.constexpr((gl.bfloat16,) * 8)

E8M0 = gl.constexpr(
    "{\n.reg .b32 t, z;\nmov.b32 z, 0;\nprmt.b32 t, $2, z, 0x1404;\nshr.u32 $0, t, 1;\n"
    "prmt.b32 t, $2, z, 0x3424;\nshr.u32 $1, t, 1;\n}"
)
"""Four exponent bytes -> four bf16 powers of two."""
OFFSET4 = gl.constexpr("{\n.reg .b32 k;\nmov.b32 k, 0x80808008;\nmul.rn.bf16x2 $0, $1, k;\n}")
"""s' -> -8 * s' * 2**-133 for the row i0 = 0, -8 * s' * 2**-129 for i0 = 1 (16 * q)."""
OFFSET8 = gl.constexpr("{\n.reg .b32 k;\nmov.b32 k, 0x80808080;\nmul.rn.bf16x2 $0, $1, k;\n}")
"""s' -> -128 * s' * 2**-133."""
FMA = gl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
MUL = gl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
SUB_MUL = gl.constexpr(
    "{\n.reg .b32 k, t;\nmov.b32 k, 0x7F007F00;\nfma.rn.bf16x2 t, $1, k, $3;\nmul.rn.bf16x2 $0, t, $2;\n}"
)
"""(q * 2**127 + z') * s'."""
MUL2 = gl.constexpr("{\n.reg .b32 t;\nmul.rn.bf16x2 t, $1, $3;\nfma.rn.bf16x2 $0, $1, $2, t;\n}")
"""bits * s1 + bits * s2: the small product's rounding is 2**-8 of the sum's."""


@gluon.jit
def _bits(q, C: gl.constexpr, U: gl.constexpr, AL: gl.constexpr):
    """packed words [TT, 128 * slices * U] -> codes as bf16 [TT * 16 * slices, K] in the operand's layout; costs nothing
    but the masks"""
    if C.codec.bits == 4:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            INT4 if C.codec.integer else E2M1, OUT8, [q], dtype=BF8, is_pure=True, pack=2
        )
        p = gl.join(gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7)))
        p = p.reshape([C.TT, U, C.slices, 8, 4, 2, 2, 2, 2, 2]).permute((0, 2, 7, 3, 1, 5, 9, 8, 4, 6))
    else:
        o0, o1, o2, o3 = gl.inline_asm_elementwise(
            INT8 if C.codec.integer else E4M3, OUT4, [q], dtype=BF4, is_pure=True, pack=2
        )
        p = gl.join(gl.join(o0, o1), gl.join(o2, o3))
        p = p.reshape([C.TT, U, C.slices, 8, 4, 2, 2, 2, 2]).permute((0, 2, 7, 3, 1, 5, 8, 4, 6))
    return gl.convert_layout(p.reshape([C.TT * 16 * C.slices, U * (256 // C.codec.bits)]), AL)


@gluon.jit
def _spread(s, C: gl.constexpr, L: gl.constexpr):
    """one plane of scales [TT, ..] -> [TT * 64, groups] with the layout L of the operand without its columns"""
    GC: gl.constexpr = C.codec.chunk // C.codec.group
    GS: gl.constexpr = C.codec.load_groups(C.SK)
    s = s.reshape([C.TT, GS // GC, C.slices, 8, GC, 2]).permute((0, 2, 5, 3, 1, 4))
    if GS == 1:
        out = gl.expand_dims(gl.convert_layout(s.reshape([C.TT * 16 * C.slices]), L), 1)
    else:
        out = gl.expand_dims(gl.convert_layout(s.reshape([C.TT * 16 * C.slices, GS]), L), 2)
    return out


@gluon.jit
def _scaled(a, s, C: gl.constexpr, L: gl.constexpr):
    """codes [TT * 64, K] or [TT * 64, groups, K / groups] times their scales; s as loaded"""
    if C.codec.planes == 2:
        PAIR: gl.constexpr = SUB_MUL if C.codec.kind == "zero" else MUL2
        LOAD: gl.constexpr = C.codec.load_scales(C.SK) // 4 * C.slices
        CHUNK: gl.constexpr = C.codec.chunk_scales // 4 * C.slices
        s, z = gl.split(s.reshape([C.TT, LOAD // CHUNK, 2, CHUNK // 2]).permute((0, 1, 3, 2)))
        s = _spread(s.reshape([C.TT, LOAD // 2]), C, L)
        z = _spread(z.reshape([C.TT, LOAD // 2]), C, L)
        w = gl.inline_asm_elementwise(PAIR, "=&r,r,r,r", [a, s, z], dtype=gl.bfloat16, is_pure=True, pack=2)
    elif C.codec.kind == "int":
        OFFSET: gl.constexpr = OFFSET4 if C.codec.bits == 4 else OFFSET8
        c = gl.inline_asm_elementwise(OFFSET, "=r,r", [s], dtype=gl.bfloat16, is_pure=True, pack=2)
        w = gl.inline_asm_elementwise(
            FMA, "=r,r,r,r", [a, _spread(s, C, L), _spread(c, C, L)], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        w = gl.inline_asm_elementwise(MUL, "=r,r,r", [a, _spread(s, C, L)], dtype=gl.bfloat16, is_pure=True, pack=2)
    return w


@gluon.jit
def load(wb, sb, j: gl.constexpr, C: gl.constexpr):
    """columns 64 * SK * j .. of a stage: (words, scales) in registers, as they are stored"""
    U: gl.constexpr = C.SK * C.codec.units
    q = wb.slice(j * 16 * U, 16 * U, 1).load(C.LQ)
    AT: gl.constexpr = j * C.SK * 64 // C.codec.chunk * C.codec.chunk_scales
    LOAD: gl.constexpr = C.codec.load_scales(C.SK)
    return q, sb.slice(AT, LOAD, 1).load(C.LS)


@gluon.jit
def unpack(q, s, C: gl.constexpr, AL: gl.constexpr):
    """what `load` gave -> bf16 A operand [TT * 64, 64 * SK] in registers"""
    if C.codec.e8m0:
        s = gl.inline_asm_elementwise(E8M0, "=&r,=&r,r", [s], dtype=gl.bfloat16, is_pure=True, pack=4)
    return weights(q, s, C, AL)


@gluon.jit
def weights(q, s, C: gl.constexpr, AL: gl.constexpr):
    """words and bf16 scales -> bf16 A operand [TT * 16 * slices, 64 * SK] in registers"""
    U: gl.constexpr = C.SK * C.codec.units
    w = _bits(q.reshape([C.TT, 128 * C.slices * U]), C, U, AL)
    GS: gl.constexpr = C.codec.load_groups(C.SK)
    if GS == 1:
        w = _scaled(w, s, C, gl.SliceLayout(1, AL))
    else:
        w = w.reshape([C.TT * 16 * C.slices, GS, C.SK * 64 // GS])
        w = _scaled(w, s, C, gl.SliceLayout(2, w.type.layout))
        w = gl.convert_layout(w.reshape([C.TT * 16 * C.slices, C.SK * 64]), AL)
    return w
