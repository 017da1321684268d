"""The w8a8 layer on the GPU: scratch memory, launches.  Needs a Hopper GPU, torch with CUDA and Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from expertd_kernels.backends.envelope import activation_of
from expertd_kernels.backends.gluon.shared.calls import InPieces
from expertd_kernels.backends.gluon.shared.gpu import Gpu, current_gpu
from expertd_kernels.backends.gluon.shared.grouping import FEW, WARPS, Chunks
from expertd_kernels.backends.gluon.shared.launches import add_up, count, few_tile, group
from expertd_kernels.backends.gluon.shared.space import tokens_of, w8a8_space
from expertd_kernels.backends.gluon.shared.triton_versions import launch, start
from expertd_kernels.backends.gluon.w8a8.constants import Gemm8, tile8, tile_few
from expertd_kernels.backends.gluon.w8a8.plan import GROUP, TOKENS, Few8, Plan8, Shape8, rules8
from expertd_kernels.backends.gluon.w8a8.prepare import (
    copy_to_places,
    prepare,
    round_rows,
    round_to_places,
)
from expertd_kernels.backends.gluon.w8a8.w8a8 import w8a8
from expertd_kernels.backends.gluon.w8a8.w8a8_few import w8a8_few
from expertd_kernels.backends.kernel_keys import settle
from expertd_kernels.backends.scratch import scratch_of, settle_counters
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.scheme import ActivationQuant

# Why it is so: decision 51 in DECISIONS.md.
__all__ = ["W8A8Experts"]

Parts = Mapping[str, Tensor]
"""A call's scratch by name (space.py)."""


@dataclass(frozen=True)
class _Matrix:
    """w13 or w2 on the GPU.

    codes    [E, rows / 128, K / 128, 128, 128] e4m3 by descriptor, seen as rows of 128
    scales   [E, rows / 128, K / 128] or [E, rows] f32
    bias     [E, rows] f32; anything where there is none (never read)
    """

    codes: TensorDescriptor
    scales: Tensor
    bias: Tensor


