"""Backend `cpu`: the C++ kernel on blocked weights; layout in csrc/layout.h.

Activations meet int4, int8 and e2m1 weights as 16-bit fixed point with one power-of-two scale for at most 128 columns
(an error of 3e-5, below bf16's 2e-3), other weights as f32; sums are exact integers, or f32.  On matrix tiles (AMX,
from 12 rows an expert on) all but int8 weights meet bf16.  With compute dtype f32 everything is f32.  One packing
serves every instruction-set level.
"""

from __future__ import annotations

import ctypes as C
import os
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import activation_of, fields, pack_layer, require_version, unpack_layer
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Direct, Packed
from expertd_kernels.common.refused import Refused
from expertd_kernels.native import library as native
from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, Weights
from expertd_kernels.weights.scheme import ActivationQuant, Element, ScaleType, Scheme
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

# Why it is so: decision 164 in DECISIONS.md.
__all__ = ["CpuExperts", "experts", "pack", "pack_blocks", "unpack"]

LAYOUT_VERSION = 2
"""Version of the packed layout: a cache of another version is rebuilt."""

ROWS = 16
ELEMENTS = (Element.INT4, Element.INT8, Element.E4M3, Element.E2M1, Element.BF16, Element.F16, Element.F32)
SCALES = (ScaleType.NONE, ScaleType.F32, ScaleType.F16, ScaleType.BF16, ScaleType.E8M0, ScaleType.E4M3)
KINDS = (
    ActivationKind.SILU_AND_MUL,
    ActivationKind.GELU_AND_MUL,
    ActivationKind.GELU_TANH_AND_MUL,
    ActivationKind.SWIGLUOAI,
    ActivationKind.RELU2,
)
COMPUTE = {"bf16": 0, "f32": 1}
INT8 = {ActivationQuant.INT8_GROUP: 2, ActivationQuant.INT8_TOKEN: 4}
SUBNORMALS = {"": 0, "avoid": 1, "keep": 2}
"""What $EXPERTD_CPU_SUBNORMALS may say, for tests: see EXPERTD_SUBNORMALS_* in csrc/abi.h."""
COMPUTED = (torch.bfloat16, torch.float32)
"""Types of activations that the kernel reads and writes; others go through f32."""


def spec_of(scheme: Scheme, shape: tuple[int, int, int], segments: int) -> native.Spec:
    """The kernel's description of a matrix [E, N, K]."""
    return native.Spec(
        ELEMENTS.index(scheme.element),
        SCALES.index(scheme.scale),
        *shape,
        segments,
        scheme.rows,
        scheme.cols,
        scheme.zeros,
        scheme.global_scale,
    )


def stream_size(spec: native.Spec) -> tuple[int, int, int]:
    """(bytes, packed columns, blocks) of one expert.  Refused for a spec that the kernel does not know."""
    kp, blocks = C.c_int32(), C.c_int32()
    total: int = native.library().expertd_cpu_stream_bytes(C.byref(spec), C.byref(kp), C.byref(blocks))
    if not total:
        raise Refused(f"cpu: no layout for [{spec.experts}, {spec.n}, {spec.k}] in {spec.segments} segments")
    return total // int(spec.experts), kp.value, blocks.value


