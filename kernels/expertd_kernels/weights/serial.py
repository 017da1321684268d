"""Canonical weights <-> named tensors and JSON facts: for caches, for the reference backend, for moving weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import ActivationQuant, Element, ScaleType, Scheme

__all__ = [
    "activation_from_json",
    "activation_to_json",
    "matrix_tensors",
    "matrix_to_json",
    "scheme_from_json",
    "scheme_to_json",
    "weights_from_tensors",
    "weights_to_tensors",
]


def scheme_to_json(s: Scheme) -> dict[str, Any]:
    return {
        "element": s.element.value,
        "rows": s.rows,
        "cols": s.cols,
        "scale": s.scale.value,
        "zeros": s.zeros,
        "global_scale": s.global_scale,
    }


def scheme_from_json(d: Mapping[str, Any]) -> Scheme:
    return Scheme(Element(d["element"]), d["rows"], d["cols"], ScaleType(d["scale"]), d["zeros"], d["global_scale"])


def activation_to_json(a: Activation) -> dict[str, Any]:
    return {"kind": a.kind.value, "alpha": a.alpha, "beta": a.beta, "limit": a.limit}


def activation_from_json(d: Mapping[str, Any]) -> Activation:
    return Activation(ActivationKind(d["kind"]), d["alpha"], d["beta"], d["limit"])


def matrix_to_json(q: QuantTensor) -> dict[str, Any]:
    """What a matrix is, beside its tensors."""
    return {"scheme": scheme_to_json(q.scheme), "shape": list(q.shape), "segments": q.segments}


def _canonical(name: str, q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return dict(q.tensors()), matrix_to_json(q)


def _from_canonical(tensors: dict[str, Tensor], m: Mapping[str, Any]) -> QuantTensor:
    E, N, K = m["shape"]
    return QuantTensor(scheme_from_json(m["scheme"]), (E, N, K), segments=m["segments"], **tensors)


def weights_to_tensors(
    w: Weights,
    matrix: Callable[[str, QuantTensor], tuple[Mapping[str, Tensor], Mapping[str, Any]]] = _canonical,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors named "w13.codes", ...; meta with schemes, shapes and the activation.

    matrix("w13", then "w2", canonical) -> (tensors by name, JSON-able facts); default: the canonical fields."""
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {
        "activation": activation_to_json(w.activation),
        "checkpoint_activation": w.checkpoint_activation.value,
    }
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        assert matrix is _canonical or q.factors is None, "builder.pack folds factors"
        parts, meta[name] = matrix(name, q)
        tensors.update({f"{name}.{field}": t for field, t in parts.items()})
    if w.input_scales is not None:
        tensors["input_scales"] = w.input_scales
    return tensors, meta


def matrix_tensors(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Those of the matrix "w13" or "w2", without its name."""
    return {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}


def weights_from_tensors(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    matrix: Callable[[dict[str, Tensor], Any], QuantTensor] = _from_canonical,
) -> Weights:
    """The inverse of weights_to_tensors.  matrix(tensors by name, the matrix's facts) -> canonical."""
    return Weights(
        matrix(matrix_tensors(tensors, "w13"), meta["w13"]),
        matrix(matrix_tensors(tensors, "w2"), meta["w2"]),
        activation_from_json(meta["activation"]),
        ActivationQuant(meta["checkpoint_activation"]),
        tensors.get("input_scales"),
    )
