"""A backend as facts: one row of the table, and the lines in it.  Pure: imports no torch and no backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from expertd_kernels.common.problem import Device, Problem
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, ScaleType, Scheme

__all__ = ["CPU_KERNEL", "Backend", "DeviceRange", "Grade", "SchemeSupport"]

CPU_KERNEL = "expertd-cpu-kernel"
"""What the `cpu` rows need, among the packages: our own shared object, which an install without a compiler lacks."""


class Grade(IntEnum):
    """What is known of a backend on one device with one layer's weights.  Higher is better known.

    WRITTEN        only written: nothing was compared with anything
    CHECKED        compared on a CPU with the package's own Python code, or run in Triton's interpreter
    RUN_ELSEWHERE  run on hardware of the same kind, of another architecture
    RUN            run on hardware of this architecture, beside the float32 reference
    """

    WRITTEN = 0
    CHECKED = 1
    RUN_ELSEWHERE = 2
    RUN = 3

    def __str__(self) -> str:
        return (
            "not run on hardware, not compared with anything",
            "not run on hardware, compared with a reference on a CPU",
            "run on other devices of this kind, not on this one",
            "run on this hardware",
        )[self]


@dataclass(frozen=True)
class DeviceRange:
    """Devices a backend runs on.  least, most: inclusive capability range; arch: the only ones, if any are named."""

    kind: str
    least: tuple[int, int] = (0, 0)
    most: tuple[int, int] = (99, 99)
    arch: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """ "SM90", "x86_64", "rocm"."""
        if self.kind == "cuda" and self.least == self.most:
            return f"SM{self.least[0]}{self.least[1]}"
        return ", ".join(sorted(self.arch)) or self.kind

    def refusal(self, device: Device) -> str | None:
        """Why `device` is not among them; None if it is."""
        if device.kind != self.kind:
            return f"runs on {self.kind}"
        if self.arch and device.arch not in self.arch:
            return f"runs on {', '.join(sorted(self.arch))}"
        if device.kind == "cuda" and not self.least <= device.capability <= self.most:
            most = f" to {self.most[0]}.{self.most[1]}" if self.most < (99, 99) else " and up"
            return f"needs compute capability {self.least[0]}.{self.least[1]}{'' if self.least == self.most else most}"
        if device.kind == "rocm" and not self.least <= device.capability <= self.most:
            return "needs another gfx generation"
        return None


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
    clamp: whether the row's clamp before the activation works with these weights.
    ran: whether these weights were run where the row was (Backend.ran).

    Lines of one element may differ in their activations and devices: the rules judge by the line that fits both.
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
    clamp: bool = True
    ran: bool = True

    @property
    def variant(self) -> str:
        """What tells the line from others of its element: "int4 with zero points on e4m3_token"."""
        rounded = sorted(a.value for a in self.activations if a is not ActivationQuant.NONE)
        return (
            self.element.value
            + (" with zero points" if self.zeros else "")
            + (f" on {' or '.join(rounded)}" if rounded else "")
        )

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
    needs           distributions and version ranges, e.g. {"triton": ">=3.2"}; CPU_KERNEL, and build_facts.FACTS
    compute_dtypes  "bf16", "f32"
    act_order, bias, clamp, deterministic: features computed, not dropped
    native_threads  it computes on the threads of our own CPU library, whose number is settled before it packs
    capturable      a call may be captured in a CUDA graph: once warm it neither waits nor allocates
    in_place        the output may lie where the hidden states do: what writes it comes after all that read them
    e4m3_inputs     its experts take hidden states that are e4m3 already (protocol.E4m3Experts), see takes_e4m3
    batch_invariant  computes a token to the same bits whatever batch it comes in, if the problem demands it
    unclamped       functions before which it does not clamp, though before others it does
    hidden_multiple, intermediate_multiple: sizes it needs; 1 = any
    max_experts     0 = no limit
    ran             devices that it was run on, beside the float32 reference: its grade there (Grade.RUN)
    measured        papers of this repository with what was measured there: errors, and times
    checked         compared on a CPU with the package's own Python code, or run in Triton's interpreter
    fallback        right everywhere and fast nowhere: it stands last, whatever its grade
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
    deterministic: bool = True
    batch_invariant: bool = False
    native_threads: bool = False
    capturable: bool = False
    in_place: bool = False
    e4m3_inputs: bool = False
    mixed_schemes: bool = True
    unclamped: frozenset[ActivationKind] = frozenset()
    hidden_multiple: int = 1
    intermediate_multiple: int = 1
    max_experts: int = 0
    ran: tuple[DeviceRange, ...] = ()
    measured: tuple[str, ...] = ()
    checked: bool = True
    fallback: bool = False

    def grade(self, device: Device, ran: bool = True) -> Grade:
        """What is known of it on `device`; ran: whether the layer's weights were run where the row was."""
        if ran and any(r.refusal(device) is None for r in self.ran):
            return Grade.RUN
        if ran and any(r.kind == device.kind for r in self.ran):
            return Grade.RUN_ELSEWHERE
        return Grade.CHECKED if self.checked else Grade.WRITTEN

    @property
    def hardware(self) -> str:
        """What its docs must say of where it ran; "" where it ran everywhere that it claims."""
        if not self.ran:
            return "not run on hardware"
        if all(d in self.ran for d in self.devices) and all(s.ran for s in self.schemes):
            return ""
        devices = ", ".join(dict.fromkeys(str(r) for r in self.ran))
        ran = {s.element for s in self.schemes if s.ran}
        if not all(s.ran for s in self.schemes):
            names = ", ".join(dict.fromkeys(s.element.value for s in self.schemes if s.ran))
            without = [s.variant for s in self.schemes if s.element in ran and not s.ran]
            less = f" (not {', '.join(without)})" if without else ""
            return f"{names} run on {devices}{less}. All else not run on hardware"
        return f"run on {devices} only; on other devices not run on hardware"

    def takes_e4m3(self, problem: Problem) -> bool:
        """Whether its experts of `problem` compute from inputs that are e4m3 with a scale for 128 columns."""
        return self.e4m3_inputs and problem.activation_quant is ActivationQuant.E4M3_GROUP128