def _block_order(bias: Tensor, segments: int, blocks: int) -> Tensor:
    """[E, N] f32 -> [E, blocks * 16]: 16 rows of each segment in turn, padded with zeros."""
    E, N = bias.shape
    rows = blocks // segments * ROWS
    padded = torch.zeros(E, segments, rows)
    padded[:, :, : N // segments] = bias.view(E, segments, -1)
    return padded.view(E, segments, -1, ROWS).transpose(1, 2).reshape(E, -1).contiguous()


def _row_order(packed: Tensor, segments: int, n: int) -> Tensor:
    """The inverse of _block_order."""
    E = packed.shape[0]
    rows = packed.view(E, -1, segments, ROWS).transpose(1, 2).reshape(E, segments, -1)
    return rows[:, :, : n // segments].reshape(E, n).contiguous()


def _pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    spec = spec_of(q.scheme, q.shape, q.segments)
    expert_bytes, _, blocks = stream_size(spec)
    stream = native.allocate((q.num_experts, expert_bytes))
    parts = [None if t is None else t.cpu().contiguous() for t in (q.codes, q.scales, q.zeros)]
    source = native.Canonical(*(None if t is None else t.data_ptr() for t in parts))
    ctx = native.context().here
    ctx.check(
        native.library().expertd_cpu_pack(ctx.handle, C.byref(spec), C.byref(source), stream.data_ptr()), "packing"
    )
    out = {"stream": stream}
    if q.bias is not None:
        out["bias"] = _block_order(q.bias.cpu(), q.segments, blocks)
    # global_exact is not computed with: it is carried so that unpack gives the checkpoint's own bits.
    for name, t in (("global_scales", q.global_scales), ("columns", q.columns), ("global_exact", q.global_exact)):
        if t is not None:
            out[name] = t.cpu().contiguous()
    return out, matrix_to_json(q)


def _unpack_matrix(tensors: dict[str, Tensor], meta: dict[str, Any]) -> QuantTensor:
    scheme, (E, N, K), segments = scheme_from_json(meta["scheme"]), meta["shape"], meta["segments"]
    spec = spec_of(scheme, (E, N, K), segments)
    codes = torch.empty(E, N, -(-K // 2) if scheme.element.packed else K, dtype=CODE_DTYPE[scheme.element])
    scale_shape = (E, *scheme.scale_shape(N, K, segments))
    scales = torch.empty(scale_shape, dtype=SCALE_DTYPE[scheme.scale]) if scheme.element.quantized else None
    zeros = torch.empty(scale_shape, dtype=CODE_DTYPE[scheme.element]) if scheme.zeros else None
    ctx = native.context()
    pointers = [None if t is None else t.data_ptr() for t in (codes, scales, zeros)]
    stream = tensors["stream"].contiguous()
    ctx.check(native.library().expertd_cpu_unpack(ctx.handle, C.byref(spec), stream.data_ptr(), *pointers), "unpacking")
    bias = tensors.get("bias")
    return QuantTensor(
        scheme,
        (E, N, K),
        codes,
        scales,
        zeros,
        tensors.get("global_scales"),
        tensors.get("columns"),
        None if bias is None else _row_order(bias, segments, N),
        segments,
        tensors.get("global_exact"),
    )


def pack(weights: Weights, problem: Problem) -> Packed:
    """As pack_blocks."""
    quant = problem.activation_quant
    assert quant is ActivationQuant.NONE, f"{quant.value} is not the row's"
    return pack_blocks("cpu", weights)


def pack_blocks(backend: str, weights: Weights) -> Packed:
    """Canonical -> 16-row blocks, each one contiguous run: the layout of `cpu` and `cpu_w4a8`."""
    return pack_layer(backend, LAYOUT_VERSION, weights.to("cpu"), lambda _, q: _pack_matrix(q))


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, _unpack_matrix)


def _column_map(scheme: Scheme, shape: tuple[int, int, int], kp: int, columns: Tensor | None) -> Tensor | None:
    """[E, kp] int32: input column of each packed column, -1 where a group is padded; None where that is 0..K-1."""
    E, _, K = shape
    group = min(scheme.cols, K) if scheme.element.quantized and scheme.cols else K
    padded = group < K and group % 8 != 0
    if columns is None and not padded:
        return None
    source = torch.arange(K, dtype=torch.int32).expand(E, K) if columns is None else columns
    k = torch.arange(K)
    at = k // group * (-(-group // 8) * 8) + k % group if padded else k
    out = torch.full((E, kp), -1, dtype=torch.int32)
    out[:, at] = source
    return out


def _takes(out: Tensor, M: int, H: int) -> bool:
    """Whether the kernel can write to it."""
    return out.dtype in COMPUTED and out.is_contiguous() and out.shape == (M, H)


class CpuExperts:
    """A layer's experts on the CPU kernel.  The library runs one call of a context at a time; others wait."""

    def __init__(
        self, packed: Packed, problem: Problem, context: native.Context | None = None, backend: str = "cpu"
    ) -> None:
        self.backend = backend
        self.packed = packed
        self.context = context or native.context()
        self.hidden_size: int = packed.meta["w2"]["shape"][1]
        self._kept: list[Tensor] = []
        activation: Activation = activation_of(packed)
        self._layer = native.Layer(
            self._matrix("w13"),
            self._matrix("w2"),
            KINDS.index(activation.kind),
            activation.limit is not None,
            activation.alpha,
            activation.beta,
            activation.limit or 0.0,
            INT8.get(problem.activation_quant, COMPUTE[problem.compute_dtype]),
            problem.batch_invariant,
            SUBNORMALS[os.environ.get("EXPERTD_CPU_SUBNORMALS", "")],
        )
        self._reference = C.byref(self._layer)
        self._forward = native.library().expertd_cpu_forward

    def _matrix(self, name: str) -> native.Matrix:
        meta, parts = self.packed.meta[name], fields(self.packed, name)
        scheme, shape = scheme_from_json(meta["scheme"]), tuple(meta["shape"])
        spec = spec_of(scheme, shape, meta["segments"])
        expert_bytes, kp, _ = stream_size(spec)
        stream = parts["stream"]
        if tuple(stream.shape) != (shape[0], expert_bytes) or not stream.is_contiguous():
            raise ValueError(
                f"cpu: {name} stream is {tuple(stream.shape)}, want contiguous ({shape[0]}, {expert_bytes}):"
                " packed by another version; pack again"
            )
        columns = _column_map(scheme, shape, kp, parts.get("columns"))
        tensors = [stream, parts.get("bias"), parts.get("global_scales"), columns]
        self._kept += [t for t in tensors if t is not None]
        return native.Matrix(spec, *(None if t is None else t.data_ptr() for t in tensors))

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See protocol.Experts.  ValueError for shapes that do not fit and for ids outside -1..E-1."""
        x, ids, weights = hidden_states, topk_ids, topk_weights
        M, H = x.shape
        _, k = shape = ids.shape
        if self.hidden_size != H or weights.shape != shape or shape[0] != M:
            raise ValueError(
                f"cpu: hidden_states {tuple(x.shape)}, topk_ids {tuple(shape)}, topk_weights {tuple(weights.shape)}:"
                f" want [M, {self.hidden_size}] and twice [M, k]"
            )
        # Each attribute of a tensor that is asked for costs microseconds where the weights have emptied the caches.
        dtype = x.dtype
        if dtype not in COMPUTED:
            x = x.float()
        row = H
        if not x.is_contiguous():
            row, column = x.stride()
            if column != 1:
                x, row = x.contiguous(), H
        if k == 0 or M == 0:
            return torch.zeros((M, H), dtype=dtype) if out is None else out.zero_()
        if ids.dtype is not torch.int32 or not ids.is_contiguous():
            ids = ids.to(torch.int32).contiguous()
        if weights.dtype is not torch.float32 or not weights.is_contiguous():
            weights = weights.float().contiguous()
        fresh = out if out is not None and _takes(out, M, H) else torch.empty((M, H), dtype=x.dtype)
        call = native.call_bytes(
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            fresh.data_ptr(),
            M,
            max(row, H),
            k,
            x.dtype is torch.float32,
            fresh.dtype is torch.float32,
            router_weight_on_input,
        )
        context = self.context.here
        error = self._forward(context.handle, self._reference, call)
        context.check(error, f"{M} tokens with ids in {int(ids.min())}..{int(ids.max())}" if error else "")
        if out is None:
            return fresh if x is hidden_states else fresh.to(dtype)
        return out if out is fresh else out.copy_(fresh)

    def direct(self) -> Direct:
        """See protocol.DirectExperts."""
        function = C.cast(self._forward, C.c_void_p).value
        assert function is not None
        assert self.context.handle.value is not None
        return Direct(function, self.context.handle.value, C.addressof(self._layer))


def experts(packed: Packed, problem: Problem) -> CpuExperts:
    """Ready to compute, from the packed tensors where they are.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    return CpuExperts(packed, problem)
