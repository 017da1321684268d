"""vLLM 0.32.0, which has no substituted experts."""

from __future__ import annotations

from typing import Any

__all__ = ["substituted"]


def substituted(layer: Any) -> bool:
    """layer: a RoutedExperts."""
    return False
