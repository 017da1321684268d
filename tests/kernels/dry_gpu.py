"""A Hopper GPU that is not there: what a layer's calls launch, compiled for it by Triton and not started."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from kept_triton import output
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from expertd_kernels.backends import gluon_sm90, gluon_w8a8
from expertd_kernels.backends.gluon.shared.gpu import Gpu
from expertd_kernels.bench.cuda import shape_of
from expertd_kernels.common.problem import Device
from expertd_kernels.compiling.empty import grown
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.scheme import ActivationQuant

H200 = Gpu(torch.device("cpu"), "NVIDIA H200", 132)
REGISTERS, SHARED_BYTES, WARPS = 65536, 228 * 1024, 64
"""Of a multiprocessor; a CTA keeps 1 KiB of the shared memory for itself."""
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Loop:
    """An innermost loop with products: tensor core instructions, barriers, accesses of local memory, instructions."""

    products: int
    barriers: int
    spills: int
    instructions: int


@dataclass(frozen=True)
class Launch:
    """A kernel's name, what Triton made of it, and its programs."""

    kernel: str
    compiled: Any
    grid: tuple[int, ...]

    def registers(self, folder: Path) -> tuple[int, int]:
        """(registers, bytes of local memory) of a thread."""
        text = self._output("cuobjdump", folder, "-res-usage")
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found is not None, text
        return int(found[1]), int(found[2])

    def ctas(self, folder: Path) -> int:
        """CTAs that fit a multiprocessor."""
        each, warps = -(-self.registers(folder)[0] // 8) * 256, self.compiled.metadata.num_warps
        fit = REGISTERS // each // warps, SHARED_BYTES // (self.compiled.metadata.shared + 1024), WARPS // warps
        return min(fit)

    def loops(self, folder: Path) -> list[Loop]:
        """The innermost loops with products."""
        lines = [
            found[1] or found[2]
            for found in re.finditer(
                r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(.*?);)", self._output("nvdisasm", folder, "-c"), re.M
            )
        ]
        at = {line: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
        spans = []
        for i, line in enumerate(lines):
            back = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
            if back and at.get(back[1], i) < i and _count(lines[at[back[1]] : i], r"\b[HQI]G?MMA"):
                spans.append((at[back[1]], i))
        inner = [s for s in spans if not any(o != s and o[0] >= s[0] and o[1] <= s[1] for o in spans)]
        return [_loop(lines[first:end]) for first, end in inner]

    def _output(self, tool: str, folder: Path, *options: str) -> str:
        return output(TOOLS / tool, options, self.compiled.asm["cubin"], folder)


def _count(lines: list[str], pattern: str) -> int:
    return sum(re.search(pattern, line) is not None for line in lines)


def _loop(lines: list[str]) -> Loop:
    return Loop(
        _count(lines, r"\b[HQI]G?MMA"), _count(lines, r"\bBAR\.SYNC"), _count(lines, r"\b(LDL|STL)\b"),
        sum(not line.startswith(".L_x_") for line in lines),
    )  # fmt: skip


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def dry_gpu() -> Iterator[list[Launch]]:
    """While it lasts, kernels are compiled for sm_90 where they would be started, and listed."""
    launches: list[Launch] = []
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        launches.append(Launch(self.__name__, compiled, grid))
        return compiled

    JITFunction.run = compile_only
    driver.set_active(_Driver())
    try:
        yield launches
    finally:
        JITFunction.run, driver._active = run, active


def layer(model: str, scheme: str, rounding: ActivationQuant = ActivationQuant.NONE) -> Any:
    """A layer of the model (see bench.cuda.shape_of) on the GPU that is not there; its memory is never touched."""
    s = shape_of(model)
    weights = random_weights(scheme, 1, s.hidden_size, s.intermediate_size, activation=s.activation, bias=s.bias)
    weights = replace(weights, input_scales=torch.full((1, 2), 0.02))
    problem = problem_of(weights, Device("cuda", "sm90", (9, 0)), top_k=1, activation_quant=rounding)
    if rounding is ActivationQuant.NONE:
        from expertd_kernels.backends.gluon.weight_only.experts import GluonExperts

        packed = grown(gluon_sm90.pack(weights, problem), s.num_experts)
        return GluonExperts(packed, replace(problem, num_experts=s.num_experts, top_k=s.top_k), gpu=H200)
    from expertd_kernels.backends.gluon.w8a8.experts import W8A8Experts

    packed = grown(gluon_w8a8.pack(weights, problem), s.num_experts)
    return W8A8Experts(packed, replace(problem, num_experts=s.num_experts, top_k=s.top_k), gpu=H200)


def launches(experts: Any, model: str, tokens: int) -> list[Launch]:
    """Those of a call with so many tokens."""
    s = shape_of(model)
    with dry_gpu() as found:
        experts(
            torch.empty(tokens, s.hidden_size, dtype=torch.bfloat16),
            torch.empty(tokens, s.top_k, dtype=torch.int32),
            torch.empty(tokens, s.top_k),
        )
    return found
