# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
# ruff: noqa: SIM108, SIM109
# (Conditions on constexpr choose code while compiling: statements, and no `in`.)
"""Packed codes -> bf16.  A container is 16 bits wide and holds P codes: 4 of four bits or 2 of eight.  Code j of
container i of K block kb belongs to column  k = (kb * P + j) * SW + i  (SW: slice width), so code j of a [BN, SW] tile
of containers is the operand of one dot with SW neighbouring columns of x, and no lane ever exchanges data.

Two implementations of one function:
* `plain_operand`: any device and the interpreter.
* `raw_codes` + `ptx_operand`: a masked code *is* a bf16 number.  An integer below 256 in the low bits of a bf16 is
  q * 2^-133 (subnormals and the first binade are linear up to bit 7); the fields of e2m1 and e4m3, shifted to the low
  end of the exponent, are value * 2^-126 and value * 2^-120.  One bf16x2 FMA scales them and subtracts the zero point
  with one rounding.  2^133 is no bf16 number, so the operand may come out divided by a power of two: `leftover`, which
  the kernel multiplies back into its float32 accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Elements, as the kernels' ELEM; BF16 stands for weights that need no unpacking, of whatever float type.
INT4 = tl.constexpr(0)
E2M1 = tl.constexpr(1)
INT8 = tl.constexpr(2)
E4M3 = tl.constexpr(3)
FLOAT = tl.constexpr(4)

# How scales are multiplied onto the operand, as the kernels' WEIGHTED: not; as bf16 numbers; as f32 numbers.
FOLD_NONE = tl.constexpr(0)
FOLD_BF16 = tl.constexpr(1)
FOLD_F32 = tl.constexpr(2)

# Stored scales, as the kernels' SKIND.
S_BF16 = tl.constexpr(0)
S_F16 = tl.constexpr(1)
S_F32 = tl.constexpr(2)
S_E8M0 = tl.constexpr(3)
S_E4M3 = tl.constexpr(4)

BF16X4 = tl.constexpr((tl.bfloat16,) * 4)
BF16X2 = tl.constexpr((tl.bfloat16,) * 2)

# Masked codes.  int4: codes 0 and 2 come out as q * 2^-133, codes 1 and 3 as 16 q * 2^-133.
ASM_INT4 = tl.constexpr("""{
.reg .b32 t;
and.b32 $0, $4, 0x000F000F;
and.b32 $1, $4, 0x00F000F0;
shr.u32 t, $4, 8;
and.b32 $2, t, 0x000F000F;
and.b32 $3, t, 0x00F000F0;
}""")
# e2m1: the sign goes to bit 15, the three bits of the magnitude to 8..6.  layout.E2M1_BITS puts them into the container
# so that one shift and one mask do it for three of four codes.  lop3 0xEA = (a & b) | c.
ASM_E2M1 = tl.constexpr("""{
.reg .b32 s, m;
and.b32 $0, $4, 0x81C081C0;
shl.b32 m, $4, 3;
and.b32 $1, m, 0x81C081C0;
shl.b32 m, $4, 6;
and.b32 $2, m, 0x81C081C0;
shl.b32 s, $4, 1;
and.b32 s, s, 0x80008000;
shr.u32 m, $4, 5;
lop3.b32 s, m, 0x01400140, s, 0xEA;
shr.u32 m, $4, 3;
lop3.b32 $3, m, 0x00800080, s, 0xEA;
}""")
ASM_INT8 = tl.constexpr("""{
.reg .b32 t;
and.b32 $0, $2, 0x00FF00FF;
shr.u32 t, $2, 8;
and.b32 $1, t, 0x00FF00FF;
}""")
# e4m3, s eeee mmm at bit 8j: the sign goes to bit 15, eeee mmm to bits 10..4.
ASM_E4M3 = tl.constexpr("""{
.reg .b32 s, m;
shl.b32 s, $2, 8;
and.b32 s, s, 0x80008000;
shl.b32 m, $2, 4;
lop3.b32 $0, m, 0x07F007F0, s, 0xEA;
and.b32 s, $2, 0x80008000;
shr.u32 m, $2, 4;
lop3.b32 $1, m, 0x07F007F0, s, 0xEA;
}""")


def _fma(mul: int, add: int | None = None) -> tl.constexpr:
    """PTX of  $0 = $1 * mul + (add, or $2),  bf16 constants given by their bits, in both halves."""
    last = "$2" if add is None else "b"
    move = "" if add is None else f".reg .b32 b; mov.b32 b, 0x{add:04X}{add:04X}; "
    return tl.constexpr(f"{{ .reg .b32 a; mov.b32 a, 0x{mul:04X}{mul:04X}; {move}fma.rn.bf16x2 $0, $1, a, {last}; }}")


def _pow2(exponent: int) -> int:
    """Bits of the bf16 number 2 ** exponent."""
    return (exponent + 127) << 7


NEGATIVE = 0x8000
# integers: (q - zero) * 2^-7; int4's zero is 8, int8's codes are stored as code + 128
ASM_INT4_LOW = _fma(_pow2(126), _pow2(3 - 7) | NEGATIVE)
ASM_INT4_HIGH = _fma(_pow2(122), _pow2(3 - 7) | NEGATIVE)
ASM_INT8_SYM = _fma(_pow2(126), _pow2(7 - 7) | NEGATIVE)
ASM_LOW_ZERO = _fma(_pow2(126))
ASM_HIGH_ZERO = _fma(_pow2(122))
ASM_E2M1_VALUE = _fma(_pow2(126), NEGATIVE)
ASM_E4M3_VALUE = _fma(_pow2(120), NEGATIVE)
ASM_FMA = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
# both halves of a bf16 pair to f32, times $2 and $3, plus $4 and $5, rounded once to a bf16 pair
ASM_FMA_F32 = tl.constexpr("""{
.reg .b32 l, h;
.reg .f32 a, b;
shl.b32 l, $1, 16;
and.b32 h, $1, 0xFFFF0000;
mov.b32 a, l;
mov.b32 b, h;
fma.rn.f32 a, a, $2, $4;
fma.rn.f32 b, b, $3, $5;
cvt.rn.bf16x2.f32 $0, b, a;
}""")
# x * y as x * y + -0: mul.bf16x2 needs sm_90
ASM_MUL = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")


@triton.jit
def to_bf16(v, SOFT: tl.constexpr):
    """f32 -> bf16, to nearest even.  SOFT: by integer arithmetic, since Triton's interpreter cuts the bits off."""
    if SOFT:
        bits = v.to(tl.int32, bitcast=True)
        v = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        v = v.to(tl.bfloat16)
    return v


