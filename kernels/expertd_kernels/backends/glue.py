"""The host side of glue_kernels: what stands around the grouped GEMMs of other packages, without a synchronization with
the host and, in the steady state, without an allocation.

A call is one object: it carves its tensors from the scratch memory of the current stream and starts the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from expertd_kernels.backends.glue_kernels import activate_rows, combine_rows, gather_rows, place_rows
from expertd_kernels.backends.glue_space import MOST_BYTES, MOST_ROUTES, call_space
from expertd_kernels.backends.kernel_keys import settle
from expertd_kernels.backends.portable import route
from expertd_kernels.backends.portable.experts import ACTIVATIONS
from expertd_kernels.backends.scratch import Layout, Shapes, scratch_of
from expertd_kernels.backends.triton_launch import OPTIONS
from expertd_kernels.weights.activation import Activation

__all__ = ["Glue", "Places", "in_pieces"]

GROUP = 128
"""Columns with one scale, where rows are rounded."""


@dataclass(frozen=True)
class Places:
    """Where routes stand; see place_rows.  rows: how many there are room for."""

    rows: int
    alignment: int
    row: Tensor
    start: Tensor
    route: Tensor
    expert: Tensor
    block: Tensor

    @property
    def end(self) -> Tensor:
        """[1] int32: rows of all experts together, padding included."""
        return self.start[-1:]


class Glue:
    """The glue of one call: x [M, H], ids [M, k] int32 contiguous, weights [M, k] f32 contiguous, of `experts` experts.
    extra: what the caller needs of the scratch memory, by name; then in `parts`."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: int, extra: Shapes, *aligned: int) -> None:
        self.x, self.ids, self.weights, self.experts = x, ids, weights, experts
        self.routes, self.top_k = ids.numel(), ids.shape[1]
        self.soft = not isinstance(place_rows, triton.JITFunction)  # Triton's interpreter
        self.chunks = -(-self.routes // route.CHUNK)
        self.bins = route.expert_bins(experts)
        self.parts = scratch_of(x.device).parts(Layout(call_space(self.routes, experts, extra, *aligned)))
        self.counted = False

    def place(self, alignment: int, *, routes: bool = False, experts: bool = False, blocks: bool = False) -> Places:
        """Rows for all routes, one of the alignments given before; of the other tensors only those asked for are
        written."""
        parts = self.parts
        every = max(route.CHUNK, triton.next_power_of_2(self.routes)) if self.routes <= route.FUSED_ROUTES else 0
        if not every and not self.counted:
            counts, totals = parts["counts"], parts["totals"]
            route.count[(self.chunks,)](
                self.ids, counts, self.routes, E=self.experts, EP=self.bins, C=route.CHUNK, num_warps=4, **OPTIONS
            )
            route.scan[(self.bins // route.SCAN_EXPERTS,)](
                counts, totals, self.chunks, EP=self.bins, BE=route.SCAN_EXPERTS, BC=route.SCAN_CHUNKS,
                num_warps=4, **OPTIONS,
            )  # fmt: skip
            self.counted = True
        of = {name: parts[f"{name}/{alignment}"] for name in ("row", "start", "route", "expert", "block")}
        rows = of["route"].shape[0]
        place_rows[(self.chunks,)](
            self.ids, parts["counts"], parts["totals"], parts["base"], of["row"], of["route"], of["expert"],
            of["block"], of["start"], self.routes, rows, E=self.experts, EP=self.bins, C=route.CHUNK, A=alignment,
            ALL=every, ROUTES=routes, EXPERTS=experts, BLOCKS=blocks, num_warps=4, **OPTIONS,
        )  # fmt: skip
        return Places(rows, alignment, **of)

    def gather(self, places: Places, out: Tensor, scale: Tensor | None = None) -> None:
        """x's rows to the rows of their routes in out [rows, H].  scale [H / 128, rows] f32: rounded to e4m3."""
        M, H = self.x.shape
        width = max(GROUP, min(1024, triton.next_power_of_2(H)))
        gather_rows[(M, -(-H // width))](
            self.x, places.row, out, out if scale is None else scale, self.x.stride(0), out.shape[0],
            H=H, TOP_K=self.top_k, ROUNDED=scale is not None, BH=width, SOFT=self.soft,
            num_warps=_warps(width), **OPTIONS,
        )  # fmt: skip

    def activate(
        self,
        h: Tensor,
        out: Tensor,
        activation: Activation,
        places: Places | None = None,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """h [rows, at least segments * N] bf16 -> out [rows, N].  places: rows are sorted; None: row r is route r's."""
        N = out.shape[1]
        width = max(GROUP, min(1024, triton.next_power_of_2(N)))
        activate_rows[(self.routes, -(-N // width))](
            h, self.ids, self.ids if places is None else places.row, h if bias is None else bias, out,
            out if scale is None else scale, out.shape[0], h.stride(0),
            activation.alpha, activation.beta, activation.limit or 0.0,
            N=N, SEGMENTS=activation.segments, E=self.experts, KIND=ACTIVATIONS[activation.kind],
            LIMITED=activation.limit is not None, MAPPED=places is not None, BIASED=bias is not None,
            ROUNDED=scale is not None, BN=width, SOFT=self.soft, num_warps=_warps(width), **OPTIONS,
        )  # fmt: skip

    def combine(
        self, y: Tensor, out: Tensor, weighted: bool, places: Places | None = None, bias: Tensor | None = None
    ) -> None:
        """out [M, H] = weighted sums of the routes' rows of y [rows, at least H]."""
        M, H = out.shape
        width = min(triton.next_power_of_2(H), 1024 if M >= 256 else 256)
        combine_rows[(M, -(-H // width))](
            y, self.ids, self.ids if places is None else places.row, self.weights, y if bias is None else bias, out,
            y.stride(0), out.stride(0), H=H, E=self.experts, TOP_K=self.top_k, MAPPED=places is not None,
            WEIGHTED=weighted, BIASED=bias is not None, BH=width, SOFT=self.soft, num_warps=_warps(width), **OPTIONS,
        )  # fmt: skip


def in_pieces(
    compute: Callable[[Tensor, Tensor, Tensor, Tensor, bool], None],
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    router_weight_on_input: bool,
    out: Tensor | None,
    *,
    width: int,
) -> Tensor:
    """What Experts.__call__ promises, of compute(x [m, H] bf16, ids int32, weights f32, out, weighted), which gets
    contiguous tensors of not too many routes.  weighted: whether the sum is to take the weights.  width: columns of the
    widest bf16 matrix with a row for each route."""
    out = torch.empty_like(hidden_states) if out is None else out
    target = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()
    piece = max(1, min(MOST_ROUTES, MOST_BYTES // (2 * width)) // max(1, ids.shape[1]))
    for at in range(0, hidden_states.shape[0], piece):
        part = slice(at, at + piece)
        x = hidden_states[part]
        if router_weight_on_input:
            x = x * weights[part, :1]
        compute(x.to(torch.bfloat16).contiguous(), ids[part], weights[part], target[part], not router_weight_on_input)
    return out if target is out else out.copy_(target)


def _warps(width: int) -> int:
    return max(1, min(4, width // 256))


settle(__name__)
