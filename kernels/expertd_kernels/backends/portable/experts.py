"""The whole layer: route, GEMM 1 with activation, GEMM 2, combine.  No host synchronization and no allocation once the
scratch memory has its size, so a call can be captured in a CUDA graph after one call of the same size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from expertd_kernels.backends.device import (
    absent,
    capturing,
    multiprocessors,
    nvidia_of,
    on,
    shared_bytes,
    stream_of,
)
from expertd_kernels.backends.kernel_keys import settle
from expertd_kernels.backends.portable import combine as combining
from expertd_kernels.backends.portable import gemm, rounded, route
from expertd_kernels.backends.portable.matrix import Matrix
from expertd_kernels.backends.portable.replay import (
    MOST_RECORDINGS,
    MOST_TOKENS,
    Recording,
    kind_of,
    proves,
)
from expertd_kernels.backends.portable.space import CHUNK_TOKENS, Rounded, layer_space
from expertd_kernels.backends.portable.tiling import Facts, Tile, TilingPlan, make_plan
from expertd_kernels.backends.scratch import Layout, Shapes, scratch_of
from expertd_kernels.backends.triton_launch import OPTIONS
from expertd_kernels.common.sizes import planned
from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["CHUNK_TOKENS", "TritonExperts"]

ONE_PLAN_ROWS = 24
"""Rows an expert that every batch is planned for where a token's bits must not depend on its batch: blocks of 32 rows,
between the few rows of decoding and the many of a prefill."""

ACTIVATIONS = {
    ActivationKind.SILU_AND_MUL: 0,
    ActivationKind.GELU_AND_MUL: 1,
    ActivationKind.GELU_TANH_AND_MUL: 2,
    ActivationKind.SWIGLUOAI: 3,
    ActivationKind.RELU2: 4,
}


@dataclass(frozen=True, eq=False)
class _Call:
    """One chunk's tensors: x [M, H], ids and weights [M, k], out [M, H], scratch by name, and its plan."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor
    on_input: bool
    plan: TilingPlan
    scratch: Mapping[str, Tensor]
    recording: Recording | None


