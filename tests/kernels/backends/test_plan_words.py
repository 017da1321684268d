"""Plans as words: what is printed, what is left out, and that the text of a plan makes the plan again."""

from dataclasses import dataclass

import pytest

from expertd_kernels.backends.gluon.w8a8.plan import Few8, Plan8
from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan
from expertd_kernels.backends.plan_words import in_words, shown, values_of
from expertd_kernels.backends.portable.tiling import Tile, TilingPlan


@dataclass(frozen=True)
class Cut:
    kernel: str
    rows: int
    warps: int = shown(4)
    mma_columns: int = 64
    late: bool = False


def test_a_plan_names_its_kernel_what_has_no_default_and_what_differs():
    assert in_words(Cut("block", 64)) == "block: rows 64, warps 4"
    assert in_words(Cut("ws", 8, 8, 128, True)) == "ws: rows 8, warps 8, mma columns 128, late"


def test_plans_of_every_kernel_are_words():
    tile = TilePlan("block", 64, tiles=2, stages=2, narrower=1, registers=168, stretch=16)
    text = "block: rows 64, tiles 2, warps 4, columns 128, stages 2, narrower 1, registers 168, stretch 16"
    assert str(tile) == text
    assert str(LayerPlan(96, "lists", tile, tile)) == f"lists: tokens 96, w13 ({text}), w2 ({text})"
    assert str(Plan8(listed=True)) == "stages 4, together 16, listed"
    few = Plan8(few=(Few8(8, 8), Few8(8, 8, parts=2)))
    rings = "few (rows 8, many 8, stages 3) (rows 8, many 8, stages 3, parts 2)"
    assert str(few) == f"stages 4, together 16, {rings}"
    gemm = "weight rows 64, containers 32, warps 4, stages 3"
    plan = TilingPlan(8, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3, 4, True), direct=True)
    assert str(plan) == f"rows 8, w13 ({gemm}), w2 ({gemm}, together 4, weighted), direct"


def test_words_make_the_plan_again():
    for cut in (Cut("block", 64), Cut("ws", 8, 8, 128, True)):
        assert Cut(**values_of(Cut, in_words(cut))) == cut
    assert Cut(**values_of(Cut, "gemv: rows 1")) == Cut("gemv", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block: rows 8, queues 9", r"plan 'block: rows 8, queues 9': 'queues 9' is unknown .*words: rows, warps"),
        ("block: rows 8, rows 9", "'rows 9' is unknown or there twice"),
        ("block: rows 8, warps", "'warps' is unknown"),
        ("block: rows 8, late 1", "'late 1' is unknown"),
        ("block: rows -8", "'rows -8' is unknown"),
        ("block: rows 8, 9", "'9' is unknown"),
        ("block: warps 4", "want rows"),
        ("", "want rows"),
    ],
)
def test_words_that_make_no_plan_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        values_of(Cut, text)