class W8A8Experts(InPieces):
    """The layer's experts."""

    backend = "gluon_w8a8"

    def __init__(self, packed: Packed, problem: Problem, gpu: Gpu | None = None) -> None:
        """gpu: None = the current one."""
        gpu = gpu or current_gpu()
        self.device, self.multiprocessors = gpu.device, gpu.multiprocessors
        self.rules = rules8(gpu.multiprocessors)
        rounding = ActivationQuant(packed.meta["rounding"])
        self.grouped, self.static = (
            rounding is q for q in (ActivationQuant.E4M3_GROUP128, ActivationQuant.E4M3_TENSOR)
        )
        self.activation = activation_of(packed)
        self.batch_invariant = problem.batch_invariant
        self.num_experts, self.hidden_size, self.intermediate_size = packed.meta["w2"]["shape"]
        if self.static:  # a token goes to several experts but is rounded once: by the largest scale
            self._given = packed.tensors["input_scales"].amax(dim=0).float().to(self.device)
        self._biased = {name: f"{name}.bias" in packed.tensors for name in ("w13", "w2")}
        self._w13, self._w2 = self._matrix(packed, "w13"), self._matrix(packed, "w2")
        self._descriptors: dict[tuple[int, torch.Size], TensorDescriptor] = {}
        settle_counters(self.device)

    @property
    def takes_e4m3(self) -> bool:
        """See protocol.E4m3Experts."""
        return self.grouped

    @property
    def rounds_h(self) -> bool:
        """Whether w13's kernel rounds the intermediate; else its scale needs the whole row, and a launch more."""
        return self.grouped or self.static

    def _matrix(self, packed: Packed, name: str) -> _Matrix:
        t = {k: v.to(self.device) for k, v in packed.tensors.items() if k.startswith(f"{name}.")}
        codes, scales = t[f"{name}.codes"], t[f"{name}.scales"]
        rows = codes.shape[1] * GROUP
        if not self.grouped:  # one a row, also where a whole projection shares it
            scales = scales[:, :, 0].repeat_interleave(rows // scales.shape[1], dim=1).contiguous()
        layout = tile8(self._gemm(name == "w13", 1, False), Plan8(), True).SB
        descriptor = TensorDescriptor(codes, [codes.numel() // GROUP, GROUP], [GROUP, 1], [GROUP, GROUP], layout)
        return _Matrix(descriptor, scales, t.get(f"{name}.bias", torch.zeros(1, device=self.device)))

    def _gemm(self, first: bool, top_k: int, weight_on_input: bool) -> Gemm8:
        a, H, I = self.activation, self.hidden_size, self.intermediate_size
        name = "w13" if first else "w2"
        return Gemm8(
            K=H if first else I,
            segment=I if first else H,
            experts=self.num_experts,
            top_k=top_k,
            first=first,
            grouped=self.grouped,
            weight=weight_on_input == first,
            bias=self._biased[name],
            act=a.kind.value,
            alpha=a.alpha,
            beta=a.beta,
            limit=a.limit or 0.0,
            limited=a.limit is not None,
            static=self.static,
        )

    def _scratch(self, shape: Shape8, M: int, parts: int) -> Parts:
        """The call's scratch by name, with the scales that are given in the places of those that are not computed."""
        s = scratch_of(self.device).kept_parts(w8a8_space(shape, self.grouped, self.static, tokens_of(M), parts))
        if self.static:
            x, h = self._given[:1], self._given[1:]
            return {**s, "x_scale": x, "listed_scale": x, "h_scale": h}
        return s

    def of_e4m3(
        self,
        codes: Tensor,
        scales: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor,
        plan: Plan8 | None = None,
    ) -> Tensor:
        """See protocol.E4m3Experts.  plan: as of a call.  ValueError for inputs of other shapes or types."""
        (M, top_k), H = topk_ids.shape, self.hidden_size
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous()
        if not self.grouped or codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
            raise ValueError(
                f"{self.backend}: codes {codes.dtype}, scales {scales.dtype}; want e4m3 and f32, and a layer whose"
                " inputs are rounded by groups of 128"
            )
        if codes.shape != (M, H) or scales.shape != (M, H // GROUP) or weights.shape != ids.shape:
            raise ValueError(
                f"{self.backend}: codes {tuple(codes.shape)}, scales {tuple(scales.shape)}, topk_ids"
                f" {tuple(ids.shape)}, topk_weights {tuple(weights.shape)}; want [M, {H}], [M, {H // GROUP}] and two"
                " [M, k]"
            )
        for part in self._pieces(M, top_k):
            self._run(codes[part], ids[part], weights[part], out[part], router_weight_on_input, plan, scales[part])
        return out

    def _run(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        on_input: bool,
        plan: Plan8 | None,
        scales: Tensor | None = None,
    ) -> None:
        """scales: of x that is e4m3 already."""
        M, top_k = ids.shape
        shape = Shape8(self.num_experts, top_k, self.hidden_size, self.intermediate_size)
        p = plan or Plan8.of(M, shape, self.batch_invariant, self.rules)
        s = self._scratch(shape, M, 1 if p.few is None else p.few[1].parts)
        if p.listed:
            q, scale = self._prepare_listed(x, scales, ids, s)
        elif scales is None:
            q, scale = s["x"], s["x_scale"]
            self._prepare(x, ids, s, p.few is not None)
        else:
            q, scale = x, scales
            self._prepare(None, ids, s, p.few is not None)
        try:
            self._products(q, scale, ids, weights, out, on_input, p, s)
        except BaseException:  # without `combine` nobody clears the tickets
            s["tickets"].zero_()
            raise

    def _products(
        self,
        q: Tensor,
        scale: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        on_input: bool,
        p: Plan8,
        s: Parts,
    ) -> None:
        """Both GEMMs and the sum, of inputs that are rounded."""
        n, top_k = ids.numel(), ids.shape[1]
        h = s["h"] if self.rounds_h else s["wide"]
        later = p.few is None and not on_input  # router weights: by the sum of many tokens' results
        gemms = self._gemm(True, top_k, on_input), self._gemm(False, top_k, on_input or later)
        if p.few is not None:
            self._few(gemms[0], p.few[0], self._w13, q, scale, ids, weights, s, h, s["h_scale"])
        else:
            self._multiply(gemms[0], p, self._w13, q, scale, weights, s, n, h, s["h_scale"])
        if not self.rounds_h:
            R, B = self._round_tile(self.intermediate_size, 4)
            start(
                round_rows,
                (triton.cdiv(n, R),),
                s["wide"],
                s["h"],
                s["h_scale"],
                n,
                self.intermediate_size,
                False,
                False,
                R,
                B,
                **launch(4),
            )
        y, parts = s["y"], 1
        if p.few is not None:
            parts = p.few[1].parts
            y = s["partial" if parts > 1 else "y"]
            self._few(gemms[1], p.few[1], self._w2, s["h"], s["h_scale"], ids, weights, s, y, s["h_scale"])
        else:
            self._multiply(gemms[1], p, self._w2, s["h"], s["h_scale"], weights, s, n, y, s["h_scale"])
        add_up(
            y, ids, out, self.num_experts, parts, s["tickets"] if p.few is None else None, weights if later else None
        )

    def _round_tile(self, columns: int, warps: int) -> tuple[int, int]:
        """(rows, columns) that a program of so many warps rounds, 16 numbers a thread or more."""
        B = triton.next_power_of_2(columns)
        if self.grouped:
            B = min(1024, B)
        return max(1, 512 * warps // B), B

    def _prepare(self, x: Tensor | None, ids: Tensor, s: Parts, few: bool = False) -> None:
        """Routes grouped by expert, inputs rounded; without inputs the same kernel has no programs for them."""
        n, H, E = ids.numel(), self.hidden_size, self.num_experts
        x, M = (s["y"], 0) if x is None else (x, x.shape[0])
        c = None if n <= FEW else Chunks.of(n, E)
        if c is not None:
            count(ids, s["chunks"], c)
        R, B = self._round_tile(H, WARPS)
        groups = few_tile(n) if c is None else (c.size, c.rows)
        start(
            prepare, ((E if c is None else c.number) + triton.cdiv(M, R) * triton.cdiv(H, B),),
            ids, s["chunks"], s["counts"], s["lists"], n, 0 if c is None else c.number, x, s["x"], s["x_scale"], M,
            E, 0 if c is None else c.padded, *groups, H, self.grouped, self.static, R, B, few, True,
            **launch(WARPS),
        )  # fmt: skip

    def _prepare_listed(self, x: Tensor, scales: Tensor | None, ids: Tensor, s: Parts) -> tuple[Tensor, Tensor]:
        """As _prepare, but the rounded inputs and their scales in the order of the list.  scales: as _run's."""
        M, top_k, H = *ids.shape, self.hidden_size
        # w2 writes y when w13 has read its inputs: they share the memory
        q, scale = s["y"].view(torch.float8_e4m3fn).view(-1, H)[: len(s["y"])], s["listed_scale"]
        group(ids, s["chunks"], s["counts"], s["lists"], self.num_experts, s["places"])
        warps = 8
        R, B = self._round_tile(H, warps)
        if scales is not None:
            start(
                copy_to_places, (triton.cdiv(M, R) * triton.cdiv(H, B),),
                x, scales, s["places"], q, scale, M, top_k, H, R, B, True, **launch(warps),
            )  # fmt: skip
            return q, scale
        start(
            round_to_places, (triton.cdiv(M, R) * triton.cdiv(H, B),),
            x, s["places"], q, scale, M, top_k, H, self.grouped, self.static, R, B, True, **launch(warps),
        )  # fmt: skip
        return q, scale

    def _few(
        self,
        gemm: Gemm8,
        p: Few8,
        m: _Matrix,
        x: Tensor,
        x_scale: Tensor,
        ids: Tensor,
        weights: Tensor,
        s: Parts,
        out: Tensor,
        out_scale: Tensor,
    ) -> None:
        n = ids.numel()
        by_route = n < self.num_experts
        t = tile_few(gemm, p, next(r for r in (64, 256, 1024) if n <= r), by_route)
        grid = (t.column_tiles * t.Z * (n if by_route else self.num_experts),)
        kernel: Any = w8a8_few
        start(
            kernel, grid, x, x_scale, m.codes, m.scales, m.bias, ids, s["lists"], weights, out, out_scale, n, t,
            **launch(4),
        )  # fmt: skip

    def _multiply(
        self,
        gemm: Gemm8,
        p: Plan8,
        m: _Matrix,
        x: Tensor,
        x_scale: Tensor,
        weights: Tensor,
        s: Parts,
        n: int,
        out: Tensor,
        out_scale: Tensor,
    ) -> None:
        t = tile8(gemm, p, True)
        copied = x if t.listed else s["h"]  # gathered inputs, which may lie anywhere, are not read by it
        key = copied.data_ptr(), copied.shape  # layouts of many sizes begin at one address
        if key not in self._descriptors:
            size = list(copied.shape)
            self._descriptors[key] = TensorDescriptor(copied, size, [size[1], 1], [TOKENS, GROUP], t.SA)
        blocks = min(n, n // TOKENS + min(self.num_experts, n))
        grid = (min(blocks * t.column_tiles, self.multiprocessors),)
        kernel: Any = w8a8
        start(
            kernel,
            grid,
            x,
            self._descriptors[key],
            x_scale,
            m.codes,
            m.scales,
            m.bias,
            s["counts"],
            s["lists"],
            weights,
            out,
            out_scale,
            s["tickets" if gemm.first else "second"],
            t,
            **launch(4),
        )


settle(__name__)
