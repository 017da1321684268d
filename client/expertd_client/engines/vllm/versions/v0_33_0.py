"""vLLM 0.33.0."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.expert_substitution import SubstitutedRoutedExperts

__all__ = ["substituted"]


def substituted(layer: Any) -> bool:
    """layer: a RoutedExperts."""
    return isinstance(layer, SubstitutedRoutedExperts)
