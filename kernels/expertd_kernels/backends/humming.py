"""Backend `humming`: weight-only grouped GEMMs of the package humming-kernels, compiled at first use.

Packed is the package's own input form, which its layer turns into a kernel's order on the device:

    weight        int32 [E, N, K * bits / 32], codes side by side along K, low bits first; integers as unsigned codes
    weight_scale  [E, N, K / g], [E, N, 1] (channel) or [E, N / 128, K / 128]: bf16, e8m0, or f32 for 128 x 128 blocks
    zero_point    int32 [E, N * bits / 32, K / g], side by side along N
    bias          bf16 [E, N]

A layer is two of its GEMMs between the kernels of glue.py.  Few rows an expert: the package's "indexed" GEMM, which
reads the tokens' rows and writes the routes' by a table of blocks; many: its "grouped_contiguous" GEMM on rows that are
sorted by expert.  Kernels are compiled for the batch sizes in use, by powers of two of the tokens, at the first call of
each; the package keeps them on disk (HUMMING_CACHE_DIR).
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import activation_of, fields, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.glue import Glue, Places, in_pieces
from expertd_kernels.backends.glue_space import between
from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import SCALE_DTYPE, QuantTensor, Weights, pack_nibbles, unpack_nibbles
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, ScaleType
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["HummingExperts", "experts", "pack", "unpack"]

LAYOUT_VERSION = 2

DTYPE = {Element.INT4: "uint4", Element.INT8: "uint8", Element.E2M1: "float4e2m1", Element.E4M3: "float8e4m3"}
"""Names in the package's dtypes."""

GROUPED_FROM = 96
"""Rows an expert from which sorted rows are faster than the table.  On an H200 the table was faster at 64 (DeepSeek's
64 experts at 512 tokens), sorted rows at 128 (Qwen3 at 2048 tokens, Mixtral at 512)."""

OUTPUT_MULTIPLE = 128
"""A tile of Hopper's matrix instructions is four warps of 32 columns wide; the package pads outputs to it by itself."""

Prepare = Callable[[str, str, str, torch.device], object]
"""prepare(layer, compute and tuning configuration as JSON, device): compiles a kernel."""


def _config(q: QuantTensor) -> dict[str, Any]:
    """The package's weight schema for a matrix."""
    s = q.scheme
    assert q.columns is None, "activation order is not the row's"
    assert q.global_scales is None, "second-level scales are not the row's"
    out: dict[str, Any] = {"quant_method": "humming", "dtype": DTYPE[s.element], "has_zero_point": s.zeros}
    if s.rows == 1:
        out["group_size"] = 0 if s.cols == WHOLE else s.cols
        if s.scale is ScaleType.E8M0:
            return out | {"scale_dtype": "float8e8m0"}
        assert s.element.integer, f"{s.name} is not the row's"
        return out
    assert (s.element, s.rows, s.cols) == (Element.E4M3, 128, 128), f"{s.name} is not the row's"
    return out | {"group_size": 128, "group_size_n": 128}


def _bf16(t: Tensor, name: str, out: dict[str, Tensor]) -> Tensor:
    """`t` as the kernel reads it; what bf16 does not hold exactly is kept beside it for unpack."""
    rounded = t.to(torch.bfloat16)
    if not torch.equal(rounded.to(t.dtype), t):
        out[f"exact_{name}"] = t.contiguous()
    return rounded


def _unsigned(t: Tensor, element: Element) -> Tensor:
    """int8 plus 128 as u8, other codes as their bytes; its own inverse on bytes."""
    return t.view(torch.uint8) ^ 0x80 if element is Element.INT8 else t.view(torch.uint8)


