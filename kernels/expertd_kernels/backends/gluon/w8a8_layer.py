"""The w8a8 layer on the GPU: workspace, launches.  Needs a Hopper GPU, torch with CUDA and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from expertd_kernels.backends.envelope import activation_of
from expertd_kernels.backends.gluon.calls import InPieces
from expertd_kernels.backends.gluon.ends import FEW, LINE, WARPS, Chunks, add_up, count, few_tile, group
from expertd_kernels.backends.gluon.w8a8 import w8a8
from expertd_kernels.backends.gluon.w8a8_few import w8a8_few
from expertd_kernels.backends.gluon.w8a8_plan import TOKENS, Few8, Plan8, Shape8
from expertd_kernels.backends.gluon.w8a8_prepare import (
    prepare,
    round_rows,
    round_to_places,
)
from expertd_kernels.backends.gluon.w8a8_tile import GROUP, Gemm8, tile8, tile_few
from expertd_kernels.backends.kernel_keys import settle
from expertd_kernels.problem import Problem
from expertd_kernels.protocol import Packed
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["W8A8Experts"]


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


@dataclass(frozen=True)
class _Workspace:
    """Buffers for `routes` routes.  Kept for good: captured graphs hold their addresses."""

    counts: Tensor  # [E] int32
    chunks: Tensor  # each chunk's routes of each expert
    lists: Tensor  # [routes] int32
    x: Tensor  # [tokens, H] e4m3 and its scales [tokens, H / 128] or [tokens]
    x_scale: Tensor  # or the given one
    h: Tensor  # [routes, I] e4m3 and its scales, in the order of the list
    h_scale: Tensor
    tickets: Tensor  # [2 * LINE] int32, zero between calls: tiles of w13 that were drawn, and a line on, of w2
    wide: Tensor  # [routes, I] bf16: h before it is rounded, where a row shares one scale (else empty)
    y: Tensor  # [routes, H] bf16


class W8A8Experts(InPieces):
    """The layer's experts."""

    backend = "gluon_w8a8"

    def __init__(self, packed: Packed, problem: Problem) -> None:
        self.packed, self.device = packed, torch.device("cuda", torch.cuda.current_device())
        rounding = ActivationQuant(packed.meta["rounding"])
        self.grouped, self.static = (
            rounding is q for q in (ActivationQuant.E4M3_GROUP128, ActivationQuant.E4M3_TENSOR)
        )
        self.activation = activation_of(packed)
        self.batch_invariant = problem.batch_invariant
        self.num_experts, self.hidden_size, self.intermediate_size = packed.meta["w2"]["shape"]
        self.multiprocessors: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        if self.static:  # a token goes to several experts but is rounded once: by the largest scale
            self._given = packed.tensors["input_scales"].amax(dim=0).float().to(self.device)
        self._w13, self._w2 = self._matrix("w13"), self._matrix("w2")
        self._spaces: dict[tuple[int, int], _Workspace] = {}
        self._lists: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._descriptors: dict[int, TensorDescriptor] = {}
        self._partial: dict[tuple[int, int], Tensor] = {}

    @property
    def rounds_h(self) -> bool:
        """Whether w13's kernel rounds the intermediate; else its scale needs the whole row, and a launch more."""
        return self.grouped or self.static

    def _matrix(self, name: str) -> _Matrix:
        t = {k: v.to(self.device) for k, v in self.packed.tensors.items() if k.startswith(f"{name}.")}
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
            bias=f"{name}.bias" in self.packed.tensors,
            act=a.kind.value,
            alpha=a.alpha,
            beta=a.beta,
            limit=a.limit or 0.0,
            limited=a.limit is not None,
            static=self.static,
        )

    def _space(self, M: int, top_k: int) -> _Workspace:
        """Buffers for the next power of two of tokens."""
        tokens = triton.next_power_of_2(max(16, M))
        if (tokens, top_k) not in self._spaces:
            n = tokens * top_k
            H, I, d = self.hidden_size, self.intermediate_size, self.device

            def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                return torch.empty(shape, dtype=dtype, device=d)

            def scales(which: int, rows: int, columns: int) -> Tensor:
                if self.static:
                    return self._given[which : which + 1]
                return empty((rows, columns // GROUP if self.grouped else 1), torch.float32)

            e4m3 = torch.float8_e4m3fn
            self._spaces[tokens, top_k] = _Workspace(
                empty((self.num_experts,), torch.int32),
                Chunks.table(n, self.num_experts, d),
                empty((n,), torch.int32),
                empty((tokens, H), e4m3),
                scales(0, tokens, H),
                empty((n, I), e4m3),
                scales(1, n, I),
                torch.zeros(2 * LINE, dtype=torch.int32, device=d),
                empty((0 if self.rounds_h else n, I), torch.bfloat16),
                empty((n, H), torch.bfloat16),
            )
        return self._spaces[tokens, top_k]

    def _run(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, on_input: bool, plan: Plan8 | None) -> None:
        M, top_k = ids.shape
        p = plan or Plan8.of(
            M, Shape8(self.num_experts, top_k, self.hidden_size, self.intermediate_size), self.batch_invariant
        )
        s = self._space(M, top_k)
        q, scale = s.x, s.x_scale
        if p.listed:
            q, scale = self._prepare_listed(x, ids, s)
        else:
            self._prepare(x, ids, s, p.few is not None)
        try:
            self._products(q, scale, ids, weights, out, on_input, p, s)
        except BaseException:  # without `combine` nobody clears the tickets
            s.tickets.zero_()
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
        s: _Workspace,
    ) -> None:
        """Both GEMMs and the sum, of inputs that are rounded."""
        n, top_k = ids.numel(), ids.shape[1]
        h = s.h if self.rounds_h else s.wide
        later = p.few is None and not on_input  # router weights: by the sum of many tokens' results
        gemms = self._gemm(True, top_k, on_input), self._gemm(False, top_k, on_input or later)
        if p.few is not None:
            self._few(gemms[0], p.few[0], self._w13, q, scale, ids, weights, s, h, s.h_scale)
        else:
            self._multiply(gemms[0], p, self._w13, q, scale, weights, s, n, h, s.h_scale)
        if not self.rounds_h:
            R, B = self._round_tile(self.intermediate_size, 4)
            round_rows[(triton.cdiv(n, R),)](
                s.wide, s.h, s.h_scale, n, self.intermediate_size, False, False, R, B, num_warps=4, launch_pdl=True
            )
        y, parts = s.y, 1
        if p.few is not None:
            parts = p.few[1].Z
            y = self._parts(parts, n) if parts > 1 else s.y
            self._few(gemms[1], p.few[1], self._w2, s.h, s.h_scale, ids, weights, s, y, s.h_scale)
        else:
            self._multiply(gemms[1], p, self._w2, s.h, s.h_scale, weights, s, n, y, s.h_scale)
        add_up(y, ids, out, self.num_experts, parts, s.tickets if p.few is None else None, weights if later else None)

    def _round_tile(self, columns: int, warps: int) -> tuple[int, int]:
        """(rows, columns) that a program of so many warps rounds, 16 numbers a thread or more."""
        B = triton.next_power_of_2(columns)
        if self.grouped:
            B = min(1024, B)
        return max(1, 512 * warps // B), B

    def _prepare(self, x: Tensor, ids: Tensor, s: _Workspace, few: bool = False) -> None:
        """Routes grouped by expert, inputs rounded."""
        n, M, H, E = ids.numel(), x.shape[0], self.hidden_size, self.num_experts
        c = None if n <= FEW else Chunks.of(n, E)
        if c is not None:
            count(ids, s.chunks, c)
        R, B = self._round_tile(H, WARPS)
        groups = few_tile(n) if c is None else (c.size, c.rows)
        prepare[((E if c is None else c.number) + triton.cdiv(M, R) * triton.cdiv(H, B),)](
            ids, s.chunks, s.counts, s.lists, n, 0 if c is None else c.number, x, s.x, s.x_scale, M,
            E, 0 if c is None else c.padded, *groups, H, self.grouped, self.static, R, B, few, True,
            num_warps=WARPS, launch_pdl=True,
        )  # fmt: skip

    def _prepare_listed(self, x: Tensor, ids: Tensor, s: _Workspace) -> tuple[Tensor, Tensor]:
        """As _prepare, but the rounded inputs and their scales in the order of the list."""
        M, top_k, H = *ids.shape, self.hidden_size
        routes = s.lists.numel()
        if (routes, top_k) not in self._lists:
            groups = H // GROUP if self.grouped else 1
            scale = s.x_scale if self.static else torch.empty((routes, groups), device=self.device)
            places = torch.empty((routes,), dtype=torch.int32, device=self.device)
            # w2 writes y when w13 has read its inputs: they share the memory
            self._lists[routes, top_k] = s.y.view(torch.float8_e4m3fn).view(-1, H)[:routes], scale, places
        q, scale, places = self._lists[routes, top_k]
        group(ids, s.chunks, s.counts, s.lists, self.num_experts, places)
        warps = 8
        R, B = self._round_tile(H, warps)
        round_to_places[(triton.cdiv(M, R) * triton.cdiv(H, B),)](
            x, places, q, scale, M, top_k, H, self.grouped, self.static, R, B, True, num_warps=warps, launch_pdl=True
        )
        return q, scale

    def _parts(self, parts: int, routes: int) -> Tensor:
        """w2's results of each part of its columns, [parts * routes, H] f32."""
        key = (parts, triton.next_power_of_2(routes))
        if key not in self._partial:
            self._partial[key] = torch.empty((parts * key[1], self.hidden_size), device=self.device)
        return self._partial[key]

    def _few(
        self,
        gemm: Gemm8,
        p: Few8,
        m: _Matrix,
        x: Tensor,
        x_scale: Tensor,
        ids: Tensor,
        weights: Tensor,
        s: _Workspace,
        out: Tensor,
        out_scale: Tensor,
    ) -> None:
        n = ids.numel()
        by_route = n < self.num_experts
        t = tile_few(gemm, p, next(r for r in (64, 256, 1024) if n <= r), by_route)
        grid = (t.column_tiles * t.Z * (n if by_route else self.num_experts),)
        kernel: Any = w8a8_few
        kernel[grid](
            x, x_scale, m.codes, m.scales, m.bias, ids, s.lists, weights, out, out_scale, n, t,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip

    def _multiply(
        self,
        gemm: Gemm8,
        p: Plan8,
        m: _Matrix,
        x: Tensor,
        x_scale: Tensor,
        weights: Tensor,
        s: _Workspace,
        n: int,
        out: Tensor,
        out_scale: Tensor,
    ) -> None:
        t = tile8(gemm, p, True)
        key = x.data_ptr()
        if key not in self._descriptors:
            self._descriptors[key] = TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [TOKENS, GROUP], t.SA)
        blocks = min(n, n // TOKENS + min(self.num_experts, n))
        grid = (min(blocks * t.column_tiles, self.multiprocessors),)
        kernel: Any = w8a8
        kernel[grid](
            x,
            self._descriptors[key],
            x_scale,
            m.codes,
            m.scales,
            m.bias,
            s.counts,
            s.lists,
            weights,
            out,
            out_scale,
            s.tickets[0 if gemm.first else LINE :],
            t,
            num_warps=4,
            launch_pdl=True,
        )


settle(__name__)
