"""The numbers behind the rules of planning.py: where one kernel or tile begins to be ahead of another.  Pure: imports
no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from expertd_kernels.backends.gluon.shared.measured import numbers

__all__ = ["Rules", "rules_of"]


@dataclass(frozen=True)
class Rules:
    """For a GPU of so many multiprocessors.  What is measured, and on which GPU: plans/rules.json, where counts are
    those of that GPU; the measurements: docs/log.

    thin          CTAs under which a GEMM does not fill the GPU, four an SM
    pairs         CTAs of two row tiles from which on they beat twice as many of one: gained with 619 and more
    many          64-row tiles of w2 from which on they follow w13's: gained with 910 and more, lost with 512 and fewer
    rings         64-row tiles of one token's GEMM beyond which long rings do not pay
    gemv_tiles    64-row tiles of w2 up to which kernel gemv gains with more than gemv_bytes, too, because block's CTAs
                  do not fill the GPU: gained with 320 and fewer, lost with 512
    few_routes    routes for each row tile of w13's CTAs, up to which each CTA of the GEMMs finds its block itself, if
                  few share an expert; beyond, the routing kernel is cheaper
    short         columns of w2 up to which its tiles follow: gained with 768 and 2048, lost with 14,336
    gemv_tokens   tokens up to which each route may be computed by itself: with more, routes share experts
    gemv_columns  inputs of a CTA of kernel gemv, which lie in shared memory
    gemv_bytes    of the routes' weights up to which kernel gemv gains: it did with 76 and 100 MB, block did with 165
                  and 199
    wider_from, wider_to
                  tokens an expert between which blocks of 192 rows are ahead in kernel wide: at 128 half of the experts
                  would need another block of 128 (2 to 20 %); at 2048 they were 3 % behind
    """

    multiprocessors: int
    thin: float
    pairs: float
    many: float
    rings: float
    gemv_tiles: float
    few_routes: int
    short: int
    gemv_tokens: int
    gemv_columns: int
    gemv_bytes: int
    wider_from: int
    wider_to: int


@cache
def rules_of(multiprocessors: int | None = None) -> Rules:
    """None: those of the GPU that they were measured on."""
    return Rules(**numbers(Path(__file__).parent / "plans" / "rules.json", multiprocessors))
