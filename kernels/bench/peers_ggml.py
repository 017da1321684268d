"""ggml's CPU kernels as a peer: three `mul_mat_id` of a layer, weights in the layout that ggml repacks them to.

Through ctypes on the shared objects of the package `libggml-python`.  int4 in groups that are multiples of 32 becomes
q4_0 (one f16 scale for 32 weights), mxfp4 is ggml's own.  ggml rounds activations to 8 bits in groups of 32.
"""

from __future__ import annotations

import ctypes as C
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.bench.prepared import Prepared
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.canonical import QuantTensor, Weights, unpack_nibbles
from expertd_kernels.weights.scheme import Element, ScaleType

__all__ = ["PACKAGE", "ggml_layer"]

PACKAGE = "libggml-python"
F32, Q4_0, I32, MXFP4 = 0, 2, 26, 39
"""enum ggml_type."""

BLOCK = 32
CPU_DEVICE = 0
"""enum ggml_backend_dev_type."""

_INTEGERS: dict[str, list[type]] = {
    "ggml_new_tensor_1d": [C.c_int, C.c_int64],
    "ggml_new_tensor_2d": [C.c_int, C.c_int64, C.c_int64],
    "ggml_new_tensor_3d": [C.c_int, C.c_int64, C.c_int64, C.c_int64],
    "ggml_view_2d": [C.c_void_p, C.c_int64, C.c_int64, C.c_size_t, C.c_size_t],
    "ggml_swiglu_oai": [C.c_void_p, C.c_void_p, C.c_float, C.c_float],
    "ggml_mul_mat_id": [C.c_void_p] * 3,
    "ggml_add_id": [C.c_void_p] * 3,
    "ggml_swiglu_split": [C.c_void_p] * 2,
    "ggml_mul": [C.c_void_p] * 2,
    "ggml_add": [C.c_void_p] * 2,
    "ggml_cont": [C.c_void_p],
    "ggml_new_graph": [],
}
"""Functions that take a context and these, and give a pointer."""


class _Init(C.Structure):
    """struct ggml_init_params."""

    _fields_ = [("size", C.c_size_t), ("memory", C.c_void_p), ("no_alloc", C.c_bool)]


class _Ggml:
    """The two libraries, with argument types."""

    def __init__(self, folder: Path) -> None:
        self.base = C.CDLL(str(folder / "libggml-base.so"), mode=C.RTLD_GLOBAL)
        self.cpu = C.CDLL(str(folder / "libggml-cpu.so"), mode=C.RTLD_GLOBAL)
        for name, rest in _INTEGERS.items():
            self._declare(self.base, name, C.c_void_p, [C.c_void_p, *rest])
        p = C.c_void_p
        for name, result, arguments in (
            ("ggml_init", p, [_Init]),
            ("ggml_backend_alloc_ctx_tensors_from_buft", p, [p, p]),
            ("ggml_backend_get_default_buffer_type", p, [p]),
            ("ggml_backend_reg_get_proc_address", p, [p, C.c_char_p]),
            ("ggml_backend_reg_dev_get", p, [p, C.c_size_t]),
            ("ggml_gallocr_new", p, [p]),
            ("ggml_gallocr_alloc_graph", C.c_bool, [p, p]),
            ("ggml_build_forward_expand", None, [p, p]),
            ("ggml_backend_graph_compute", C.c_int, [p, p]),
            ("ggml_backend_tensor_set", None, [p, p, C.c_size_t, C.c_size_t]),
            ("ggml_backend_tensor_get", None, [p, p, C.c_size_t, C.c_size_t]),
            ("ggml_set_input", None, [p]),
            ("ggml_set_output", None, [p]),
        ):
            self._declare(self.base, name, result, arguments)
        self._declare(self.cpu, "ggml_backend_cpu_init", p, [])
        self._declare(self.cpu, "ggml_backend_cpu_reg", p, [])
        self._declare(self.cpu, "ggml_backend_cpu_set_n_threads", None, [p, C.c_int])

    @staticmethod
    def _declare(library: C.CDLL, name: str, result: Any, arguments: list[Any]) -> None:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

    def context(self, tensors: int) -> int:
        """A context for the descriptions of some tensors; 1 KiB for each is plenty."""
        made: int = self.base.ggml_init(_Init((tensors + 64) * 1024 + (1 << 20), None, True))
        return made

    def op(self, name: str, *arguments: Any) -> int:
        made = getattr(self.base, name)(*arguments)
        if not made:
            raise RuntimeError(f"ggml: {name} failed")
        return int(made)

    def repacked(self) -> list[int]:
        """Buffer types that repack weights for this processor, best first."""
        reg = self.cpu.ggml_backend_cpu_reg()
        found = self.base.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
        if not found:
            return []
        types = C.CFUNCTYPE(C.POINTER(C.c_void_p), C.c_void_p)(found)(self.base.ggml_backend_reg_dev_get(reg, 0))
        out: list[int] = []
        while types and (one := types[len(out)]):
            out.append(one)
        return out

    def put(self, tensor: int, data: Tensor) -> None:
        data = data.contiguous()
        self.base.ggml_backend_tensor_set(tensor, data.data_ptr(), 0, data.numel() * data.element_size())


