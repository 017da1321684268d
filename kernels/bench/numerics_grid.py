"""The layers that numerics.py checks: each scheme that a row of the table claims, in three shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from expertd_kernels.bench.measurements import picked
from expertd_kernels.common.problem import Device, Package, Problem
from expertd_kernels.oracle.decision import Backend, decide
from expertd_kernels.oracle.survey import SCHEMES
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, ScaleType, Scheme

__all__ = ["EVERY_SCHEME", "EXTRA_SCHEMES", "GRIDS", "Grid", "Layer", "Shape", "layers", "scheme_of"]

EXTRA_SCHEMES = (
    "int4_g32_zp", "int8_g32", "int8_g32_zp", "e4m3_g128", "int4_g128/f16", "int4_g128_zp/f16", "e4m3_block128/e8m0"
)  # fmt: skip
"""Beside the kinds of the oracle's matrix: other group sizes, and other types of scales than a scheme's usual one."""
EVERY_SCHEME = (*SCHEMES, *EXTRA_SCHEMES)
STATIC_SCALES = (0.02, 0.2)
"""Static scales of the inputs of w13 and of w2: 448 steps reach 9, as far as unit normals do, and 90 for what comes of
them.  For e2m1 a sixth, so that e4m3 scales of blocks reach as far."""


def scheme_of(name: str) -> Scheme:
    """The scheme called NAME, or NAME/TYPE with that type of scales."""
    base, _, kind = name.partition("/")
    return Scheme.parse(base, ScaleType(kind) if kind else None)


@dataclass(frozen=True)
class Shape:
    """Experts, routes a token, sizes (H, I) of which a row's first is taken that it accepts, and (activation, bias)
    likewise.  dtypes: compute dtypes tried."""

    experts: int
    top_k: int
    sizes: tuple[tuple[int, int], ...]
    features: tuple[tuple[str, bool], ...] = (("silu_and_mul", False),)
    dtypes: tuple[str, ...] = ("bf16",)


@dataclass(frozen=True)
class Grid:
    tokens: tuple[int, ...]
    shapes: tuple[Shape, ...]


_ODD = ((1003, 331), (1000, 328), (1120, 416), (1088, 448), (1152, 384))
"""Multiples of nothing, 8, 32, 64, 128."""
_ODD_SMALL = ((203, 75), (200, 72), (224, 96), (192, 64), (256, 128))
_RICH = (("swigluoai", True), ("swigluoai", False), ("silu_and_mul", True), ("silu_and_mul", False))

GRIDS: Mapping[str, Grid] = {
    "full": Grid(
        (1, 7, 64, 1000, 4096),
        (
            Shape(8, 2, ((1024, 512),), dtypes=("bf16", "f32")),
            Shape(60, 4, _ODD[1:]),
            Shape(128, 8, _ODD, _RICH),
        ),
    ),
    "small": Grid(
        (1, 7, 64),
        (
            Shape(8, 2, ((256, 128),), dtypes=("bf16", "f32")),
            Shape(60, 4, _ODD_SMALL[1:]),
            Shape(128, 8, _ODD_SMALL, _RICH),
        ),
    ),
}


@dataclass(frozen=True)
class Layer:
    """One layer for one row of the table.  activations: how they are rounded."""

    backend: str
    scheme: str
    activations: ActivationQuant
    compute_dtype: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str
    bias: bool

    def problem(self, device: Device, packages: Mapping[str, Package]) -> Problem:
        s = scheme_of(self.scheme)
        return Problem(
            device, s, s, self.experts, self.hidden, self.intermediate, self.top_k, Activation.parse(self.activation),
            bias=self.bias, activation_quant=self.activations, checkpoint_activation=self.activations,
            compute_dtype=self.compute_dtype, packages=packages,
        )  # fmt: skip

    def weights(self, device: str) -> Weights:
        """Integers with scales of both signs, as checkpoints have them; static input scales where they are used."""
        scheme = scheme_of(self.scheme)
        signed = scheme.element.integer
        w = random_weights(
            scheme, self.experts, self.hidden, self.intermediate, activation=Activation.parse(self.activation),
            bias=self.bias, signed_scales=signed, device=device, seed=self.experts,
        )  # fmt: skip
        static = {ActivationQuant.E4M3_TENSOR: 1.0, ActivationQuant.NVFP4: 6.0}.get(self.activations)
        if static is not None:
            w = replace(w, w13=_equal_segments(w.w13))
            scales = torch.tensor(STATIC_SCALES, device=device) / static
            w = replace(w, input_scales=scales.expand(self.experts, 2).contiguous())
        return w


def _equal_segments(q: QuantTensor) -> QuantTensor:
    """Gate and up rows with the same scale of the matrix and second-level scale: some kernels have one for both."""
    fields = {}
    if q.global_scales is not None:
        fields["global_scales"] = q.global_scales[:, :1].expand_as(q.global_scales).contiguous()
    if q.scales is not None and q.scheme.rows == q.scheme.cols == WHOLE:
        fields["scales"] = q.scales[:, :1].expand_as(q.scales).contiguous()
    return replace(q, **fields)  # type: ignore[arg-type]


def _claims(backend: Backend, schemes: Sequence[str]) -> Iterator[tuple[str, ActivationQuant]]:
    """(scheme, rounding) that a line of the row covers, of these schemes."""
    for name in schemes:
        s = scheme_of(name)
        lines = [x for x in backend.schemes if x.element is s.element and x.refusal(s) is None]
        for how in dict.fromkeys(a for x in lines for a in sorted(x.activations, key=lambda a: a.value)):
            yield name, how


def _fit(
    backend: Backend, shape: Shape, scheme: str, how: ActivationQuant, dtype: str, device: Device,
    packages: Mapping[str, Package],
) -> tuple[Layer | None, tuple[str, ...]]:  # fmt: skip
    """The first features and sizes that the row accepts, or the refusals of the last."""
    why: tuple[str, ...] = ()
    for activation, bias in shape.features:
        for hidden, intermediate in shape.sizes:
            layer = Layer(
                backend.name, scheme, how, dtype, shape.experts, shape.top_k, hidden, intermediate, activation, bias
            )
            why = decide(layer.problem(device, packages), (backend,), order={}).verdicts[0].refusals
            if not why:
                return layer, ()
    return None, why


def layers(
    grid: Grid,
    device: Device,
    packages: Mapping[str, Package],
    names: Sequence[str] = (),
    schemes: Sequence[str] = EVERY_SCHEME,
) -> tuple[list[Layer], dict[str, str]]:
    """The layers to check in the order of `_in_turns`; and why rows have none.  ValueError for an unknown name."""
    known = {b.name: b for b in BACKENDS}
    rows = picked(names or ["all"], list(known))
    found: list[Layer] = []
    refused: dict[str, str] = {}
    for shape in grid.shapes:
        for b in (known[n] for n in rows):
            for scheme, how in _claims(b, schemes):
                for dtype in sorted(b.compute_dtypes & set(shape.dtypes)):
                    layer, why = _fit(b, shape, scheme, how, dtype, device, packages)
                    found += [layer] if layer else []
                    refused.setdefault(b.name, "; ".join(why))
    served = {layer.backend for layer in found}
    return _in_turns(found), {name: why for name, why in refused.items() if name not in served}


def _in_turns(found: Sequence[Layer]) -> list[Layer]:
    """Rows take turns, each at its own pace through its shapes, so that one that compiles for long does not keep the
    others waiting and, where time is short, all have come equally far.  The reference is last: it can only agree."""
    rows: dict[str, list[Layer]] = {}
    for layer in found:
        rows.setdefault(layer.backend, []).append(layer)
    place = {
        layer: (name == "reference", (i + 0.5) / len(row)) for name, row in rows.items() for i, layer in enumerate(row)
    }
    return sorted(found, key=place.__getitem__)
