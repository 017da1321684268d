"""The oracle by measurement: every eligible backend packs the real weights, is checked against the float32 reference,
then timed over a grid of token counts.  `--oracle measure` uses it in place of the order of preference.

    results = measure(weights, decision, grid)     one Result a backend, refusals and errors included
    plan    = choose(results, copies=1)            [(tokens up to, backend)]: one backend, or two with a crossover

Both are values; the results are kept in a JSON file under a key of device, versions and shapes (`Remembered`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.protocol import Experts
from expertd_kernels.canonical import Weights
from expertd_kernels.float32 import reference
from expertd_kernels.numerics import relative_error, tolerance
from expertd_kernels.oracle import Backend, Decision, Refused, Verdict, load
from expertd_kernels.problem import Problem
from expertd_kernels.synthetic import random_inputs

__all__ = ["GRID", "BucketedExperts", "Remembered", "Result", "choose", "measure", "time_calls", "with_results"]

GRID = (1, 8, 64, 512)
"""Token counts that are timed: decode of one, of a few, of many sequences, and a prefill chunk."""

CHECK_TOKENS = 32
ROUNDS = 5
WORTH = 0.95
"""A second copy of the weights is taken only if the geometric mean of the times falls below this share."""


@dataclass(frozen=True)
class Result:
    """What measuring one backend gave.  refusal: "" if it takes part; microseconds: by token count."""

    backend: str
    refusal: str = ""
    relative_error: float | None = None
    microseconds: Mapping[int, float] = field(default_factory=dict)


def time_calls(call: Callable[[int], object], inputs: int, device: torch.device, rounds: int = ROUNDS) -> float:
    """Median microseconds of call(i), i going round the input sets so that weights come from memory, not from cache."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "xpu":
            torch.xpu.synchronize(device)

    call(0)
    wait()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for i in range(inputs):
            call(i)
        wait()
        times.append((time.perf_counter_ns() - begin) / inputs / 1e3)
    return sorted(times)[len(times) // 2]


def measure(
    weights: Weights,
    decision: Decision,
    backends: Sequence[Backend],
    grid: Sequence[int] = GRID,
    build: Callable[[Backend, Weights, Problem], Experts] | None = None,
) -> list[Result]:
    """Results in the order of the decision's verdicts.  A backend that raises, or whose error is above the tolerance of
    the problem, is refused with the figure or the exception's text; it never stops the others.

    build: how experts are made (default: pack and experts of the backend's module); tests inject broken ones.
    """
    p = decision.problem
    make = build or _build
    rows = {b.name: b for b in backends}
    check = random_inputs(
        CHECK_TOKENS, p.hidden_size, weights.num_experts, min(p.top_k, weights.num_experts), device=weights.device
    )
    expected = reference(weights, *check)
    results = []
    for v in decision.verdicts:
        if not v.eligible:
            results.append(Result(v.backend, "; ".join(v.refusals)))
            continue
        try:
            experts = make(rows[v.backend], weights, p)
            results.append(_measure_one(v.backend, experts, check, expected, p, weights, grid))
        except Exception as e:
            what = str(e) if isinstance(e, Refused) else f"{type(e).__name__}: {e}"
            results.append(Result(v.backend, f"failed when measured: {what}"))
    return results


def _build(backend: Backend, weights: Weights, p: Problem) -> Experts:
    module = load(backend)
    experts: Experts = module.experts(module.pack(weights, p), p)
    return experts


def _measure_one(
    name: str,
    experts: Experts,
    check: tuple[Tensor, Tensor, Tensor],
    expected: Tensor,
    p: Problem,
    weights: Weights,
    grid: Sequence[int],
) -> Result:
    dtype = torch.float32 if p.compute_dtype == "f32" else torch.bfloat16
    x, ids, w = check
    out = torch.full((x.shape[0], p.hidden_size), float("nan"), dtype=dtype, device=x.device)
    error = relative_error(experts(x.to(dtype), ids, w, out=out), expected)
    bound = tolerance(p.compute_dtype, p.activation_quant)
    if not error <= bound:
        return Result(name, f"relative error {error:.2e} against the float32 reference, tolerance {bound:.0e}", error)
    times = {}
    for m in grid:
        sets = [
            random_inputs(
                m, p.hidden_size, weights.num_experts, ids.shape[1], seed=100 + i, dtype=dtype, device=x.device
            )
            for i in range(4)
        ]
        outs = torch.empty(m, p.hidden_size, dtype=dtype, device=x.device)
        times[m] = time_calls(lambda i, s=sets, o=outs: experts(*s[i], out=o), len(sets), x.device)  # type: ignore[misc]
    return Result(name, relative_error=error, microseconds=times)


def choose(results: Sequence[Result], copies: int = 1) -> list[tuple[int | None, str]]:
    """The plan: [(None, name)], or [(tokens up to, name), (None, other)] when copies >= 2 and a second copy of the
    weights is WORTH it.  Best = least geometric mean of the times over the grid.  Empty when nothing takes part."""
    running = [r for r in results if not r.refusal and r.microseconds]
    if not running:
        return []
    grid = sorted(running[0].microseconds)

    def cost(times: Iterable[float]) -> float:
        return sum(math.log(t) for t in times)

    best = min(running, key=lambda r: cost(r.microseconds.values()))
    plan: list[tuple[int | None, str]] = [(None, best.backend)]
    if copies < 2:
        return plan
    limit = cost(best.microseconds.values()) + len(grid) * math.log(WORTH)
    for below, above in pairwise(grid):
        edge = math.isqrt(below * above)
        small = min(running, key=lambda r: cost(r.microseconds[m] for m in grid if m <= edge))
        large = min(running, key=lambda r: cost(r.microseconds[m] for m in grid if m > edge))
        total = cost(small.microseconds[m] for m in grid if m <= edge)
        total += cost(large.microseconds[m] for m in grid if m > edge)
        if total < limit:
            limit, plan = total, [(edge, small.backend), (None, large.backend)]
    return plan


def with_results(decision: Decision, results: Sequence[Result], backends: Sequence[Backend]) -> Decision:
    """The decision with the measurement in its verdicts: mean microseconds over the grid, refusals added."""
    by_name = {r.backend: r for r in results}
    verdicts = []
    for v in decision.verdicts:
        r = by_name.get(v.backend)
        if r is None or not v.eligible:
            verdicts.append(v)
            continue
        mean = sum(r.microseconds.values()) / len(r.microseconds) if r.microseconds else None
        refusals = (r.refusal,) if r.refusal else ()
        verdicts.append(Verdict(v.backend, refusals, microseconds=mean, relative_error=r.relative_error))
    plan = choose(results)
    chosen = next((b for b in backends if plan and b.name == plan[0][1]), None)
    return replace(decision, chosen=chosen, verdicts=tuple(verdicts))


class BucketedExperts:
    """One layer served by different backends for small and large batches: plan[i] = (tokens up to, experts)."""

    def __init__(self, plan: Sequence[tuple[int | None, Experts]]) -> None:
        assert plan, "a plan has at least one entry"
        assert plan[-1][0] is None, "the last entry of a plan has no bound"
        self.plan = tuple(plan)
        self.backend = "+".join(dict.fromkeys(e.backend for _, e in plan))

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        tokens = hidden_states.shape[0]
        experts = next(e for most, e in self.plan if most is None or tokens <= most)
        return experts(hidden_states, topk_ids, topk_weights, router_weight_on_input=router_weight_on_input, out=out)


@dataclass(frozen=True)
class Remembered:
    """Results of earlier tournaments: one JSON file for each (device, versions, shapes).  The self-check at boot still
    runs on the weights themselves, so a remembered winner is not trusted blindly."""

    folder: Path

    def path(self, p: Problem, device_name: str, version: str) -> Path:
        """device_name: the marketing name of the hardware; version: of expertd, so that a new release measures anew."""
        facts = {
            **{k: str(v) for k, v in vars(p).items() if k != "packages"},
            "packages": {n: x.version for n, x in sorted(p.packages.items())},
            "device_name": device_name,
            "version": version,
            "torch": str(torch.__version__),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"tournament-{digest[:32]}.json"

    def load(self, path: Path) -> list[Result] | None:
        """The results at `path`; None when there are none or the file is damaged."""
        try:
            rows: list[dict[str, Any]] = json.loads(path.read_text())
            return [
                Result(
                    r["backend"],
                    r["refusal"],
                    r["relative_error"],
                    {int(m): float(us) for m, us in r["microseconds"].items()},
                )
                for r in rows
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def store(self, path: Path, results: Sequence[Result]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps([asdict(r) for r in results], indent=1))
        part.replace(path)
