"""Other CPU implementations of the same layer, each in processes of its own, timed in turns with ours.

    python kernels/bench/peers_cpu.py [--peers torch_int4pack,ggml] [--table FILE.md] [arguments of the bench]

makes this machine's table beside the lines of `python -m expertd_kernels.bench`, whose arguments it takes.

torch's operators are there with torch.  The others come from `pip install onnxruntime onnx libggml-python`, none of
which expertd needs otherwise.

A peer is made from canonical weights (mostly symmetric int4 in groups) and called like a backend.
Where it cannot be had, the text says why.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cpu_table
from expertd_kernels.backends import cpu_torch
from expertd_kernels.bench import __main__ as bench
from expertd_kernels.bench.prepared import Prepared
from expertd_kernels.oracle.probe import detect_device
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import apply_activation
from expertd_kernels.weights.scheme import Element
from peers_ggml import ggml_layer

__all__ = ["FAST", "PEERS", "Call", "main", "peer"]

DENSE_WEIGHTS = 2_000_000_000
"""Most weights that a peer holds as bf16."""

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [M, H] bf16, ids [M, k] int32, weights [M, k] f32) -> [M, H]"""


def _torch_int4(weights: Weights, top_k: int, threads: int) -> Call | str:
    """torch's int4 operator in a loop over experts; needs bf16 scales and groups of 32 to 256."""
    problem = problem_of(weights, detect_device("cpu"), top_k=top_k)
    packed = cpu_torch.pack(weights, problem)
    if not (packed.meta["w13"]["int4"] and packed.meta["w2"]["int4"]):
        return "torch's int4 operator does not take this scheme"
    experts = cpu_torch.experts(packed, problem)
    return lambda x, ids, w: experts(x, ids, w)


def _torch_bf16(weights: Weights, top_k: int, threads: int) -> Call | str:
    """torch's bf16 linear in a loop over experts, on weights dequantized beforehand."""
    E, H, I = weights.num_experts, weights.hidden_size, weights.intermediate_size
    if E * H * I * (weights.activation.segments + 1) > DENSE_WEIGHTS:
        return "bf16 weights would take more than 4 GB"
    w13, w2 = (torch.cat([q.experts([e]).dequantize().bfloat16() for e in range(E)]) for q in (weights.w13, weights.w2))

    def call(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros(x.shape)
        for e in torch.unique(ids).tolist():
            token, j = (ids == e).nonzero(as_tuple=True)
            h = torch.nn.functional.linear(x[token], w13[e]).float()
            if weights.w13.bias is not None:
                h = h + weights.w13.bias[e]
            h = apply_activation(h, weights.activation).bfloat16()
            y = torch.nn.functional.linear(h, w2[e]).float()
            if weights.w2.bias is not None:
                y = y + weights.w2.bias[e]
            out.index_add_(0, token, y * w[token, j][:, None])
        return out.to(x.dtype)

    return call


def _onnxruntime(weights: Weights, top_k: int, threads: int, accuracy_level: int) -> Call | str:
    """ONNX Runtime's QMoE operator (com.microsoft), int4 blockwise.  accuracy_level: 4 = 8-bit activations, 1 = f32."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return "not installed (onnxruntime, onnx)"
    if weights.w13.scheme.element is not Element.INT4 or weights.w13.scheme.zeros or weights.w13.columns is not None:
        return "QMoE takes symmetric int4 in natural column order"
    if weights.activation.kind is not ActivationKind.SILU_AND_MUL or weights.w13.bias is not None:
        return "compared for silu_and_mul without bias only"
    if weights.w13.scheme.group_size is None:
        return "compared for groups only"
    return _qmoe(weights, top_k, threads, accuracy_level)


def _interleaved(t: Tensor) -> Tensor:
    """Gate rows and up rows in turns: QMoE's order of the first matrix."""
    gate, up = t.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2).contiguous()


