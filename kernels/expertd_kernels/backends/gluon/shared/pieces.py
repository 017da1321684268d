"""How many tokens of a batch one launch takes.  Imports nothing, so that a plan of memory can ask without a GPU."""

from __future__ import annotations

__all__ = ["MAX_TOKENS", "piece_tokens"]

MAX_TOKENS = 8192
"""Tokens a launch at most; larger batches go in pieces."""
MAX_OUTPUT_BYTES = 1 << 30
"""Bytes of w2's results [M, top_k, H] at most; a smaller piece is taken where more would be needed."""


def piece_tokens(top_k: int, hidden_size: int) -> int:
    """Tokens a launch: a power of two."""
    most = MAX_OUTPUT_BYTES // (top_k * hidden_size * 2)
    return min(MAX_TOKENS, 1 << max(0, most.bit_length() - 1))
