"""The arithmetic of expertd: quantized expert layers, tensors in, tensors out.  Knows nothing of RPC.

    decision = decide(problem_of(weights, detect_device()))
    experts = build(decision, weights)
    out = experts(hidden_states, topk_ids, topk_weights)        # [M, H]

Names that need torch are imported on first use, so that `decide` can be asked without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from expertd_kernels.common.problem import NAMED_DEVICES, Device, Package, Problem
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.decision import Backend, Decision, NoBackendError, Verdict, decide
from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.scheme import ActivationQuant, Element, ScaleType, Scheme

if TYPE_CHECKING:
    from expertd_kernels.common.grouped import batched_routes, grouped_routes
    from expertd_kernels.common.protocol import Experts, Packed
    from expertd_kernels.oracle.probe import detect_device
    from expertd_kernels.packed.builder import build, problem_of
    from expertd_kernels.weights.canonical import QuantTensor, Weights
    from expertd_kernels.weights.float32 import reference
    from expertd_kernels.weights.numerics import relative_error, tolerance

__all__ = [
    "Activation",
    "ActivationKind",
    "ActivationQuant",
    "Backend",
    "Decision",
    "Device",
    "Element",
    "Experts",
    "NAMED_DEVICES",
    "NoBackendError",
    "Package",
    "Packed",
    "Problem",
    "QuantTensor",
    "Refused",
    "ScaleType",
    "Scheme",
    "Verdict",
    "Weights",
    "batched_routes",
    "build",
    "decide",
    "detect_device",
    "grouped_routes",
    "problem_of",
    "reference",
    "relative_error",
    "tolerance",
]

_LAZY = {
    "Experts": "common.protocol",
    "Packed": "common.protocol",
    "QuantTensor": "weights.canonical",
    "Weights": "weights.canonical",
    "batched_routes": "common.grouped",
    "build": "packed.builder",
    "detect_device": "oracle.probe",
    "grouped_routes": "common.grouped",
    "problem_of": "packed.builder",
    "reference": "weights.float32",
    "relative_error": "weights.numerics",
    "tolerance": "weights.numerics",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