def _pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    s, (_, N, K) = q.scheme, q.shape
    config = _config(q)
    group = s.cols or K
    assert K % group == K % 32 == N % 32 == N // q.segments % s.rows == 0, f"[{N}, {K}] is cut: not the row's"
    assert q.scales is not None
    out: dict[str, Tensor] = {}
    out["weight"] = _unsigned(q.codes.contiguous(), s.element).view(torch.int32)
    if s.rows != 1:
        out["weight_scale"] = as_f32(q.scales, s.scale)
    else:
        out["weight_scale"] = q.scales if s.scale is ScaleType.E8M0 else _bf16(q.scales, "weight_scale", out)
    if q.zeros is not None:
        fields = _unsigned(q.zeros.contiguous(), s.element).transpose(1, 2)
        fields = pack_nibbles(fields) if s.element is Element.INT4 else fields
        words = fields.reshape(-1).view(torch.int32)
        out["zero_point"] = words.view(*fields.shape[:2], -1).transpose(1, 2)
    if q.bias is not None:
        out["bias"] = _bf16(q.bias, "bias", out)
    meta = {**matrix_to_json(q), "config": config}
    return {name: t.contiguous().clone() if t is q.scales else t.contiguous() for name, t in out.items()}, meta


def _unpack_matrix(t: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    scheme, (E, N, K) = scheme_from_json(meta["scheme"]), meta["shape"]
    codes = t["weight"].view(torch.uint8)
    codes = _unsigned(codes, scheme.element)
    if scheme.element in (Element.INT8, Element.E4M3):
        codes = codes.view(torch.int8 if scheme.element is Element.INT8 else torch.float8_e4m3fn)
    zeros = None
    if "zero_point" in t:
        words = t["zero_point"].transpose(1, 2)
        fields = words.reshape(-1).view(torch.uint8).view(*words.shape[:2], -1)
        fields = unpack_nibbles(fields, N) if scheme.element is Element.INT4 else fields
        zeros = _unsigned(fields.transpose(1, 2).contiguous(), scheme.element)
        zeros = zeros.view(torch.int8) if scheme.element is Element.INT8 else zeros
    scales = t.get("exact_weight_scale", t["weight_scale"])
    scales = as_stored(scales, scheme.scale) if scheme.rows != 1 else scales.to(SCALE_DTYPE[scheme.scale])
    bias = t.get("exact_bias", t.get("bias"))
    return QuantTensor(
        scheme,
        (E, N, K),
        codes,
        scales,
        zeros,
        bias=None if bias is None else bias.float(),
        segments=meta["segments"],
    )


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the package's input form, on the weights' device."""
    assert problem.activation_quant is ActivationQuant.NONE, "rounded activations are not the row's"
    for q in (weights.w13, weights.w2):
        assert q.scheme.element in DTYPE, f"{q.scheme.name} is not the row's"
    return pack_layer("humming", LAYOUT_VERSION, weights, lambda _, q: _pack_matrix(q))


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, _unpack_matrix)


def experts(packed: Packed, problem: Problem) -> HummingExperts:
    """Ready to compute on the current CUDA device.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    # Its wheel has what it would build in two more processes at its import.
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    prepare = importlib.import_module("humming.kernel.humming").HummingKernel.prepare_kernels
    device = torch.device("cuda", torch.cuda.current_device())
    return HummingExperts(packed, importlib.import_module("humming.layer"), device, prepare)


@dataclass(frozen=True)
class _HummingPlan:
    """How a batch size is computed.  tuning: of w13 and w2, as JSON; block: rows of a block of each."""

    grouped: bool
    compute: str
    tuning: tuple[str, str]
    block: tuple[int, int]


class HummingExperts:
    """One layer.  vendor: the module humming.layer; device: where its layers go and transform themselves."""

    backend = "humming"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device, prepare: Prepare) -> None:
        self.activation = activation_of(packed)
        self.num_experts, self.width, self.hidden = packed.meta["w13"]["shape"]
        self.intermediate = packed.meta["w2"]["shape"][2]
        self.vendor, self.device, self.prepare = vendor, device, prepare
        self.w13, self.w2 = (self._layer(packed, name, vendor, device) for name in ("w13", "w2"))
        self.plans: dict[tuple[int, int], _HummingPlan] = {}

    @staticmethod
    def _layer(packed: Packed, name: str, vendor: Any, device: torch.device) -> Any:
        """The package's layer with its weights in its kernels' order."""
        facts, tensors = packed.meta[name], fields(packed, name)
        E, N, K = facts["shape"]
        layer = vendor.HummingLayer(
            shape_n=N,
            shape_k=K,
            weight_config=dict(facts["config"]),
            num_experts=E,
            pad_n_to_multiple=OUTPUT_MULTIPLE,
            has_bias="bias" in tensors,
            torch_dtype=torch.bfloat16,
        )
        given = {field: t for field, t in tensors.items() if not field.startswith("exact_")}
        if facts["config"].get("scale_dtype") == "float8e8m0":
            given["weight_scale"] = given["weight_scale"].view(torch.float8_e8m0fnu)
        layer.load_from_tensors(given)
        layer = layer.to(device)
        layer.transform()
        return layer

    def plan(self, tokens: int, top_k: int) -> _HummingPlan:
        """The package's own choice of kernels for the next power of two of `tokens`, compiled."""
        tokens = 1 << (tokens - 1).bit_length()
        if (tokens, top_k) not in self.plans:
            routes = tokens * top_k
            grouped = routes >= GROUPED_FROM * self.num_experts
            kind = "grouped_contiguous" if grouped else "indexed"
            compute = json.dumps({"gemm_type": kind})
            chosen = [
                self.vendor.get_heuristics_config(m.humming_config, routes, gemm_type=kind, device=self.device)
                for m in (self.w13, self.w2)
            ]
            first, second = (json.dumps(c) for c in chosen)
            with ThreadPoolExecutor(2) as pool:
                todo = [
                    pool.submit(self.prepare, m.humming_config.to_str(), compute, tuning, self.device)
                    for m, tuning in ((self.w13, first), (self.w2, second))
                ]
                for each in todo:
                    each.result()
            blocks = tuple(int(c["block_shape"][0]) for c in chosen)
            self.plans[tokens, top_k] = _HummingPlan(grouped, compute, (first, second), (blocks[0], blocks[1]))
        return self.plans[tokens, top_k]

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
        given = (hidden_states, topk_ids, topk_weights, router_weight_on_input, out)
        return in_pieces(self._compute, *given, width=max(self.width, self.hidden))

    def _compute(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, weighted: bool) -> None:
        plan, routes = self.plan(*ids.shape), ids.numel()
        shapes = between(routes, self.width, self.intermediate, self.hidden, plan.grouped)
        if plan.grouped:
            glue = Glue(x, ids, weights, self.num_experts, shapes, 1)
            self._sorted(glue, plan, out, weighted)
        else:
            glue = Glue(x, ids, weights, self.num_experts, shapes, *plan.block)
            self._indexed(glue, plan, out, weighted)

    def _sorted(self, glue: Glue, plan: _HummingPlan, out: Tensor, weighted: bool) -> None:
        x, h, a, y = (glue.parts[name] for name in "xhay")
        places = glue.place(1)
        common = {"expert_layout": places.start, "valid_shape_m": glue.routes, "compute_config": plan.compute}
        glue.gather(places, x)
        self.w13(x, outputs=h, tuning_config=plan.tuning[0], **common)
        glue.activate(h, a, self.activation, places)
        self.w2(a, outputs=y, tuning_config=plan.tuning[1], **common)
        glue.combine(y, out, weighted, places)

    def _indexed(self, glue: Glue, plan: _HummingPlan, out: Tensor, weighted: bool) -> None:
        h, a, y = (glue.parts[name] for name in "hay")

        def table(p: Places) -> dict[str, Any]:
            by = {"sorted_ids": p.route, "expert_ids": p.block, "num_tokens_padded": p.end}
            return {**by, "valid_shape_m": glue.routes, "compute_config": plan.compute}

        first, second = plan.block
        places = glue.place(first, routes=True, blocks=True)
        self.w13(glue.x, outputs=h, top_k=glue.top_k, tuning_config=plan.tuning[0], **table(places))
        glue.activate(h, a, self.activation)
        if second != first:
            places = glue.place(second, routes=True, blocks=True)
        self.w2(a, outputs=y, top_k=1, tuning_config=plan.tuning[1], **table(places))
        glue.combine(y, out, weighted)
