"""The layer on the GPU: scratch memory, launches.  Needs a Hopper GPU, torch with CUDA and Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from expertd_kernels.backends.gluon.shared.calls import InPieces
from expertd_kernels.backends.gluon.shared.gpu import Gpu, current_gpu
from expertd_kernels.backends.gluon.shared.grouping import FEW, LINE
from expertd_kernels.backends.gluon.shared.launches import add_up, group
from expertd_kernels.backends.gluon.shared.routing import table_routes
from expertd_kernels.backends.gluon.shared.space import FLOAT32_TOKENS, LISTED_ROWS, layer_space, tokens_of
from expertd_kernels.backends.gluon.shared.triton_versions import launch, start
from expertd_kernels.backends.gluon.weight_only.block import block
from expertd_kernels.backends.gluon.weight_only.codec import codec_of
from expertd_kernels.backends.gluon.weight_only.constants import Tile, tile
from expertd_kernels.backends.gluon.weight_only.gemv import gemv
from expertd_kernels.backends.gluon.weight_only.gemv_constants import slices
from expertd_kernels.backends.gluon.weight_only.matrix import Matrix, gemms
from expertd_kernels.backends.gluon.weight_only.packed_matrix import TILE, round_up
from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan
from expertd_kernels.backends.gluon.weight_only.planning import Plans
from expertd_kernels.backends.gluon.weight_only.wide import wide
from expertd_kernels.backends.gluon.weight_only.ws import both, ws
from expertd_kernels.backends.kernel_keys import settle
from expertd_kernels.backends.scratch import COUNTERS, scratch_of, settle_counters
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.serial import scheme_from_json

__all__ = ["GluonExperts"]

LIST_BLOCKS = True
"""Whether blocks of many routes are listed where routes are placed, or counted by each CTA (for comparisons)."""


@dataclass(frozen=True)
class _Routes:
    """A call's routes, grouped.  mode, words, listed, tabled: as Tile's; number: of all; blocks: of them, 0: as many
    as the plan's rows make at most; table, lists: what the kernels read."""

    mode: str
    number: int
    blocks: int
    table: Tensor
    lists: Tensor
    words: int = 0
    listed: bool = False
    tabled: bool = False


