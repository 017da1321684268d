"""The oracle: which backend serves a layer, and why not the others.  Pure: imports no torch and no backend.

A backend is a row of facts (`Backend`).  A rule is a function (backend, problem) -> refusal | None.  Every rule runs
for every row, so the answer is a table and not the last reason.  `decide` takes the first eligible row of the
platform's order; a pinned backend is used or refused, never replaced.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import SpecifierSet

from expertd_kernels.activation import ActivationKind
from expertd_kernels.problem import Device, Problem
from expertd_kernels.scheme import WHOLE, ActivationQuant, Element, ScaleType, Scheme

__all__ = [
    "Backend",
    "Decision",
    "DeviceRange",
    "NoBackendError",
    "RULES",
    "Refused",
    "SchemeSupport",
    "Verdict",
    "decide",
    "order_for",
]

GIB = 1 << 30


@dataclass(frozen=True)
class DeviceRange:
    """Devices a backend runs on.  least, most: inclusive capability range; features: all must be there."""

    kind: str
    least: tuple[int, int] = (0, 0)
    most: tuple[int, int] = (99, 99)
    arch: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    def refusal(self, device: Device) -> str | None:
        if device.kind != self.kind:
            return f"runs on {self.kind}"
        if self.arch and device.arch not in self.arch:
            return f"runs on {', '.join(sorted(self.arch))}"
        if device.kind == "cuda" and not self.least <= device.capability <= self.most:
            most = f" to {self.most[0]}.{self.most[1]}" if self.most < (99, 99) else " and up"
            return f"needs compute capability {self.least[0]}.{self.least[1]}{most}"
        if device.kind == "rocm" and not self.least <= device.capability <= self.most:
            return "needs another gfx generation"
        missing = self.features - device.features
        return f"needs CPU features {', '.join(sorted(missing))}" if missing else None


@dataclass(frozen=True)
class SchemeSupport:
    """Weight schemes that a backend computes on, as one line of its row.

    groups: columns a scale that work (of schemes with one scale row a weight row); WHOLE = channel; None = any.
    blocks: (rows, cols) of other blocks that work; None = any.
    activations: ways to round the activations with these weights.
    scales: types of stored scales that work; None = any.
    functions: functions between the GEMMs with these weights, where they are fewer than the row's; None = the row's.
    devices: where these weights work, if not wherever the row does.
    whole_blocks: a block of scales that H or I cuts is not computed: blocks divide both.
    hidden_multiple, intermediate_multiple: sizes needed with these weights, beyond the row's.
    """

    element: Element
    groups: frozenset[int] | None = frozenset()
    blocks: frozenset[tuple[int, int]] | None = frozenset()
    zeros: bool = False
    global_scale: bool = False
    activations: frozenset[ActivationQuant] = frozenset({ActivationQuant.NONE})
    biased: bool = True
    scales: frozenset[ScaleType] | None = None
    functions: frozenset[ActivationKind] | None = None
    devices: tuple[DeviceRange, ...] = ()
    whole_blocks: bool = False
    hidden_multiple: int = 1
    intermediate_multiple: int = 1

    def refusal(self, s: Scheme) -> str | None:
        """Why scheme `s`, which has this element, is not covered; None if it is."""
        if not s.element.quantized:
            return None
        if s.zeros and not self.zeros:
            return "zero points are not computed"
        if s.global_scale and not self.global_scale:
            return "second-level scales are not computed"
        if self.scales is not None and s.scale not in self.scales:
            return f"scales of type {s.scale.value} (has: {', '.join(sorted(x.value for x in self.scales))})"
        if s.rows == 1:
            if self.groups is not None and s.cols not in self.groups:
                known = ", ".join("channel" if g == WHOLE else str(g) for g in sorted(self.groups))
                return f"group size {'channel' if s.cols == WHOLE else s.cols} (has: {known or 'none'})"
        elif self.blocks is not None and (s.rows, s.cols) not in self.blocks:
            known = ", ".join(_block(*b) for b in sorted(self.blocks)) or "none"
            return f"scale blocks of {_block(s.rows, s.cols)} (has: {known})"
        return None


def _block(rows: int, cols: int) -> str:
    return "the whole matrix" if (rows, cols) == (WHOLE, WHOLE) else f"{rows or 'all'} x {cols or 'all'}"


@dataclass(frozen=True)
class Backend:
    """One row of the table.  Everything the oracle knows about a backend; its code is imported only when chosen.

    name            file name = row name = metric label = config value
    target          module with pack(weights, problem), unpack(packed), experts(packed, problem)
    devices         where it runs
    schemes         what it computes on
    activations     functions between the GEMMs
    swigluoai       (alpha, beta, limit) that SWIGLUOAI is computed with, where they are fixed; None = any
    needs           distributions and version ranges, e.g. {"triton": ">=3.2"}
    compute_dtypes  "bf16", "f32"
    act_order, bias, clamp, router_weight_on_input, grouped_rows, deterministic: features computed, not dropped
    unclamped       functions before which it does not clamp, though before others it does
    hidden_multiple, intermediate_multiple: sizes it needs; 1 = any
    max_experts     0 = no limit
    hardware        "" or what its docs must say, e.g. "not run on hardware"
    layout_version  raised whenever pack() lays the same weights out differently: part of the cache's key
    """

    name: str
    target: str
    devices: tuple[DeviceRange, ...]
    schemes: tuple[SchemeSupport, ...]
    summary: str
    activations: frozenset[ActivationKind] = frozenset(ActivationKind)
    swigluoai: tuple[float, float, float] | None = None
    needs: Mapping[str, str] = field(default_factory=dict)
    compute_dtypes: frozenset[str] = frozenset({"bf16"})
    act_order: bool = False
    bias: bool = True
    clamp: bool = True
    router_weight_on_input: bool = True
    grouped_rows: bool = True
    deterministic: bool = True
    mixed_schemes: bool = True
    unclamped: frozenset[ActivationKind] = frozenset()
    hidden_multiple: int = 1
    intermediate_multiple: int = 1
    max_experts: int = 0
    hardware: str = ""
    layout_version: int = 1


@dataclass(frozen=True)
class Verdict:
    """What the rules say of one row.  microseconds, relative_error: filled by a measurement, else None."""

    backend: str
    refusals: tuple[str, ...] = ()
    microseconds: float | None = None
    relative_error: float | None = None

    @property
    def eligible(self) -> bool:
        return not self.refusals


@dataclass(frozen=True)
class Decision:
    """The answer: the row chosen (None if nothing fits) and the verdict on every row, in the order of preference."""

    problem: Problem
    chosen: Backend | None
    verdicts: tuple[Verdict, ...]
    pinned: bool = False

    def require(self) -> Backend:
        """The chosen row; raises NoBackendError with every refusal where there is none."""
        if self.chosen is None:
            raise NoBackendError(self)
        return self.chosen


class NoBackendError(Exception):
    """No backend serves the layer, or the pinned one does not.  The text holds the whole table."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        p = decision.problem
        rows = "\n".join(f"  {v.backend}: {'; '.join(v.refusals) or 'eligible'}" for v in decision.verdicts)
        what = "the pinned backend does not serve" if decision.pinned else "no backend serves"
        super().__init__(f"{what} {p.scheme_name} with {p.activation.name} on {p.device}:\n{rows}")


