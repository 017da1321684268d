"""Numbers of tokens that are treated alike, so that a size met first under load finds its kernels compiled.  Pure."""

from __future__ import annotations

import math

__all__ = ["CAPTURED_TOKENS", "planned"]

CAPTURED_TOKENS = 512
"""Up to here a server replays the calls of rows that allow it from CUDA graphs, because launching the kernels takes the
host longer than the device: 490 us against 140 us at 512 tokens of Qwen3's int4 layer on an H200."""


def planned(tokens: int) -> int:
    """The number of tokens that a layer's kernels are chosen for: itself up to CAPTURED_TOKENS (a server pads such
    batches to few sizes), the nearest power of two beyond.  So a layer that ran at the powers of two up to its largest
    batch, and at that batch, compiles nothing at the sizes between."""
    return tokens if tokens <= CAPTURED_TOKENS else 1 << round(math.log2(tokens))
