"""Experts on mapped weights: no answer leaves that was computed from a file that somebody has changed."""

from __future__ import annotations

from torch import Tensor

from expertd_kernels.common.protocol import Experts, ExpertsLostError
from expertd_kernels.packed.mapping import EntryFile

# Why it is so: decision 81 in DECISIONS.md.
__all__ = ["WatchedExperts"]


class WatchedExperts:
    """`experts`, which compute from the mapping of `file` on this process's CPU."""

    def __init__(self, experts: Experts, file: EntryFile) -> None:
        self._experts, self._file = experts, file
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
        """As Experts.__call__; the file is asked when everything is computed: a change before that is seen."""
        y = self._experts(hidden_states, topk_ids, topk_weights, router_weight_on_input=router_weight_on_input, out=out)
        if fault := self._file.fault():
            raise ExpertsLostError(fault)
        return y
