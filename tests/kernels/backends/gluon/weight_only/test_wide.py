"""Kernel "wide" without a GPU: its lanes' exchange of words, run step by step, and what they store."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from expertd_kernels.backends.gluon.weight_only.wide_epilogue import TRANSPOSE, WORDS32, WORDS64


def _run(ptx: str, words: list[list[int]]) -> list[list[int]]:
    """The assembly's outputs $0 .. $3 of each lane; words: its inputs $4 .. $7."""
    lanes: list[dict[str, int]] = [
        {f"${4 + i}": w for i, w in enumerate(own)} | {"%laneid": lane} for lane, own in enumerate(words)
    ]
    for line in ptx.strip("{}\n").replace("\n", "").split(";"):
        op, _, rest = line.partition(" ")
        to, *args = rest.split(", ")
        before = [dict(lane) for lane in lanes]
        for n, lane in enumerate(lanes):
            if op == "mov.u32":
                lane[to] = lane[args[0]]
            elif op == "and.b32":
                lane[to] = lane[args[0]] & int(args[1])
            elif op == "setp.ne.u32":
                lane[to] = int(lane[args[0]] != int(args[1]))
            elif op == "selp.b32":
                lane[to] = lane[args[0]] if lane[args[2]] else lane[args[1]]
            elif op == "shfl.sync.bfly.b32":
                lane[to] = before[n ^ int(args[1])][args[0]]
            else:
                assert op in (".reg", ""), line
    return [[lane[f"${k}"] for k in range(4)] for lane in lanes]


def test_four_neighbouring_lanes_transpose_their_words():
    """Lane q holds word 4 j + q as its j-th: afterwards it has words 4 q .. 4 q + 3, in each group of four lanes."""
    got = _run(TRANSPOSE.value, [[100 * (lane // 4) + 4 * j + lane % 4 for j in range(4)] for lane in range(32)])
    assert got == [[100 * (lane // 4) + 4 * (lane % 4) + k for k in range(4)] for lane in range(32)]


@pytest.mark.parametrize("layout", [WORDS32.value, WORDS64.value], ids=["32", "64"])
def test_stores_have_each_word_once_and_four_in_a_row(layout):
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    assert layout.reg_bases[:2] == [[0, 1], [0, 2]]
    rows, words = layout.shape
    found = {(sum(b[0] for b in some), sum(b[1] for b in some)) for some in _subsets(bases)}
    assert found == {(r, w) for r in range(rows) for w in range(words)}
    assert 1 << len(bases) == rows * words


def _subsets(bases):
    for bits in range(1 << len(bases)):
        yield [b for i, b in enumerate(bases) if bits >> i & 1]
