"""SGLang 0.5.22, where only the scope in which a layer is made says that it is a draft model's."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_flags

__all__ = ["of_a_draft"]


def of_a_draft(layer: Any) -> bool:
    """layer: a FusedMoE, while it is made."""
    return bool(get_flags().moe.in_speculative_scope)
