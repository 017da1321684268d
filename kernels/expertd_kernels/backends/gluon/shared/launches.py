"""What the layers on the GPU launch before and after their GEMMs: routes grouped by expert, results added up."""

from __future__ import annotations

import triton
from torch import Tensor

from expertd_kernels.backends.gluon.shared.grouping import FEW, WARPS, Chunks
from expertd_kernels.backends.gluon.shared.routing import combine, count_routes, group_few, place_routes
from expertd_kernels.backends.gluon.shared.triton_versions import launch, start

__all__ = ["add_up", "count", "few_tile", "group"]


def few_tile(n: int) -> tuple[int, int]:
    """Rows and columns of the ids that a program looks at in a step."""
    n = triton.next_power_of_2(n)
    return min(256, max(32, n)), min(4, max(1, n // 256))


def count(ids: Tensor, table: Tensor, c: Chunks) -> None:
    """Each chunk's routes of each expert; the kernel behind places them, and may read the ids before it waits."""
    start(count_routes, (c.number,), ids, table, ids.numel(), c.experts, c.padded, c.size, True, **launch(WARPS))


def group(
    ids: Tensor,
    table: Tensor,
    counts: Tensor,
    lists: Tensor,
    experts: int,
    places: Tensor | None = None,
    blocks: tuple[Tensor, int, int] | None = None,
) -> None:
    """ids [routes] -> counts [E], lists [routes] and, unless None, places [routes]; see routing.place_routes.
    blocks: (where they are listed, routes of one, routes more of a last one), for more than FEW routes."""
    n = ids.numel()
    if n <= FEW and places is None:
        start(group_few, (experts,), ids, counts, lists, n, *few_tile(n), True, **launch(WARPS))
        return
    c = Chunks.of(n, experts)
    count(ids, table, c)
    more = () if blocks is None else (*blocks, (blocks[0].numel() - 2) // 2)
    start(
        place_routes, (c.number + (blocks is not None),),
        ids, table, counts, lists, places, n, c.number, experts, c.padded, c.size, c.rows, True, *more,
        **launch(WARPS),
    )  # fmt: skip


def add_up(
    y: Tensor,
    ids: Tensor,
    out: Tensor,
    experts: int,
    parts: int = 1,
    done: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """y [parts, M * k, H], ids [M, k] -> out [M, H]; done: int32 counters that are set back to zero, or None; weights
    [M, k] f32: what y has not been multiplied by yet, or None.

    Up to 512 tokens a thread has few numbers of each row, so that it asks for all rows at once: with eight, the
    registers of a full multiprocessor hold five rows, and the others come a round trip later."""
    (M, top_k), H = ids.shape, out.shape[1]
    width, warps = (256, 4) if M < 64 else (512, 4) if M <= 512 else (2048, 8)
    start(
        combine, (M, triton.cdiv(H, width)),
        y, ids, out, H, experts, top_k, width, True, parts, done, 0 if done is None else done.numel(), weights,
        **launch(warps),
    )  # fmt: skip
