"""What a call of the layers on the GPU checks, and how it is cut into pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.gluon.shared.pieces import MAX_TOKENS, piece_tokens
from expertd_kernels.backends.gluon.shared.triton_versions import compiling

__all__ = ["InPieces"]

MAX_TOP_K = 32
"""Routes of a token: the summing kernel keeps a bit for each."""


class InPieces(ABC):
    """A layer whose `_run` computes one piece of a batch; calling it computes a batch of any size.

    Calls on a stream may come from one thread at a time: all layers share its scratch memory.  The first call at a new
    size may allocate and compile; make it before capturing a CUDA graph.  most_tokens: of a piece, a power of two."""

    backend: str
    device: torch.device
    hidden_size: int
    most_tokens: int = MAX_TOKENS

    @abstractmethod
    def _run(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, on_input: bool, plan: Any) -> None:
        """x, out [M, H] bf16, ids [M, k] int32, weights [M, k] f32, all contiguous; plan: None = the usual one."""

    def _pieces(self, tokens: int, top_k: int) -> Iterator[slice]:
        """The rows of each piece of a batch."""
        piece = min(self.most_tokens, piece_tokens(top_k, self.hidden_size))
        return (slice(at, at + piece) for at in range(0, tokens, piece))

    def compile_ahead(self, sizes: Iterable[tuple[int, int]], threads: int, on_input: bool = False) -> None:
        """As protocol.CompiledExperts.  Nothing is computed."""
        sizes, device = list(sizes), self.device
        most = max((tokens for tokens, _ in sizes), default=0)
        x = torch.empty(min(most, self.most_tokens), self.hidden_size, dtype=torch.bfloat16, device=device)
        with compiling(threads):
            for tokens, top_k in sizes:
                for part in {min(s.stop, tokens) - s.start for s in self._pieces(tokens, top_k)}:
                    rows = x[:part]
                    ids = torch.empty(part, top_k, dtype=torch.int32, device=device)
                    self._run(rows, ids, ids.view(torch.float32), rows, on_input, None)

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
        plan: Any = None,
    ) -> Tensor:
        """As protocol.Experts.  hidden_states [M, H] bf16.  plan: instead of the one that the tokens' number picks.
        ValueError for inputs of other shapes or types."""
        x, M = hidden_states.contiguous(), hidden_states.shape[0]
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()
        if ids.ndim != 2 or ids.shape[1] > MAX_TOP_K:
            raise ValueError(f"{self.backend}: topk_ids {tuple(ids.shape)}, want [M, k] with k up to {MAX_TOP_K}")
        if x.dtype != torch.bfloat16 or x.shape != (ids.shape[0], self.hidden_size) or ids.shape != weights.shape:
            raise ValueError(
                f"{self.backend}: hidden_states {x.dtype} {tuple(x.shape)}, topk_ids {tuple(ids.shape)}, topk_weights"
                f" {tuple(weights.shape)}; want bf16 [M, {self.hidden_size}] and two [M, k]"
            )
        if out is None:
            out = torch.empty_like(x)
        for part in self._pieces(M, ids.shape[1]):
            self._run(x[part], ids[part], weights[part], out[part], router_weight_on_input, plan)
        return out
