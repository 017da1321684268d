"""SGLang 0.5.23, whose layers know whether they are a draft model's."""

from __future__ import annotations

from typing import Any

__all__ = ["of_a_draft"]


def of_a_draft(layer: Any) -> bool:
    """layer: a FusedMoE."""
    return bool(layer.is_draft)
