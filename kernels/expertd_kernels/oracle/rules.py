"""The rules: (row, problem) -> why the row does not serve it, or None.  Pure.  Every rule runs for every row.

A rule gives a plain sentence where the reason lies in the row, else a Refusal that says where it lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from packaging.specifiers import SpecifierSet

from expertd_kernels.common.problem import Device, Package, Problem
from expertd_kernels.oracle.backend import CPU_KERNEL, Backend, DeviceRange, Grade, SchemeSupport
from expertd_kernels.oracle.build_facts import FACTS
from expertd_kernels.oracle.refusal import Refusal, RefusalKind, Remedy
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

__all__ = ["RULES", "Rule", "grade", "judge"]

Rule = Callable[[Backend, Problem], "str | None"]


def _elsewhere(devices: Sequence[DeviceRange], device: Device) -> str | None:
    """Why `device` is in none of the ranges; None if it is in one, or there are none."""
    refusals = [r.refusal(device) for r in devices]
    if not refusals or None in refusals:
        return None
    kinds = [x for r, x in zip(devices, refusals, strict=True) if x and r.kind == device.kind]
    return _any_of(kinds or [x for x in refusals if x])


def _any_of(reasons: Sequence[str]) -> str:
    """ "runs on cuda, rocm or xpu": what all begin with is said once."""
    distinct = list(dict.fromkeys(reasons))
    for same in ("runs on ", "needs compute capability "):
        if all(r.startswith(same) for r in distinct):
            distinct[1:] = [r.removeprefix(same) for r in distinct[1:]]
    return ", ".join(distinct[:-1]) + " or " + distinct[-1] if len(distinct) > 1 else distinct[0]


def rule_device(b: Backend, p: Problem) -> str | None:
    reason = _elsewhere(b.devices, p.device)
    if not reason:
        return None
    kind = any(r.kind == p.device.kind for r in b.devices)
    return Refusal(f"{reason}, this is {p.device}", RefusalKind.ROW if kind else RefusalKind.DEVICE)


@cache
def _within(version: str, want: str) -> bool:
    return SpecifierSet(want, prereleases=True).contains(version)


def rule_packages(b: Backend, p: Problem) -> str | None:
    found = [f for name, want in b.needs.items() if (f := _lacking(name, want, p.packages.get(name), p.device.kind))]
    if not found:
        return None
    needs, commands = (list(dict.fromkeys(x)) for x in zip(*((r.needs, r.command) for _, r in found), strict=True))
    remedy = Remedy(" and ".join(needs), " && ".join(commands))
    return Refusal("; ".join(text for text, _ in found), RefusalKind.INSTALL, remedy)


def _lacking(name: str, want: str, have: Package | None, kind: str) -> tuple[str, Remedy] | None:
    """What is wrong with an installed distribution, and what mends it on that kind of device; None where nothing is."""
    if name == CPU_KERNEL:
        if have is not None and not have.error:
            return None
        command = (have.remedy if have else "") or "python -m expertd_kernels.native.csrc.build"
        return have.error if have else "the compiled library is not there", Remedy("its compiled library", command)
    if name in FACTS:
        fault = f"{name} was not looked for" if have is None else have.error
        return (fault, Remedy(name, have.remedy if have else "")) if fault else None
    install = Remedy(f"{name} {want}".rstrip(), f"pip install '{name}{want}'")
    if name == "triton" and kind in ("rocm", "xpu"):  # another one than on the package index
        install = Remedy(install.needs, f"install torch's build for {kind}, which brings it (docs/install.md)")
    if have is None:
        return f"package {name}{want} is not installed", install
    if have.error:
        again = Remedy(
            f"a {install.needs} that imports",
            install.command.replace("pip install", "pip install --force-reinstall --no-deps"),
        )
        return f"package {name} {have.version} does not import: {have.error}", again
    if want and not _within(have.version, want):
        return f"package {name} {have.version} is installed, {want} is needed", install
    return None


def _support(b: Backend, s: Scheme, p: Problem) -> tuple[SchemeSupport | None, str | None]:
    """The line of the row that covers scheme `s`, or the nearest reason.  Of several the one that rounds activations
    as `p` asks, and of those the one for its device."""
    lines = [x for x in b.schemes if x.element is s.element]
    if not lines:
        return None, f"does not compute on {s.element.value} weights"
    reasons = [x.refusal(s) for x in lines]
    fitting = [x for x, reason in zip(lines, reasons, strict=True) if reason is None]
    if fitting:
        return max(
            fitting,
            key=lambda x: (p.activation_quant in x.activations, _elsewhere(x.devices, p.device) is None),
        ), None
    return None, f"{s.name}: " + " or ".join(dict.fromkeys(r for r in reasons if r))


def grade(b: Backend, p: Problem) -> Grade:
    """What is known of the row on `p`'s device with its weights."""
    lines = [_support(b, s, p)[0] for s in p.schemes]
    return b.grade(p.device, ran=all(x is None or x.ran for x in lines))