class Refused(Exception):  # noqa: N818 - a value with a reason that a backend raises from pack() or experts()
    """A backend found at pack time that it cannot serve these weights; the text is the refusal."""


Rule = Callable[[Backend, Problem], "str | None"]


def _elsewhere(devices: Sequence[DeviceRange], device: Device) -> str | None:
    """Why `device` is in none of the ranges; None if it is in one, or there are none."""
    refusals = [r.refusal(device) for r in devices]
    if not refusals or None in refusals:
        return None
    kinds = [x for r, x in zip(devices, refusals, strict=True) if x and r.kind == device.kind]
    return " or ".join(dict.fromkeys(kinds or [x for x in refusals if x]))


def rule_device(b: Backend, p: Problem) -> str | None:
    reason = _elsewhere(b.devices, p.device)
    return f"{reason}, this is {p.device}" if reason else None


def rule_packages(b: Backend, p: Problem) -> str | None:
    out = []
    for name, want in b.needs.items():
        have = p.packages.get(name)
        if have is None:
            out.append(f"package {name}{want} is not installed")
        elif have.error:
            out.append(f"package {name} {have.version} does not import: {have.error}")
        elif want and not SpecifierSet(want, prereleases=True).contains(have.version):
            out.append(f"package {name} {have.version} is installed, {want} is needed")
    return "; ".join(out) or None


