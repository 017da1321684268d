"""What `expertd verify` does with each layer: load, choose, pack, compare with the float32 reference, and with given
answers where the checkpoint brings them.

Given answers are a file `expected.safetensors` beside the weights: tensors `M<m>.hidden_states` [M, H],
`M<m>.topk_ids` [M, k], `M<m>.topk_weights` [M, k] and `M<m>.expected` [M, H] of one layer (metadata `layer`), with
unrounded activations; `M<m>.expected_actq` is the same with activations rounded as the checkpoint asks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Experts
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.decision import NoBackendError
from expertd_kernels.packed.builder import build
from expertd_kernels.packed.selfcheck import self_check
from expertd_kernels.sources.quantized import QuantizedSource
from expertd_kernels.sources.source import ExpertSource
from expertd_kernels.weights.numerics import COMPUTE_DTYPE, relative_error, tolerance, weight_errors
from expertd_kernels.weights.scheme import ActivationQuant
from expertd_server.boot.assignment import Assignment

__all__ = ["Case", "CaseResult", "LayerResult", "read_cases", "verify_layers"]

ACTQ_TOLERANCE = 2e-2
"""Against `expected_actq`: its intermediate stays in f32 where a kernel rounds it to bf16 before quantizing it, which
moves some values to the neighbouring code."""


@dataclass(frozen=True, eq=False)
class Case:
    """One batch of expected.safetensors.  expected_actq: None where the file has none."""

    name: str
    layer: int
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    expected: Tensor
    expected_actq: Tensor | None


@dataclass(frozen=True)
class CaseResult:
    """against: "expected" or "expected_actq"."""

    case: str
    layer: int
    against: str
    relative_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance


@dataclass(frozen=True)
class LayerResult:
    """backend: None where none was chosen; fault: why the layer is not ok, "" if it is.

    quantization_error: (w13, w2), the relative error that `--quantize` made in the weights of the first expert held, or
    None."""

    layer: int
    scheme: str
    backend: str | None
    relative_error: float
    tolerance: float
    experts_compared: int
    experts: int
    seconds: float
    bytes_read: int
    fault: str = ""
    quantization_error: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        return not self.fault


def read_cases(path: Path) -> list[Case]:
    """The batches of an expected.safetensors, smallest first; [] where there is no such file.  ValueError if it is
    not what this module's first lines describe."""
    if not path.is_file():
        return []
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            names = set(f.keys())
            layer = int((f.metadata() or {})["layer"])
            sizes = sorted(int(x[1]) for n in names if (x := re.fullmatch(r"M(\d+)\.expected", n)))

            def tensor(m: int, part: str) -> Tensor:
                return cast(Tensor, f.get_tensor(f"M{m}.{part}"))

            cases = [
                Case(
                    f"M{m}",
                    layer,
                    tensor(m, "hidden_states"),
                    tensor(m, "topk_ids"),
                    tensor(m, "topk_weights"),
                    tensor(m, "expected"),
                    tensor(m, "expected_actq") if f"M{m}.expected_actq" in names else None,
                )
                for m in sizes
            ]
    except (SafetensorError, KeyError, ValueError) as e:
        raise ValueError(f"{path.name}: {e}; want M<m>.hidden_states, .topk_ids, .topk_weights, .expected") from e
    return cases


def verify_layers(
    assignments: Sequence[Assignment],
    source: ExpertSource,
    device: torch.device,
    cases: Sequence[Case],
    *,
    reference_experts: int | None,
    done: Callable[[LayerResult], None],
) -> tuple[list[LayerResult], list[CaseResult]]:
    """Every layer, one in memory at a time; a layer that fails does not stop the others."""
    layers: list[LayerResult] = []
    results: list[CaseResult] = []
    for assignment in assignments:
        mine = [
            c for c in cases if c.layer == assignment.info.layer and len(assignment.held) == assignment.info.num_experts
        ]
        found, compared = _verify_layer(assignment, source, device, mine, reference_experts)
        layers.append(found)
        results += compared
        done(found)
    return layers, results


def _verify_layer(
    assignment: Assignment,
    source: ExpertSource,
    device: torch.device,
    cases: Sequence[Case],
    reference_experts: int | None,
) -> tuple[LayerResult, list[CaseResult]]:
    start, before = time.perf_counter(), _bytes_read(source)
    problem = assignment.decision.problem
    backend = None if assignment.decision.chosen is None else assignment.decision.chosen.name
    error, compared, fault, lost, read = float("inf"), 0, "", None, None
    limit = tolerance(problem.compute_dtype, problem.activation_quant)
    results: list[CaseResult] = []
    try:
        assignment.decision.require()
        every = len(assignment.held) == assignment.info.num_experts
        weights = source.load(assignment.info.layer, None if every else assignment.held).to(device)
        experts = build(assignment.decision, weights)
        check = self_check(experts, weights, problem, reference_experts=reference_experts, device=device)
        error, compared, fault = check.relative_error, check.experts_compared, check.fault
        results = [_compare(c, experts, problem, device) for c in cases]
        read = _bytes_read(source) - before
        lost = _quantization_error(source, assignment)
    except (NoBackendError, Refused, ImportError, ValueError, OSError, RuntimeError) as e:
        fault = str(e) if isinstance(e, (NoBackendError, ValueError)) else f"{type(e).__name__}: {e}"
    found = LayerResult(
        assignment.info.layer,
        problem.scheme_name,
        backend,
        error,
        limit,
        compared,
        len(assignment.held),
        time.perf_counter() - start,
        _bytes_read(source) - before if read is None else read,
        fault,
        lost,
    )
    return found, results


def _quantization_error(source: ExpertSource, assignment: Assignment) -> tuple[float, float] | None:
    """LayerResult's; that expert is read once more."""
    if not isinstance(source, QuantizedSource):
        return None
    layer, first = assignment.info.layer, assignment.held[:1]
    return weight_errors(source.load(layer, first), source.source.load(layer, first))


def _compare(case: Case, experts: Experts, problem: Problem, device: torch.device) -> CaseResult:
    """One given batch through the backend."""
    dtype = COMPUTE_DTYPE[problem.compute_dtype]
    x = case.hidden_states.to(device, dtype)
    out = torch.full_like(x, float("nan"))
    ids, weights = case.topk_ids.to(device, torch.int32), case.topk_weights.to(device, torch.float32)
    with torch.inference_mode():
        got = experts(x, ids.contiguous(), weights.contiguous(), out=out)
    rounded = problem.activation_quant is not ActivationQuant.NONE
    if rounded and case.expected_actq is not None:
        return CaseResult(
            case.name, case.layer, "expected_actq", relative_error(got, case.expected_actq), ACTQ_TOLERANCE
        )
    limit = tolerance(problem.compute_dtype, problem.activation_quant)
    return CaseResult(case.name, case.layer, "expected", relative_error(got, case.expected), limit)


def _bytes_read(source: ExpertSource) -> int:
    """Bytes of tensors read from disk so far; 0 for a source that reads none."""
    return int(getattr(source, "bytes_read", 0))