def rule_scheme(b: Backend, p: Problem) -> str | None:
    return "; ".join(r for s in p.schemes if (r := _support(b, s, p)[1])) or None


def rule_scheme_device(b: Backend, p: Problem) -> str | None:
    for s in p.schemes:
        line = _support(b, s, p)[0]
        if line is not None and rule_device(b, p) is None and (r := _elsewhere(line.devices, p.device)):
            return f"{s.name}: {r}, this is {p.device}"
    return None


def rule_mixed(b: Backend, p: Problem) -> str | None:
    return "w13 and w2 have different schemes" if len(p.schemes) > 1 and not b.mixed_schemes else None


def rule_activation_quant(b: Backend, p: Problem) -> str | None:
    for s in p.schemes:
        line = _support(b, s, p)[0]
        if line is not None and p.activation_quant not in line.activations:
            if p.activation_quant is ActivationQuant.NONE:
                rounds = ", ".join(sorted(a.value for a in line.activations))
                return f"rounds activations ({rounds}), and these are to stay in {p.compute_dtype}"
            return f"does not round activations to {p.activation_quant.value}"
    return None


def rule_static_scales(b: Backend, p: Problem) -> str | None:
    if p.static_scales or not p.activation_quant.static:
        return None
    lines = [_support(b, s, p)[0] for s in p.schemes]
    if any(x is not None and p.activation_quant in x.activations for x in lines):
        return f"rounds activations to {p.activation_quant.value} with static scales, and the checkpoint has none"
    return None


def rule_activation(b: Backend, p: Problem) -> str | None:
    a = p.activation
    if a.kind not in b.activations:
        return f"does not compute {a.kind.value}"
    for s in p.schemes:
        line = _support(b, s, p)[0]
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
    if a.limit is None:
        return None
    if not b.clamp:
        return "does not clamp before the activation"
    if a.kind in b.unclamped:
        return f"does not clamp before {a.kind.value}"
    for s in p.schemes:
        line = _support(b, s, p)[0]
        if line is not None and not line.clamp:
            return f"does not clamp before the activation with {s.name} weights"
    return None


def rule_bias(b: Backend, p: Problem) -> str | None:
    if not p.bias:
        return None
    lines = [_support(b, s, p)[0] for s in p.schemes]
    return "does not add expert biases" if not b.bias or any(x and not x.biased for x in lines) else None


def rule_act_order(b: Backend, p: Problem) -> str | None:
    return "does not permute columns (activation order)" if p.act_order and not b.act_order else None


def _multiples(b: Backend, p: Problem) -> tuple[int, int]:
    """Of H and of I: what the row needs, and what its lines for the two matrices need."""
    hidden, intermediate = b.hidden_multiple, b.intermediate_multiple
    for s, w13 in ((p.w13, True), (p.w2, False)):
        line = _support(b, s, p)[0]
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


def rule_batch_invariant(b: Backend, p: Problem) -> str | None:
    if p.batch_invariant and not b.batch_invariant:
        return "a token's bits depend on the batch that it is computed in"
    return None


RULES: tuple[Rule, ...] = (
    rule_device,
    rule_packages,
    rule_scheme,
    rule_scheme_device,
    rule_mixed,
    rule_activation_quant,
    rule_static_scales,
    rule_activation,
    rule_clamp,
    rule_bias,
    rule_act_order,
    rule_sizes,
    rule_experts,
    rule_dtype,
    rule_deterministic,
    rule_batch_invariant,
)


def judge(b: Backend, p: Problem) -> tuple[Refusal, ...]:
    """Every rule's refusal; () where the row serves the problem."""
    found = (rule(b, p) for rule in RULES)
    return tuple(r if isinstance(r, Refusal) else Refusal(r) for r in found if r)
