"""`collect`, `deliver` and `signal`: the ends of a batch on any GPU that Triton compiles for.

Callers' tensors lie in pinned host memory, a row anywhere; the table (table.py) says where.  collect brings them into
the batch's device buffers, converted, with global expert ids turned into slots and every id and weight checked
(collect_e4m3: hidden states as codes and scales, for experts that take those); deliver
writes each row of the output to its caller; signal writes one word that the host polls.  What is checked is what is
used: an id is read once, and a caller that changes its memory meanwhile spoils nothing but its own answer.

One program a row.  The time is that of the bus: 4 us for a row, 173 us for 2048 rows of 4 KiB (48 GB/s), as fast as the
copy engine moves the same bytes in one piece (154 us); measured on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from expertd_kernels.backends.gather import device_code
from expertd_kernels.backends.gather.table import SCALED_COLUMNS

__all__ = ["collect", "collect_e4m3", "deliver", "signal"]


def _warps(H: int) -> int:
    """16 elements a thread: enough loads in flight to fill the bus."""
    return max(1, min(8, int(triton.next_power_of_2(H)) // 512))


def collect(
    table: Tensor,
    rows: int,
    hidden: Tensor | None,
    slots: Tensor,
    weights: Tensor,
    verdicts: Tensor,
) -> None:
    """Brings `rows` rows into the batch's buffers.

    table     [>= rows, 8] int64, see table.py; pinned, or on the device
    hidden    [>= rows, H] bf16 or f32, out; None = somebody else brings it
    slots     [>= rows, K] int32, out, and weights [>= rows, K] f32, out: routes beyond a row's top_k, and all of a row
              with an id or a weight that is wrong, are -1 and 0
    verdicts  [>= rows, 2] int32, out, pinned: routes computed here; 1 + the first column that is wrong (sign bit
              set where the weight is), 0 = none
    """
    H = 1 if hidden is None else hidden.shape[1]
    K = slots.shape[1]
    kernel: Any = device_code.collect
    kernel[(rows,)](
        table, slots if hidden is None else hidden, slots, slots, slots, weights, verdicts,
        H, K, triton.next_power_of_2(H), triton.next_power_of_2(K), device_code.WIDENED if hidden is not None else
        device_code.NOTHING, num_warps=_warps(H),
    )  # fmt: skip


def collect_e4m3(
    table: Tensor,
    rows: int,
    codes: Tensor,
    scales: Tensor,
    slots: Tensor,
    weights: Tensor,
    verdicts: Tensor,
    staged: Tensor | None = None,
) -> None:
    """As collect, for experts that take e4m3: hidden states that are e4m3 as they came, others rounded to bf16 and then
    by the rule of rounding.py.

    codes   [>= rows, H] e4m3, out, and scales [>= rows, H / 128] f32, out; H a multiple of 128
    staged  [>= rows, H] bf16: hidden states that somebody else has brought, e4m3 to codes and scales; None = the table
            says where they are
    """
    H, K = codes.shape[1], slots.shape[1]
    assert H % SCALED_COLUMNS == 0, f"{H} columns, want a multiple of {SCALED_COLUMNS}"
    kernel: Any = device_code.collect
    kernel[(rows,)](
        table, codes.view(torch.uint8), scales, slots if staged is None else staged, slots, weights, verdicts,
        H, K, triton.next_power_of_2(H), triton.next_power_of_2(K), device_code.AS_CODES if staged is None else
        device_code.FROM_STAGED, num_warps=_warps(H),
    )  # fmt: skip


def deliver(table: Tensor, rows: int, out: Tensor) -> None:
    """Writes out [>= rows, H] bf16 or f32 to where the table says, in the types that it says."""
    H = out.shape[1]
    kernel: Any = device_code.deliver
    kernel[(rows,)](table, out, H, triton.next_power_of_2(H), num_warps=_warps(H))


def signal(done: Tensor) -> None:
    """Writes 1 to done [1] int32, pinned, behind everything that this stream has written."""
    kernel: Any = device_code.signal
    kernel[(1,)](done, num_warps=1)
