"""Every line of the oracle's table as a small layer and its problem, so that a test runs over all of them, and a new
backend or line is in it without being named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from expertd_kernels import NAMED_DEVICES, ActivationQuant, Problem, problem_of
from expertd_kernels.common.problem import Device
from expertd_kernels.oracle.decision import Backend, SchemeSupport
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.rules import judge
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme

PACKAGES = dict(assumed_packages(BACKENDS))
EXPERTS = 8
"""With one more for absent routes they are no multiple of 4, as with 60, 128 and 256."""


@dataclass(frozen=True)
class Line:
    """One of the table's lines with one way to round activations.  weights, problem: a layer that it serves."""

    backend: Backend
    support: SchemeSupport
    scheme: Scheme
    rounding: ActivationQuant
    device: Device

    @property
    def name(self) -> str:
        how = "" if self.rounding is ActivationQuant.NONE else f" a: {self.rounding.value}"
        return f"{self.backend.name} {self.scheme.name}{how}"

    @property
    def sizes(self) -> tuple[int, int]:
        """(H, I): as small as the line takes, since kernels run in an interpreter."""
        small = self.support.blocks is None or not self.support.blocks or self.scheme.rows == WHOLE
        portable = self.backend.hidden_multiple == self.support.hidden_multiple == 1 and not self.support.whole_blocks
        return (64, 32) if small and portable else (128, 128)

    @property
    def biased(self) -> bool:
        return self.backend.bias and self.support.biased

    @property
    def activation(self) -> Activation:
        """silu where the line computes it."""
        functions = self.support.functions
        if functions is None or ActivationKind.SILU_AND_MUL in functions:
            return Activation()
        return Activation.parse(min(f.value for f in functions))

    def weights(self, experts: int = EXPERTS, sizes: tuple[int, int] | None = None, **kw) -> Weights:
        """sizes: (H, I).  Gate and up rows have the same second-level or whole-matrix scale, as in most checkpoints."""
        given = {"scheme": self.scheme, "seed": 5, "bias": self.biased, "activation": self.activation, **kw}
        w = random_weights(given.pop("scheme"), experts, *(sizes or self.sizes), **given)
        w = replace(w, w13=_one_scale(w.w13))
        if self.rounding.static:
            nvfp4 = self.rounding is ActivationQuant.NVFP4
            steps = (
                torch.tensor([[0.008, 0.011], [0.01, 0.007]]) / 6
                if nvfp4
                else torch.tensor([[0.02, 0.2], [0.015, 0.18]])
            )
            w = replace(w, input_scales=steps.repeat(-(-experts // 2), 1)[:experts].contiguous())
        return w

    def problem(self, w: Weights, **kw) -> Problem:
        return problem_of(w, self.device, activation_quant=self.rounding, packages=PACKAGES, **{"top_k": 2, **kw})


def _one_scale(q: QuantTensor) -> QuantTensor:
    if q.global_scales is not None:
        return replace(q, global_scales=q.global_scales[:, :1].expand_as(q.global_scales).contiguous())
    if q.scales is not None and q.scheme.rows == WHOLE:
        return replace(q, scales=q.scales[:, :1].expand_as(q.scales).contiguous())
    return q


def _schemes(s: SchemeSupport) -> Iterator[Scheme]:
    """What the line covers: without and with zero points where it has them, each block that it names."""
    kind = next((k for k in (ScaleType.BF16, ScaleType.F32, *ScaleType) if s.scales is None or k in s.scales), None)
    assert kind is not None
    if not s.element.quantized:
        yield Scheme(s.element)
        return
    if s.element is Element.E2M1 and s.groups is None:
        yield from (Scheme.parse("mxfp4"), Scheme.parse("nvfp4"))
        return
    if s.global_scale and s.groups is not None:
        yield Scheme.parse("nvfp4")
        return
    groups = {32, WHOLE} if s.groups is None else s.groups
    for group in sorted(groups)[:2]:
        e8m0 = s.element in (Element.E2M1, Element.E4M3) and group == 32
        yield Scheme(s.element, 1, group, ScaleType.E8M0 if e8m0 else kind)
        if s.zeros:
            yield Scheme(s.element, 1, group, kind, zeros=True)
    for block in sorted(s.blocks or ()):
        yield Scheme(s.element, *block, kind)


def lines() -> tuple[Line, ...]:
    """All that judge() has nothing against; every line of every backend is among them."""
    found = []
    for b in BACKENDS:
        for s in b.schemes:
            mine = [x for scheme in _schemes(s) for x in _of(b, s, scheme)]
            assert mine, f"{b.name}: no layer for {s}"
            found += mine
    return tuple({x.name: x for x in found}.values())


def _of(b: Backend, s: SchemeSupport, scheme: Scheme) -> Iterator[Line]:
    for rounding in sorted(s.activations, key=lambda a: a.value):
        for device in NAMED_DEVICES.values():
            line = Line(b, s, scheme, rounding, device)
            if all(r.kind != device.kind for r in b.devices):
                continue
            if not judge(b, line.problem(line.weights())):
                yield line
                break


LINES = lines()