def _blocks(q: QuantTensor) -> Tensor:
    """[E, N, K/32, 18 or 17] u8: a scale, then 16 bytes, each with columns i (low) and i + 16."""
    E, N, K = q.shape
    assert q.scales is not None
    codes = unpack_nibbles(q.codes, K).view(E, N, K // BLOCK, 2, BLOCK // 2)
    nibbles = codes[..., 0, :] | codes[..., 1, :] << 4
    if q.scheme.element is Element.E2M1:
        return torch.cat((q.scales.view(E, N, -1, 1), nibbles), dim=-1)
    group = q.scheme.cols or K
    scales = q.scales.float().half().repeat_interleave(group // BLOCK, dim=2).contiguous()
    return torch.cat((scales.view(torch.uint8).view(E, N, -1, 2), nibbles), dim=-1)


def _refusal(weights: Weights) -> str:
    for q in (weights.w13, weights.w2):
        s = q.scheme
        int4 = s.element is Element.INT4 and not s.zeros and s.rows == 1 and (s.cols or q.shape[2]) % BLOCK == 0
        mxfp4 = s.element is Element.E2M1 and s.scale is ScaleType.E8M0
        if not (int4 or mxfp4) or q.columns is not None or q.shape[2] % BLOCK or s.global_scale:
            return "compared for symmetric int4 in multiples of 32 and mxfp4, in natural column order"
    if weights.activation.kind not in (ActivationKind.SILU_AND_MUL, ActivationKind.SWIGLUOAI):
        return "compared for silu_and_mul and swigluoai"
    return ""


class _Layer:
    """Weights in ggml's buffers; a graph for each number of tokens."""

    def __init__(self, ggml: _Ggml, weights: Weights, top_k: int, threads: int) -> None:
        self.ggml, self.weights, self.top_k = ggml, weights, top_k
        self.backend = ggml.cpu.ggml_backend_cpu_init()
        ggml.cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        kind = MXFP4 if weights.w13.scheme.element is Element.E2M1 else Q4_0
        E, H, I = weights.num_experts, weights.hidden_size, weights.intermediate_size
        context = ggml.context(3)
        sizes = {"gate": (H, I), "up": (H, I), "down": (I, H)}
        self.tensors = {n: ggml.op("ggml_new_tensor_3d", context, kind, k, rows, E) for n, (k, rows) in sizes.items()}
        default = ggml.base.ggml_backend_get_default_buffer_type(self.backend)
        kinds = [*ggml.repacked(), default]
        if not ggml.base.ggml_backend_alloc_ctx_tensors_from_buft(context, kinds[0]):
            raise RuntimeError("ggml: no memory for the weights")
        gate, up = _blocks(weights.w13).chunk(2, dim=1)
        for name, blocks in (("gate", gate), ("up", up), ("down", _blocks(weights.w2))):
            ggml.put(self.tensors[name], blocks)
        self._biases(default)
        self.graphs: dict[int, tuple[int, dict[str, int]]] = {}

    def _biases(self, buffer_type: int) -> None:
        b13, b2 = self.weights.w13.bias, self.weights.w2.bias
        if b13 is None or b2 is None:
            return
        context = self.ggml.context(3)
        gate, up = b13.float().chunk(2, dim=1)
        values = {"gate_bias": gate, "up_bias": up, "down_bias": b2.float()}
        made = {n: self.ggml.op("ggml_new_tensor_2d", context, F32, v.shape[1], v.shape[0]) for n, v in values.items()}
        self.ggml.op("ggml_backend_alloc_ctx_tensors_from_buft", context, buffer_type)
        for name, value in values.items():
            self.ggml.put(made[name], value)
        self.tensors |= made

    def _matrix(self, context: int, name: str, x: int, ids: int) -> int:
        y = self.ggml.op("ggml_mul_mat_id", context, self.tensors[name], x, ids)
        bias = self.tensors.get(f"{name}_bias")
        return y if bias is None else self.ggml.op("ggml_add_id", context, y, bias, ids)

    def _graph(self, M: int) -> tuple[int, dict[str, int]]:
        g, k, H = self.ggml, self.top_k, self.weights.hidden_size
        context = g.context(32 + 2 * k)
        io = {
            "x": g.op("ggml_new_tensor_3d", context, F32, H, 1, M),
            "ids": g.op("ggml_new_tensor_2d", context, I32, k, M),
            "w": g.op("ggml_new_tensor_3d", context, F32, 1, k, M),
        }
        for tensor in io.values():
            g.base.ggml_set_input(tensor)
        gate, up = (self._matrix(context, n, io["x"], io["ids"]) for n in ("gate", "up"))
        a = self.weights.activation
        if a.kind is ActivationKind.SWIGLUOAI:
            h = g.op("ggml_swiglu_oai", context, gate, up, a.alpha, a.limit or 1e30)
        else:
            h = g.op("ggml_swiglu_split", context, gate, up)
        routed = g.op("ggml_mul", context, self._matrix(context, "down", h, io["ids"]), io["w"])
        views = [g.op("ggml_view_2d", context, routed, H, M, 4 * H * k, 4 * H * i) for i in range(k)]
        out = views[0] if k > 1 else g.op("ggml_cont", context, views[0])
        for view in views[1:]:
            out = g.op("ggml_add", context, out, view)
        g.base.ggml_set_output(out)
        io["out"] = out
        graph = g.op("ggml_new_graph", context)
        g.base.ggml_build_forward_expand(graph, out)
        memory = g.op("ggml_gallocr_new", g.base.ggml_backend_get_default_buffer_type(self.backend))
        if not g.base.ggml_gallocr_alloc_graph(memory, graph):
            raise RuntimeError("ggml: no memory for the graph")
        return graph, io

    def prepare(self, x: Tensor, ids: Tensor, w: Tensor) -> dict[str, Tensor]:
        """Inputs in ggml's types, and the graph for so many tokens."""
        if x.shape[0] not in self.graphs:
            self.graphs[x.shape[0]] = self._graph(x.shape[0])
        return {"x": x.float().contiguous(), "ids": ids.int().contiguous(), "w": w.float().contiguous()}

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"]
        graph, io = self.graphs[x.shape[0]]
        for name, data in inputs.items():
            self.ggml.put(io[name], data)
        status = self.ggml.base.ggml_backend_graph_compute(self.backend, graph)
        if status:
            raise RuntimeError(f"ggml: status {status}")
        out = torch.empty_like(x)
        self.ggml.base.ggml_backend_tensor_get(io["out"], out.data_ptr(), 0, out.numel() * 4)
        return out


def ggml_layer(weights: Weights, top_k: int, threads: int) -> Callable[[Tensor, Tensor, Tensor], Tensor] | str:
    """The layer on ggml, or why there is none."""
    spec = importlib.util.find_spec("libggml")
    if spec is None or spec.origin is None:
        return f"not installed ({PACKAGE})"
    refusal = _refusal(weights)
    if refusal:
        return refusal
    layer = _Layer(_Ggml(Path(spec.origin).parent / "lib64"), weights, top_k, threads)
    return Prepared(layer.prepare, layer.run, eight_bits=True)