class GluonExperts(InPieces):
    """The layer's experts."""

    backend = "gluon_sm90"

    def __init__(self, packed: Packed, problem: Problem, plans: Plans | None = None, gpu: Gpu | None = None) -> None:
        """plans: None = the tuned ones and the rules; gpu: None = the current one."""
        gpu = gpu or current_gpu()
        self.device, self.multiprocessors = gpu.device, gpu.multiprocessors
        self.top_k = problem.top_k
        self.num_experts, self.hidden_size, self.intermediate_size = packed.meta["w2"]["shape"]
        # not the originals of rounded scales, which only `unpack` reads
        tensors = {k: t.to(self.device) for k, t in packed.tensors.items() if not k.endswith("exact_scales")}
        self._packed = replace(packed, tensors=tensors)
        self._matrices: dict[tuple[int, bool], tuple[Matrix, Matrix]] = {}
        self._descriptors: dict[tuple[int, int, int], TensorDescriptor] = {}
        settle_counters(self.device)
        w13, w2 = (codec_of(scheme_from_json(packed.meta[name]["scheme"])) for name in ("w13", "w2"))
        shape = (self.num_experts, self.top_k, self.hidden_size, self.intermediate_size)
        self.plans = plans or Plans.for_layer(
            gpu.name, gpu.multiprocessors, w13, w2, shape, invariant=problem.batch_invariant
        )
        self._float32_tokens = 0 if problem.batch_invariant else FLOAT32_TOKENS

    def _pair(self, top_k: int, weight_on_input: bool) -> tuple[Matrix, Matrix]:
        key = (top_k, weight_on_input)
        if key not in self._matrices:
            t, found = self._packed.tensors, []
            for name, gemm in zip(("w13", "w2"), gemms(self._packed, *key), strict=True):
                codes = t[f"{name}.codes"]
                shift = self._packed.meta[name]["shift"]
                nothing = torch.zeros(64, dtype=torch.bfloat16, device=self.device)
                found.append(
                    Matrix(
                        gemm,
                        codes,
                        t.get(f"{name}.scales", nothing),
                        t.get(f"{name}.bias", nothing.float()),
                        2.0**shift,
                    )
                )
            self._matrices[key] = (found[0], found[1])
        return self._matrices[key]

    def _run(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, on_input: bool, plan: LayerPlan | None
    ) -> None:
        M, top_k = ids.shape
        n, E = M * top_k, self.num_experts
        p = plan or self.plans.at(M)
        w13, w2 = self._pair(top_k, on_input)
        sizes = self.num_experts, self.hidden_size, self.intermediate_size
        s = scratch_of(self.device).kept_parts(layer_space(*sizes, tokens_of(M), top_k))
        h, done = s["h"], s["done"]
        if p.w13.kernel == "gemv":
            self._gemv(w13, p.w13, x, ids, weights, h, n)
            self._gemv(w2, p.w2, h, ids, weights, out, M)
            return
        y = s["y"].view(torch.float32) if self._float32_tokens >= M and p.w2.kernel == "block" else s["y"]
        if p.w2.parts * n * self.hidden_size > y.numel():
            raise ValueError(f"gluon_sm90: {p.w2.parts} parts of {n} routes do not fit the scratch of {M} tokens")
        r = self._group(p, ids, s)
        tickets = not {"wide", "ws"}.isdisjoint((p.w13.kernel, p.w2.kernel))
        room = COUNTERS - (LINE if tickets else 0)
        follows = p.w2.follows and self._blocks(n, p.w2.rows) <= room
        counted = triton.cdiv(w13.gemm.rows, p.w13.tiles) if follows and not tickets else 0
        try:
            if follows and tickets and w13.gemm.codec == w2.gemm.codec:
                self._both((w13, w2), p.w13, x, h, r, weights, done, y)
                add_up(y, ids, out, E, done=done)
                return
            self._gemm(w13, p.w13, r, x, weights, h, done, counted)
            self._gemm(w2, p.w2, r, h, weights, y, s["tickets" if tickets else "done"], counted)
            add_up(y, ids, out, E, p.w2.parts, done if counted or tickets else None)
        except BaseException:  # without `combine` nobody clears the counters
            done.zero_()
            raise

    def _group(self, p: LayerPlan, ids: Tensor, s: Mapping[str, Tensor]) -> _Routes:
        """The routes of ids [M, k], grouped as the plan's kernels want them."""
        M, n, E = ids.shape[0], ids.numel(), self.num_experts
        split = round_up(2 * n + E, 16)
        table, lists = s["ints"][:split], s["ints"][split:]
        if p.mode == "ids":
            words = triton.next_power_of_2(triton.cdiv(n, 32)) if M > 1 else 0
            if words > 4:
                raise ValueError(f"gluon_sm90: mode ids takes up to 128 routes, these are {n}")
            return _Routes("ids", n, n, ids, ids, words)
        if p.mode == "table":
            blocks = self._blocks(n, p.w13.rows)
            start(
                table_routes, (E,), ids, table, lists, n, E, triton.next_power_of_2(E),
                triton.next_power_of_2(blocks), p.w13.rows, max(32, triton.next_power_of_2(n)), True, **launch(4),
            )  # fmt: skip
            return _Routes("table", n, blocks, table, lists)
        both = (p.w13, p.w2)
        alike = len({(t.rows, t.stretch) for t in both}) == 1 and "wide" not in (p.w13.kernel, p.w2.kernel)
        tabled = LIST_BLOCKS and n > FEW and alike and p.w13.rows >= LISTED_ROWS
        blocks_list = (s["blocks"], p.w13.rows, p.w13.stretch) if tabled else None
        group(ids, s["chunks"], table, lists, E, blocks=blocks_list)
        listed = p.w13.kernel == p.w2.kernel == "wide"
        return _Routes("lists", n, 0, s["blocks"] if tabled else table, lists, listed=listed, tabled=tabled)

    def _gemv(self, m: Matrix, p: TilePlan, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, b: int) -> None:
        """Kernel gemv for b routes (w13) or tokens (w2)."""
        c = slices(m.gemm, p)
        if p.even:
            c = slices(m.gemm, p, triton.cdiv(b * c.tiles, self.multiprocessors))
        codes = m.codes if m.gemm.codec.planes else m.codes.view(torch.bfloat16)
        scales = m.scales
        if m.gemm.codec.e8m0:
            scales = scales.view(-1).view(torch.int16 if c.scale_bits == 16 else torch.int32)
        start(
            gemv,
            (b * c.tiles,),
            x,
            codes,
            scales,
            m.bias,
            ids,
            weights,
            out,
            m.unscale,
            c,
            **launch(p.warps, p.registers),
        )

    def _blocks(self, n: int, rows: int) -> int:
        """Blocks of up to so many rows that n routes make at most."""
        blocks: int = min(n, n // rows + min(self.num_experts, n))
        return blocks

    def _gemm(
        self, m: Matrix, p: TilePlan, r: _Routes, x: Tensor, weights: Tensor, out: Tensor, done: Tensor, counted: int
    ) -> None:
        t = tile(m.gemm, p, r.mode, True, r.words, r.listed, counted, r.tabled)
        d = self._descriptor(m, t)
        tiles = (r.blocks or self._blocks(r.number, p.rows)) * t.column_tiles * t.Z
        grid = (tiles if p.kernel == "block" else min(tiles, self.multiprocessors * p.ctas),)
        options = launch(p.warps, p.registers)
        if p.kernel == "wide":
            h = self._boxes(out if m.gemm.first else x, t)
            start(wide, grid, x, h, d, m.bias, r.table, r.lists, weights, done, out, t, **options)
            return
        results = (done, out) if p.kernel == "ws" else (out, done)
        args = (x, d, m.scales, m.bias, r.table, r.lists, weights, *results, m.unscale, r.number, t)
        start(ws if p.kernel == "ws" else block, grid, *args, **options)

    def _descriptor(self, m: Matrix, t: Tile) -> TensorDescriptor:
        key = (id(m), t.T, t.stage_units)
        if key not in self._descriptors:
            self._descriptors[key] = m.descriptor(t)
        return self._descriptors[key]

    def _both(
        self, pair: tuple[Matrix, Matrix], p: TilePlan, x: Tensor, h: Tensor, r: _Routes, weights: Tensor,
        tickets: Tensor, y: Tensor,
    ) -> None:  # fmt: skip
        """Kernel ws for both GEMMs in one launch."""
        m, m2 = pair
        t, t2 = (tile(a.gemm, p, "lists", True, tabled=r.tabled) for a in pair)
        tiles = self._blocks(r.number, p.rows) * (t.column_tiles + t2.column_tiles)
        start(
            both, (min(tiles, self.multiprocessors * p.ctas),),
            x, self._descriptor(m, t), m.scales, m.bias, h, self._descriptor(m2, t2), m2.scales, m2.bias,
            r.table, r.lists, weights, tickets, y, m.unscale, m2.unscale, r.number, t, t2,
            **launch(p.warps, p.registers),
        )  # fmt: skip

    def _boxes(self, h: Tensor, t: Tile) -> TensorDescriptor:
        """The bulk copy's view of the intermediate: 64 rows and a stage a box."""
        key = (h.data_ptr(), h.numel(), 0)  # layouts of many sizes begin at one address
        if key not in self._descriptors:
            Ip = round_up(self.intermediate_size, TILE)
            self._descriptors[key] = TensorDescriptor(h, [h.numel() // Ip, Ip], [Ip, 1], [64, 64], t.SX)
        return self._descriptors[key]


settle(__name__)