def _support(b: Backend, s: Scheme) -> tuple[SchemeSupport | None, str | None]:
    """The line of the row that covers scheme `s`, or the nearest reason."""
    lines = [x for x in b.schemes if x.element is s.element]
    if not lines:
        return None, f"does not compute on {s.element.value} weights"
    reasons = []
    for line in lines:
        reason = line.refusal(s)
        if reason is None:
            return line, None
        reasons.append(reason)
    return None, f"{s.name}: " + " or ".join(dict.fromkeys(reasons))


def rule_scheme(b: Backend, p: Problem) -> str | None:
    return "; ".join(r for s in p.schemes if (r := _support(b, s)[1])) or None


def rule_scheme_device(b: Backend, p: Problem) -> str | None:
    for s in p.schemes:
        line = _support(b, s)[0]
        if line is not None and rule_device(b, p) is None and (r := _elsewhere(line.devices, p.device)):
            return f"{s.name}: {r}, this is {p.device}"
    return None


def rule_mixed(b: Backend, p: Problem) -> str | None:
    return "w13 and w2 have different schemes" if len(p.schemes) > 1 and not b.mixed_schemes else None


def rule_activation_quant(b: Backend, p: Problem) -> str | None:
    for s in p.schemes:
        line = _support(b, s)[0]
        if line is not None and p.activation_quant not in line.activations:
            if p.activation_quant is ActivationQuant.NONE:
                return (
                    f"rounds activations ({', '.join(sorted(a.value for a in line.activations))}); weight-only is asked"
                )
            return f"does not round activations to {p.activation_quant.value}"
    return None


def rule_activation(b: Backend, p: Problem) -> str | None:
    a = p.activation
    if a.kind not in b.activations:
        return f"does not compute {a.kind.value}"
    for s in p.schemes:
        line = _support(b, s)[0]
        if line is not None and line.functions is not None and a.kind not in line.functions:
            return f"does not compute {a.kind.value} with {s.name} weights"
    if a.kind is ActivationKind.SWIGLUOAI and b.swigluoai not in (None, (a.alpha, a.beta, a.limit)):
        names = ("alpha", "beta", "limit")
        have, want = (
            ", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True))
            for values in (b.swigluoai or (), (a.alpha, a.beta, a.limit))
        )
        return f"computes swigluoai with {have} only, {want} is asked"
    return None


def rule_clamp(b: Backend, p: Problem) -> str | None:
    a = p.activation
    if a.limit is None or (b.clamp and a.kind not in b.unclamped):
        return None
    return "does not clamp before the activation" if not b.clamp else f"does not clamp before {a.kind.value}"


def rule_bias(b: Backend, p: Problem) -> str | None:
    if not p.bias:
        return None
    lines = [_support(b, s)[0] for s in p.schemes]
    return "does not add expert biases" if not b.bias or any(x and not x.biased for x in lines) else None


def rule_act_order(b: Backend, p: Problem) -> str | None:
    return "does not permute columns (activation order)" if p.act_order and not b.act_order else None


def rule_router_weight(b: Backend, p: Problem) -> str | None:
    if p.router_weight_on_input and not b.router_weight_on_input:
        return "does not take the router weight on the input"
    return None


def rule_grouped_rows(b: Backend, p: Problem) -> str | None:
    return "does not take rows grouped by expert" if p.grouped_rows and not b.grouped_rows else None