@triton.jit
def dot(a, b, acc, SOFT: tl.constexpr):
    """acc + a @ b.  SOFT: in f32, since Triton's interpreter multiplies the bits of bf16 as integers."""
    if SOFT:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def raw_codes(w, ELEM: tl.constexpr):
    """[BN, C] int16 containers -> P bf16 tensors [BN, C] of masked codes."""
    if ELEM == INT4:
        raws = tl.inline_asm_elementwise(ASM_INT4, "=&r,=&r,=&r,=&r,r", [w], dtype=BF16X4, is_pure=True, pack=2)
    elif ELEM == E2M1:
        raws = tl.inline_asm_elementwise(ASM_E2M1, "=&r,=&r,=&r,=&r,r", [w], dtype=BF16X4, is_pure=True, pack=2)
    elif ELEM == INT8:
        raws = tl.inline_asm_elementwise(ASM_INT8, "=&r,=&r,r", [w], dtype=BF16X2, is_pure=True, pack=2)
    else:
        raws = tl.inline_asm_elementwise(ASM_E4M3, "=&r,=&r,r", [w], dtype=BF16X2, is_pure=True, pack=2)
    return raws


@triton.jit
def _asm1(asm: tl.constexpr, x):
    return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _asm2(asm: tl.constexpr, x, y):
    return tl.inline_asm_elementwise(asm, "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def float_factor(word, s, SUB: tl.constexpr, ELEM: tl.constexpr, SKIND: tl.constexpr):
    """[BN] bf16: scale times the power of two that raw e2m1 or e4m3 codes need, 2^13 short of it (see leftover)."""
    EXPONENT: tl.constexpr = 113 if ELEM == E2M1 else 107
    if SKIND == S_E8M0:
        bits = (((word >> (8 * SUB)) & 255) + EXPONENT) << 7
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        factor = (s * (2.0**EXPONENT)).to(tl.bfloat16)
    return factor


@triton.jit
def ptx_operand(
    raw, j: tl.constexpr, word, s, zero, SUB: tl.constexpr, ELEM: tl.constexpr, SKIND: tl.constexpr,
    WEIGHTED: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Slice j as an operand: (code - zero), times the scale if WEIGHTED (rounded once), divided by `leftover`.

    raw [BN, C] bf16 from raw_codes; s [BN] f32, field SUB of word [BN], used if WEIGHTED; zero [BN] f32 of unsigned
    codes, used if ZEROS.
    """
    HIGH: tl.constexpr = ELEM == INT4 and j % 2 == 1
    if WEIGHTED == FOLD_F32:
        if ELEM == E2M1 or ELEM == E4M3:
            mul = s * (2.0**113 if ELEM == E2M1 else 2.0**107)
            add = tl.zeros_like(s)
        else:
            mul = s * (2.0**116 if HIGH else 2.0**120)
            if ZEROS:
                add = s * zero * -(2.0**-13)
            else:
                add = s * (-(2.0**-10) if ELEM == INT4 else -(2.0**-6))
        v = tl.inline_asm_elementwise(
            ASM_FMA_F32, "=r,r,f,f,f,f", [raw, mul[:, None], add[:, None]], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif ELEM == E2M1 or ELEM == E4M3:
        if WEIGHTED:
            v = _asm2(ASM_MUL, raw, float_factor(word, s, SUB, ELEM, SKIND)[:, None])
        else:
            v = _asm1(ASM_E2M1_VALUE if ELEM == E2M1 else ASM_E4M3_VALUE, raw)
    elif ZEROS:
        shift = (zero * -(2.0**-7)).to(tl.bfloat16)[:, None]
        v = _asm2(ASM_HIGH_ZERO if HIGH else ASM_LOW_ZERO, raw, shift)
        if WEIGHTED:
            v = _asm2(ASM_MUL, v, s.to(tl.bfloat16)[:, None])
    elif WEIGHTED:
        mul = (s * (2.0**116 if HIGH else 2.0**120)).to(tl.bfloat16)
        add = (s * (-(2.0**-10) if ELEM == INT4 else -(2.0**-6))).to(tl.bfloat16)
        v = tl.inline_asm_elementwise(
            ASM_FMA, "=r,r,r,r", [raw, mul[:, None], add[:, None]], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif ELEM == INT8:
        v = _asm1(ASM_INT8_SYM, raw)
    else:
        v = _asm1(ASM_INT4_HIGH if HIGH else ASM_INT4_LOW, raw)
    return v


@triton.jit
def exact_codes(w, j: tl.constexpr, ELEM: tl.constexpr):
    """Slice j of [BN, C] int16 (or wider) containers as f32 numbers; integers unsigned (int8: code + 128)."""
    if ELEM == INT4:
        v = ((w >> (4 * j)) & 15).to(tl.float32)
    elif ELEM == INT8:
        v = ((w >> (8 * j)) & 255).to(tl.float32)
    elif ELEM == E2M1:
        # the inverse of layout.E2M1_BITS
        q = w.to(tl.int32)
        if j < 3:
            mag = (q >> (6 - 3 * j)) & 7
            sign = (q >> (15 - 3 * j)) & 1
        else:
            mag = ((q >> 11) & 5) | ((q >> 9) & 2)
            sign = (q >> 14) & 1
        normal = (((mag >> 1) + 126) << 23) | ((mag & 1) << 22)
        bits = tl.where(mag < 2, mag * 0x3F000000, normal)  # 0 and 0.5 have no implicit bit
        v = (bits | (sign << 31)).to(tl.float32, bitcast=True)
    else:
        q = w.to(tl.int32) >> (8 * j)
        e = (q >> 3) & 15
        m = q & 7
        normal = (((e + 120) << 23) | (m << 20)).to(tl.float32, bitcast=True)
        v = tl.where(e == 0, m.to(tl.float32) * (2.0**-9), normal)
        v = tl.where((q & 128) != 0, -v, v)
    return v


@triton.jit
def plain_operand(
    w, j: tl.constexpr, s, zero, ELEM: tl.constexpr, WEIGHTED: tl.constexpr, ZEROS: tl.constexpr, SOFT: tl.constexpr
):
    """As ptx_operand, from the containers, leftover 1; s and zero f32 [BN, 1] or [BN, C]."""
    v = exact_codes(w, j, ELEM)
    if ELEM == INT4 or ELEM == INT8:
        if ZEROS:
            v = v - zero
        else:
            v = v - (8.0 if ELEM == INT4 else 128.0)
    if WEIGHTED:
        v = v * s
    return to_bf16(v, SOFT)


@triton.jit
def decode_scale(word, SUB: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """int32 words -> f32: field SUB of BITS bits as a number of the stored kind."""
    if KIND == S_F32:
        s = word.to(tl.float32, bitcast=True)
    else:
        field = word >> (SUB * BITS)
        if KIND == S_BF16:
            s = (field << 16).to(tl.float32, bitcast=True)
        elif KIND == S_F16:
            s = field.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        elif KIND == S_E8M0:
            b = field & 255
            s = tl.where(b == 0, 0x00400000, b << 23).to(tl.float32, bitcast=True)
        else:
            s = exact_codes(field, 0, E4M3)
    return s


def leftover(elem: int, weighted: int, zeros: bool, ptx: bool) -> float:
    """What ptx_operand's result has to be multiplied with."""
    if not ptx or elem == FLOAT.value:
        return 1.0
    if elem in (E2M1.value, E4M3.value):
        return 2.0**13 if weighted else 1.0
    return 2.0**13 if weighted and (weighted == FOLD_F32.value or not zeros) else 2.0**7