def _qmoe(weights: Weights, top_k: int, threads: int, accuracy_level: int) -> Call | str:
    onnx, ort = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    h, t = onnx.helper, onnx.TensorProto
    H, E = weights.hidden_size, weights.num_experts
    assert weights.w13.scales is not None
    assert weights.w2.scales is not None
    tensors: Mapping[str, Tensor] = {
        "w1": _interleaved(weights.w13.codes),
        "s1": _interleaved(weights.w13.scales).float(),
        "w2": weights.w2.codes,
        "s2": weights.w2.scales.float(),
    }
    node = h.make_node(
        "QMoE",
        ["x", "router", "w1", "s1", "", "w2", "s2", "", ""],
        ["y"],
        domain="com.microsoft",
        k=top_k,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
        swiglu_limit=1e30,
        normalize_routing_weights=1,
        expert_weight_bits=4,
        block_size=weights.w13.scheme.group_size,
        accuracy_level=accuracy_level,
    )
    inputs = [h.make_tensor_value_info("x", t.FLOAT, ["m", H]), h.make_tensor_value_info("router", t.FLOAT, ["m", E])]
    fixed = [
        h.make_tensor(n, t.UINT8 if v.dtype == torch.uint8 else t.FLOAT, v.shape, v.numpy().tobytes(), raw=True)
        for n, v in tensors.items()
    ]
    graph = h.make_graph([node], "layer", inputs, [h.make_tensor_value_info("y", t.FLOAT, ["m", H])], fixed)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21), h.make_opsetid("com.microsoft", 1)])
    model.ir_version = 10  # the newest onnx writes a later one than onnxruntime reads
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        return f"onnxruntime {ort.__version__} refuses the model: {str(e)[:120]}"

    def prepare(x: Tensor, ids: Tensor, w: Tensor) -> Mapping[str, Any]:
        """It routes by itself: logits whose softmax over the top k is w."""
        logits = torch.full((x.shape[0], E), -1e30)
        logits.scatter_(1, ids.long(), w.log())
        return {"x": x.float().numpy(), "router": logits.numpy()}

    return Prepared(prepare, lambda inputs: torch.from_numpy(session.run(None, inputs)[0]), accuracy_level == 4)


PEERS: Mapping[str, Callable[[Weights, int, int], Call | str]] = {
    "torch_int4pack": _torch_int4,
    "torch_bf16": _torch_bf16,
    "onnxruntime_qmoe": partial(_onnxruntime, accuracy_level=1),
    "onnxruntime_int8": partial(_onnxruntime, accuracy_level=4),
    "ggml": ggml_layer,
}


FAST = ("torch_int4pack", "onnxruntime_int8", "ggml")
"""Timed where none are named: the fastest ones of every machine so far."""


def peer(name: str, weights: Weights, top_k: int, threads: int) -> Call | str:
    """The peer's call, or why there is none."""
    try:
        return PEERS[name](weights, top_k, threads)
    except (RuntimeError, ValueError, ImportError) as e:
        return f"{type(e).__name__}: {str(e)[:160]}"


def _below(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many times as fast as the fastest peer of each point; lines of at most 80 characters."""
    out = [
        "",
        "",
        "times as fast as the fastest 4-bit peer",
        "row        shape            scheme          threads   mean  least",
    ]
    for r in cpu_table.summary(rows):
        names = f"{r['backend']:10s} {r['shape']:16s} {r['scheme']:15s}"
        out.append(f"{names} {r['threads']:7d} {r['geometric_mean']:6.2f} {r['least']:6.2f}")
    return "\n".join(out) if len(out) > 4 else ""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the bench; 1 for an unknown name."""
    p = bench.parser()
    p.prog, p.description = "python kernels/bench/peers_cpu.py", __doc__
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--peers", default=",".join(FAST), metavar="LIST", help=f"of {', '.join(PEERS)} ({', '.join(FAST)})")
    p.add_argument("--table", type=Path, metavar="FILE.md", help="write the points as cpu_table.py shows them")
    args = p.parse_args(argv)
    names = args.peers.split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown or args.device != "cpu":
        print(f"peers {', '.join(unknown)}: want --device cpu, and of {', '.join(PEERS)}", file=sys.stderr)
        return 1

    def more(rows: Sequence[Mapping[str, Any]]) -> str:
        if args.table:
            args.table.write_text(cpu_table.markdown(rows))
        return _below(rows)

    return bench.measure(args, others={name: partial(peer, name) for name in names}, more=more)


if __name__ == "__main__":
    sys.exit(main())