def _multiples(b: Backend, p: Problem) -> tuple[int, int]:
    """Of H and of I: what the row needs, and what its lines for the two matrices need."""
    hidden, intermediate = b.hidden_multiple, b.intermediate_multiple
    for s, w13 in ((p.w13, True), (p.w2, False)):
        line = _support(b, s)[0]
        if line is None:
            continue
        hidden, intermediate = (
            math.lcm(hidden, line.hidden_multiple),
            math.lcm(intermediate, line.intermediate_multiple),
        )
        if line.whole_blocks and s.element.quantized:
            along_n, along_k = max(s.rows, 1), max(s.cols, 1)
            hidden = math.lcm(hidden, along_k if w13 else along_n)
            intermediate = math.lcm(intermediate, along_n if w13 else along_k)
    return hidden, intermediate


def rule_sizes(b: Backend, p: Problem) -> str | None:
    out = []
    hidden, intermediate = _multiples(b, p)
    for what, size, multiple in (("H", p.hidden_size, hidden), ("I", p.intermediate_size, intermediate)):
        if size % multiple:
            padded = -(-size // multiple) * multiple
            out.append(
                f"{what} = {size} is no multiple of {multiple} (padding to {padded} would cost"
                f" {(padded / size - 1) * 100:.0f} % more weight bytes)"
            )
    return "; ".join(out) or None


def rule_experts(b: Backend, p: Problem) -> str | None:
    if b.max_experts and p.num_experts > b.max_experts:
        return f"holds at most {b.max_experts} experts, {p.num_experts} are asked"
    return None


def rule_dtype(b: Backend, p: Problem) -> str | None:
    if p.compute_dtype not in b.compute_dtypes:
        return f"does not compute in {p.compute_dtype}"
    return None


def rule_deterministic(b: Backend, p: Problem) -> str | None:
    return "is not bit-identical from run to run" if p.deterministic and not b.deterministic else None


RULES: tuple[Rule, ...] = (
    rule_device,
    rule_packages,
    rule_scheme,
    rule_scheme_device,
    rule_mixed,
    rule_activation_quant,
    rule_activation,
    rule_clamp,
    rule_bias,
    rule_act_order,
    rule_router_weight,
    rule_grouped_rows,
    rule_sizes,
    rule_experts,
    rule_dtype,
    rule_deterministic,
)


def order_for(device: Device, backends: Sequence[Backend], order: Mapping[str, Sequence[str]]) -> list[Backend]:
    """The rows in the order of preference on `device`: the names of order[arch], else order[kind], then the rest."""
    names = list(order.get(device.arch, order.get(device.kind, ())))
    by_name = {b.name: b for b in backends}
    first = [by_name[n] for n in names if n in by_name]
    return first + [b for b in backends if b.name not in names]


def decide(
    problem: Problem,
    backends: Sequence[Backend] | None = None,
    pin: str | None = None,
    order: Mapping[str, Sequence[str]] | None = None,
) -> Decision:
    """Judge every row and choose the first eligible one.

    backends, order: the table and the platform orders; default: expertd_kernels.table.
    pin: a backend's name: it is chosen if it is eligible, else nothing is.  ValueError for an unknown name.
    """
    table = importlib.import_module("expertd_kernels.table")
    rows = order_for(
        problem.device, table.BACKENDS if backends is None else backends, table.ORDER if order is None else order
    )
    if pin is not None and pin not in {b.name for b in rows}:
        raise ValueError(f"backend {pin!r}: known are {', '.join(sorted(b.name for b in rows))}")
    verdicts = tuple(Verdict(b.name, tuple(r for rule in RULES if (r := rule(b, problem)))) for b in rows)
    eligible = {v.backend for v in verdicts if v.eligible}
    chosen = next((b for b in rows if b.name in eligible and pin in (None, b.name)), None)
    return Decision(problem, chosen, verdicts, pinned=pin is not None)


def load(backend: Backend) -> Any:
    """The backend's module.  ImportError passes through: it is a refusal that the caller records."""
    return importlib.import_module(backend.target)
