# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""What follows a tile's products in kernel `wide`: bias, router weight, activation, stores.  `C` is a Tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertd_kernels.backends.gluon.w8a8.epilogue import activate

PACK = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
"""PTX: two f32 rounded to bf16, the first one in the low half of the word."""


def _exchange(distance: int, first: str, second: str, low: str, high: str, gives_first: str) -> str:
    """PTX: each lane gives one of two words to the lane `distance` away: `first` where the predicate holds, else
    `second`; low and high are what it then has of the lower and of the upper lane."""
    return (
        f"selp.b32 s, {first}, {second}, {gives_first};\nshfl.sync.bfly.b32 t, s, {distance}, 0x1f, 0xffffffff;\n"
        f"selp.b32 {low}, t, {first}, {gives_first};\nselp.b32 {high}, {second}, t, {gives_first};\n"
    )


TRANSPOSE = gl.constexpr(
    "{\n.reg .pred p, q;\n.reg .b32 a, b, c, d, s, t;\nmov.u32 t, %laneid;\nand.b32 s, t, 1;\n"
    "setp.ne.u32 p, s, 0;\nand.b32 s, t, 2;\nsetp.ne.u32 q, s, 0;\n"
    + _exchange(1, "$4", "$5", "a", "b", "p")
    + _exchange(1, "$6", "$7", "c", "d", "p")
    + _exchange(2, "a", "c", "$0", "$2", "q")
    + _exchange(2, "b", "d", "$1", "$3", "q")
    + "}"
)
"""PTX: the four words of each of four neighbouring lanes, transposed."""


def _words(n: int) -> gl.DistributedLinearLayout:
    """[64, n] words of two columns, rows as an accumulator has them, four words in a row for each lane."""
    more = [[0, 16 << i] for i in range((n // 16).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *more, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, n])


WORDS64, WORDS32 = gl.constexpr(_words(64)), gl.constexpr(_words(32))


@gluon.jit
def _store(v, out, row, ok, column, C: gl.constexpr):
    """v [64, N] f32 -> out[row, column ..] bf16, where ok.  Of 8 columns in a row each of four neighbouring lanes holds
    two; they exchange them among groups of 32 columns, so that a lane stores 8 in a row.  (A change of layout would
    take shared memory, which the ring of stages fills.)"""
    N: gl.constexpr = v.shape[1]
    L: gl.constexpr = WORDS64 if N == 128 else WORDS32
    low, high = gl.split(v.reshape([64, N // 2, 2]))
    p = gl.inline_asm_elementwise(PACK, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    even, odd = gl.split(p.reshape([64, N // 32, 2, 2, 4]).permute((0, 1, 4, 2, 3)))
    p0, p2 = gl.split(even)
    p1, p3 = gl.split(odd)
    q0, q1, q2, q3 = gl.inline_asm_elementwise(
        TRANSPOSE, "=&r,=&r,=&r,=&r,r,r,r,r", [p0, p1, p2, p3], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    p = gl.convert_layout(gl.join(gl.join(q0, q2), gl.join(q1, q3)).reshape([64, N // 2]), L)
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L)), 1)
    ok = gl.expand_dims(gl.convert_layout(ok, gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(column // 2 + gl.arange(0, N // 2, gl.SliceLayout(0, L)), 0)
    if C.out_masked:
        ok = ok & (c < C.gemm.out_columns // 2)
    words = out.to(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(words + row.to(gl.int64) * (C.gemm.out_columns // 2) + c, p, mask=ok)


@gluon.jit
def epilogue(acc, bias, w, out, e, row, ok, run, C: gl.constexpr):
    """acc [64, 128], the expert's weight rows 128 * run .. -> 64 columns of h or 128 of the result, for the tokens that
    are `ok`; w: their router weights, row: where they go in out"""
    if C.gemm.first and C.gemm.weight:
        acc = acc * gl.expand_dims(w, 1)
    if C.gemm.bias:
        c = run * 128 + gl.arange(0, 128, gl.SliceLayout(0, acc.type.layout))
        b = gl.load(bias + e * (C.gemm.rows * 64) + c, mask=c < C.gemm.rows * 64, other=0.0)
        acc = acc + gl.expand_dims(b, 0)
    if not C.gemm.first and C.gemm.weight:
        acc = acc * gl.expand_dims(w, 1)
    if C.gemm.first and C.gemm.gated:
        g, u = gl.split(acc.reshape([64, 8, 2, 8]).permute((0, 1, 3, 2)))
        acc = activate(g, u, C).reshape([64, 64])
    elif C.gemm.first:  # relu2
        acc = gl.maximum(acc, 0.0)
        acc = acc * acc
    _store(acc, out, row, ok, run * acc.shape[1], C)
