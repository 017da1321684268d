"""Experts that take longer than they need: a slow machine for tests of what lies around it."""

from __future__ import annotations

import time

from torch import Tensor

from expertd_kernels.common.protocol import Experts

__all__ = ["SlowedExperts"]


class SlowedExperts:
    """`experts`, and `route_s` more for each token of an expert."""

    def __init__(self, experts: Experts, route_s: float) -> None:
        self._experts, self._route_s = experts, route_s
        self.backend = experts.backend

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Experts.__call__."""
        y = self._experts(hidden_states, topk_ids, topk_weights, router_weight_on_input=router_weight_on_input, out=out)
        time.sleep(self._route_s * int((topk_ids >= 0).sum()))
        return y