class TritonExperts:
    """Experts of one layer on the device of the packed tensors.  planner: tokens -> TilingPlan; default plan.make_plan.

    one_plan: the same plan for every number of tokens, so that each row is computed by the same steps in any batch."""

    def __init__(
        self,
        backend: str,
        w13: Matrix,
        w2: Matrix,
        activation: Activation,
        activation_quant: ActivationQuant = ActivationQuant.NONE,
        planner: Callable[[int], TilingPlan] | None = None,
        input_scales: Tensor | None = None,
    ) -> None:
        """input_scales [2] f32: the static scales of the rows before w13 and before w2 (E4M3_TENSOR)."""
        self.backend = backend
        self.input_scales = input_scales
        self.eight = torch.int8 if activation_quant is ActivationQuant.INT8_TOKEN else torch.float8_e4m3fn
        self.w13, self.w2, self.activation, self.activation_quant = w13, w2, activation, activation_quant
        codes = w13.tensors["codes"]
        self.device, self.num_experts = codes.device, codes.shape[0]
        self.hidden_size, self.intermediate_size = w13.k, w2.k
        self.rounded = activation_quant is not ActivationQuant.NONE
        interpreted = not isinstance(gemm.expert_gemm, triton.JITFunction)
        gpu = None if interpreted else nvidia_of(self.device)
        self.ptx = gpu is not None
        self.soft = interpreted
        self.pdl = gpu is not None and gpu.capability >= (9, 0)
        self.one_plan = False
        self._planner = planner
        self._plans: dict[tuple[int, int], TilingPlan] = {}
        self._fewer_stages: dict[tuple[Any, ...], int] = {}
        self._recordings: dict[tuple[Any, ...], Recording] = {}
        self._replays = gpu is not None and absent() is None

    def plan(self, tokens: int, top_k: int) -> TilingPlan:
        """The plan of a batch: the same one for sizes that are planned alike."""
        if self._planner is not None:
            return self._planner(tokens)
        if self.one_plan:
            tokens, top_k = ONE_PLAN_ROWS * self.num_experts, 1
        else:
            tokens = planned(tokens)
        key = (tokens, top_k)
        if key not in self._plans:
            self._plans[key] = make_plan(self._facts(top_k), tokens)
        return self._plans[key]

    def _facts(self, top_k: int) -> Facts:
        w13, w2 = self.w13, self.w2
        return Facts(
            self.num_experts,
            top_k,
            w13.segments,
            w13.layout,
            w2.layout,
            self.hidden_size,
            self.intermediate_size,
            multiprocessors(self.device),
            self.rounded,
            shared_bytes(self.device),
            8 if self.ptx else 16,
        )

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See expertd_kernels/common/protocol.py.  Activations that are not bf16 are rounded to it first."""
        M, k = topk_ids.shape
        if hidden_states.shape != (M, self.hidden_size) or topk_weights.shape != (M, k):
            raise ValueError(
                f"experts: hidden_states {tuple(hidden_states.shape)}, topk_ids {tuple(topk_ids.shape)}, topk_weights"
                f" {tuple(topk_weights.shape)}; want [M, {self.hidden_size}], [M, k], [M, k]"
            )
        if out is None:
            out = torch.empty_like(hidden_states)
        ids = topk_ids.to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        target = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        with on(self.device):
            for at in range(0, M, CHUNK_TOKENS):
                part = slice(at, min(at + CHUNK_TOKENS, M))
                self._chunk(hidden_states[part], ids[part], weights[part], target[part], router_weight_on_input)
        return out if target is out else out.copy_(target)

    def _chunk(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, on_input: bool) -> None:
        """One pass; of a kind that was seen before, from its recording."""
        plan = self.plan(x.shape[0], ids.shape[1])
        if not self._replays or x.shape[0] > MOST_TOKENS:
            self._compute(x, ids, weights, out, on_input, plan, None)
            return
        kind = kind_of(x, ids, weights, out, on_input, plan, stream_of(self.device))
        found = self._recordings.get(kind)
        if found is not None:
            found.run(x, ids, weights, out)
            return
        if capturing(self.device):  # the proof below would have to wait for the device
            self._compute(x, ids, weights, out, on_input, plan, None)
            return
        recording = Recording()
        self._compute(x, ids, weights, out, on_input, plan, recording)
        if not self._recordings:
            self._replays = proves(recording, x, ids, weights, out)
        if len(self._recordings) >= MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[kind] = recording

    def _compute(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        on_input: bool,
        plan: TilingPlan,
        recording: Recording | None,
    ) -> None:
        parts = scratch_of(self.device).parts(Layout(self._space(x, ids, plan)))
        if "x" in parts:
            x = parts["x"].copy_(x)
            if recording is not None:
                recording.converted = x
        call = _Call(x, ids, weights, out, on_input, plan, parts, recording)
        if not plan.direct:
            self._route(call)
        if self.rounded:
            self._gemm_rounded(call, x, self.w13, plan.w13, first=True)
            self._gemm_rounded(call, parts["h"], self.w2, plan.w2, first=False)
        else:
            self._gemm(call, x, self.w13, plan.w13, first=True)
            self._gemm(call, parts["h"], self.w2, plan.w2, first=False)
        self._combine(call)

    def _launch(self, call: _Call, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """The one place where kernels start: the tuner's subclass compiles here instead.  A kernel that needs more
        shared memory than the device has is tried with fewer stages: the plan only estimates."""
        key = tuple(constants.get(name) for name in ("GATHER_X", "BM", "BN", "BC", "num_stages"))
        if key in self._fewer_stages:
            constants["num_stages"] = self._fewer_stages[key]
        while True:
            try:
                compiled = kernel[grid](*args, **constants, **OPTIONS)
                break
            except triton.OutOfResources:
                if constants.get("num_stages", 1) <= 1:
                    raise
                self._fewer_stages[key] = constants["num_stages"] = constants["num_stages"] - 1
        if call.recording is not None:
            tensors = (call.x, call.ids, call.weights, call.out)
            call.recording.add(compiled, grid, kernel.arg_names, args, constants, tensors)

    def _space(self, x: Tensor, ids: Tensor, plan: TilingPlan) -> Shapes:
        return layer_space(
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            *ids.shape,
            bm=0 if plan.direct else plan.rows,
            converted=x.dtype != torch.bfloat16 or x.stride(1) != 1,
            rounded=(self._rounding(self.w13), self._rounding(self.w2)) if self.rounded else None,
        )

    def _rounding(self, m: Matrix) -> Rounded:
        return Rounded(-(-m.k // m.layout.block) * m.layout.block, self._columns(m), self.eight)

    def _route(self, call: _Call) -> None:
        R, parts = call.ids.numel(), call.scratch
        chunks, bins = parts["counts"].shape
        fused = R <= route.FUSED_ROUTES
        sizes = {"E": self.num_experts, "EP": bins, "C": route.CHUNK}
        if not fused:
            self._launch(call, route.count, (chunks,), call.ids, parts["counts"], R, **sizes, num_warps=4)
            self._launch(
                call,
                route.scan,
                (bins // route.SCAN_EXPERTS,),
                parts["counts"],
                parts["totals"],
                chunks,
                EP=bins,
                BE=route.SCAN_EXPERTS,
                BC=route.SCAN_CHUNKS,
                num_warps=4,
            )
        every = max(route.CHUNK, triton.next_power_of_2(R)) if fused else 0
        self._launch(
            call,
            route.place,
            (chunks,),
            call.ids,
            parts["counts"],
            parts["totals"],
            parts["base"],
            parts["slots"],
            parts["blocks"],
            R,
            parts["blocks"].shape[0],
            **sizes,
            BM=call.plan.rows,
            ALL=every,
            PDL=self.pdl,
            num_warps=4,
        )

    def _shared(self, call: _Call, m: Matrix, tile: Tile, first: bool) -> tuple[dict[str, Any], int, int]:
        """Constants of both kinds of GEMM, blocks and programs."""
        act = self.activation
        tiles = -(-m.n // tile.weight_rows)
        blocks = call.ids.numel() if call.plan.direct else call.scratch["blocks"].shape[0]
        consts = {
            "TOP_K": call.ids.shape[1],
            "GATHER_X": first,
            "SCATTER_OUT": not first,
            "DIRECT": call.plan.direct,
            "ROUTER": first and call.on_input,
            "ACTIVATION": ACTIVATIONS[act.kind] if first else -1,
            "LIMITED": first and act.limit is not None,
            "BM": call.plan.rows,
            "BN": tile.weight_rows,
            "GROUP_M": tile.together,
            "SOFT": self.soft,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        return consts, blocks, blocks * tiles

    def _gemm(self, call: _Call, x: Tensor, m: Matrix, tile: Tile, first: bool) -> None:
        parts, act = call.scratch, self.activation
        consts, blocks, programs = self._shared(call, m, tile, first)
        out = parts["h"] if first else parts["y"]
        # the first kernel of a layer waits for everything before it, as usual
        early = {"launch_pdl": True} if self.pdl and not (first and call.plan.direct) else {}
        t, p = m.tensors, m.pointer
        self._launch(
            call, gemm.expert_gemm, (programs,),
            x, t["codes"], p("scales"), p("zeros"), p("row_scales"), p("global_scales"), p("bias"), p("columns"),
            call.weights, parts.get("slots", call.ids), parts.get("blocks", call.ids), call.ids, out,
            blocks, self.num_experts, x.stride(0), out.stride(0), act.alpha, act.beta, act.limit or 0.0,
            **m.constants(tile, self.ptx), **consts, PDL=self.pdl, **early,
        )  # fmt: skip

    def _sliced(self, m: Matrix) -> bool:
        """Which of rounded.py's loops."""
        return m.layout.p == 4 or self.activation_quant is ActivationQuant.MXFP8

    def _columns(self, m: Matrix) -> int:
        """Columns of a row that are rounded with one scale; 0 = all, also where there are not more."""
        if self.activation_quant is ActivationQuant.MXFP8:
            return 32
        return 128 if self.activation_quant is ActivationQuant.E4M3_GROUP128 and m.k > 128 else 0

    def _gemm_rounded(self, call: _Call, x: Tensor, m: Matrix, tile: Tile, first: bool) -> None:
        parts, act = call.scratch, self.activation
        name = "xq" if first else "hq"
        q, scale = parts[name], parts[name + "_scale"]
        columns, sliced = self._columns(m), self._sliced(m)
        width = max(128, triton.next_power_of_2(q.shape[1]))
        width = min(1024, width) if columns else width
        static, int8 = self.input_scales, self.eight is torch.int8
        self._launch(
            call, rounded.round_rows, (x.shape[0], -(-q.shape[1] // width)),
            x, q, scale, scale if static is None else static[0 if first else 1 :],
            x.stride(0), m.k, q.shape[1], m.layout.sw, sliced, columns, static is not None, int8, width, self.soft,
            num_warps=4 if width <= 4096 else 8,
        )  # fmt: skip
        consts, blocks, programs = self._shared(call, m, tile, first)
        out = parts["h"] if first else parts["y"]
        t, p = m.tensors, m.pointer
        self._launch(
            call, rounded.expert_gemm_rounded, (programs,),
            q, scale, t["codes"] if sliced else t["codes"].view(self.eight),
            p("scales"), p("zeros"), p("row_scales"), p("global_scales"), p("bias"),
            call.weights, parts.get("slots", call.ids), parts.get("blocks", call.ids), call.ids, out,
            blocks, self.num_experts, out.stride(0), act.alpha, act.beta, act.limit or 0.0,
            **m.sizes(), **m.groups(), **m.zeros(), **consts, GX=columns, SLICED=sliced, INT8=int8,
        )  # fmt: skip

    def _combine(self, call: _Call) -> None:
        M, k = call.ids.shape
        H = self.hidden_size
        width = min(triton.next_power_of_2(H), 1024 if M >= 256 else 256)
        early = {"launch_pdl": True} if self.pdl and not self.rounded else {}
        self._launch(
            call,
            combining.combine,
            (-(-H // width), M),
            call.scratch["y"],
            call.ids,
            call.weights,
            call.out,
            call.out.stride(0),
            H=H,
            E=self.num_experts,
            TOP_K=k,
            WEIGHTED=not call.on_input,
            BH=width,
            PDL=bool(early),
            SOFT=self.soft,
            num_warps=4 if width > 256 else 1,
            **early,
        )


settle(__name__)
