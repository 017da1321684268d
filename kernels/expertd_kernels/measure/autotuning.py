"""The oracle by measurement: every eligible backend packs the real weights, is checked against the float32 reference,
then timed over a grid of token counts.  `--oracle measure` uses it in place of the order of preference.

    results = measure(weights, decision, backends)      one Result a backend, refusals and errors included
    plan    = choose(results, copies=1)                 [(tokens up to, backend)]: one backend, or two with a crossover
    decision = with_results(decision, results, backends)

All are values; the results are kept in a JSON file under a key of device, versions and shapes (`Remembered`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from expertd_kernels.common.atomic_file import replacing
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import E4m3Experts, Experts, takes_e4m3
from expertd_kernels.common.refused import Refused
from expertd_kernels.common.sizes import CAPTURED_TOKENS
from expertd_kernels.measure.timing import LIMIT_S, captured, time_calls
from expertd_kernels.oracle.decision import Backend, Decision, Refusal, Verdict
from expertd_kernels.oracle.probe import device_fault
from expertd_kernels.packed.builder import build_backend
from expertd_kernels.packed.integrity import IntegrityRecord, boot_reference_experts, prove
from expertd_kernels.packed.selfcheck import check
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.canonical import Weights

__all__ = [
    "GRID",
    "BucketedExperts",
    "DeviceLostError",
    "MeasuringStoppedError",
    "Remembered",
    "Result",
    "choose",
    "measure",
    "with_results",
]

GRID = (1, 8, 64, 512)
"""Token counts that are timed: decode of one, of a few, of many sequences, and a prefill chunk."""

INPUTS = 4
"""Sets of inputs a token count, so that weights come from memory and not from a cache."""
GIVE_UP = 10.0
"""A backend that takes this many times the fastest one's time at some token count is not timed at larger ones."""
WORTH = 0.95
"""A second copy of the weights is taken only if the geometric mean of the times falls below this share."""


class DeviceLostError(Exception):
    """A backend left the accelerator in a state in which every later call fails; the text is for the user."""


class MeasuringStoppedError(Exception):
    """Measuring was asked to end before it had."""


@dataclass(frozen=True)
class Result:
    """What measuring one backend gave.  refusal: "" if it takes part; microseconds: by token count, the smallest ones
    only where it was given up."""

    backend: str
    refusal: str = ""
    relative_error: float | None = None
    microseconds: Mapping[int, float] = field(default_factory=dict)


def measure(
    weights: Weights,
    decision: Decision,
    backends: Sequence[Backend],
    grid: Sequence[int] = GRID,
    build: Callable[[Backend, Weights, Problem], Experts] | None = None,
    give_up: float = GIVE_UP,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """Results in the order of the decision's verdicts.  A backend that raises, or whose error is above the tolerance of
    the problem, is refused with the figure or the exception's text; it never stops the others, unless it lost the
    device to this process (DeviceLostError).

    build: how experts are made (default: builder.build_backend); tests inject broken ones.  give_up: see GIVE_UP.
    stopped: asked before each backend and each call; once it is true, MeasuringStoppedError is raised.
    """
    p = decision.problem
    make = build or build_backend
    go_on = partial(_require_going, stopped)
    rows = {b.name: b for b in backends}
    proof = prove(weights, p, reference_experts=boot_reference_experts(weights), device=weights.device)
    fastest: dict[int, float] = {}
    results = []
    for v in decision.verdicts:
        if not v.eligible:
            results.append(Result(v.backend, "; ".join(v.refusals)))
            continue
        go_on()
        try:
            backend = rows[v.backend]
            experts = make(backend, weights, p)
            results.append(_measure_one(backend, experts, proof, p, weights, grid, fastest, give_up, go_on))
        except MeasuringStoppedError:
            raise
        except Exception as e:
            what = str(e) if isinstance(e, Refused) else f"{type(e).__name__}: {e}"
            if fault := device_fault(weights.device):
                raise DeviceLostError(
                    f"the device is lost to this process: {fault}, when backend {v.backend} was measured; leave it out"
                    " by naming another --backend, and report this"
                ) from e
            results.append(Result(v.backend, f"failed when measured: {what}"))
    return results


def _require_going(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise MeasuringStoppedError


def _measure_one(
    backend: Backend,
    experts: Experts,
    proof: IntegrityRecord,
    p: Problem,
    weights: Weights,
    grid: Sequence[int],
    fastest: dict[int, float],
    give_up: float,
    go_on: Callable[[], None],
) -> Result:
    """fastest: least microseconds by token count so far; brought up to date.  go_on: called before each call."""

    def run(work: Callable[[], Tensor]) -> Tensor:
        go_on()
        return work()

    found = check(experts, proof, p, weights, run=run)
    if not found.ok:
        return Result(backend.name, f"self-check against the float32 reference: {found.fault}", found.relative_error)
    dtype, device = proof.x.dtype, proof.x.device
    times: dict[int, float] = {}
    for m in grid:
        sets = [
            random_inputs(
                m,
                p.hidden_size,
                weights.num_experts,
                min(p.top_k, weights.num_experts),
                seed=100 + i,
                dtype=dtype,
                device=device,
            )
            for i in range(INPUTS)
        ]
        out = torch.empty(m, p.hidden_size, dtype=dtype, device=device)

        def call(i: int, sets: Any = sets, out: Tensor = out) -> Tensor:
            go_on()
            return experts(*sets[i], out=out)

        graphs = backend.capturable and m <= CAPTURED_TOKENS and device.type == "cuda" and torch.version.hip is None
        with torch.inference_mode():
            times[m] = time_calls(captured(call, len(sets), device) if graphs else call, len(sets), device)
        fastest[m] = min(times[m], fastest.get(m, times[m]))
        if times[m] > give_up * fastest[m] or times[m] > LIMIT_S * 1e6:
            break
    return Result(backend.name, relative_error=found.relative_error, microseconds=times)


def _mean(times: Iterable[float]) -> float:
    """Geometric: each token count weighs the same."""
    logs = [math.log(t) for t in times]
    return math.exp(sum(logs) / len(logs))


def choose(results: Sequence[Result], copies: int = 1) -> list[tuple[int | None, str]]:
    """The plan: [(None, name)], or [(tokens up to, name), (None, other)] when copies >= 2 and a second copy of the
    weights is WORTH it.  Best = least geometric mean of the times over the grid; one that was given up is taken only
    where nothing else is left.  Empty when nothing takes part."""
    timed = [r for r in results if not r.refusal and r.microseconds]
    if not timed:
        return []
    most = max(len(r.microseconds) for r in timed)
    running = [r for r in timed if len(r.microseconds) == most]
    grid = sorted(running[0].microseconds)
    best = min(running, key=lambda r: _mean(r.microseconds.values()))
    plan: list[tuple[int | None, str]] = [(None, best.backend)]
    if copies < 2:
        return plan
    limit = _mean(best.microseconds.values()) * WORTH
    for below, above in pairwise(grid):
        edge = math.isqrt(below * above)
        small = min(running, key=lambda r: _mean(r.microseconds[m] for m in grid if m <= edge))
        large = min(running, key=lambda r: _mean(r.microseconds[m] for m in grid if m > edge))
        total = _mean((small if m <= edge else large).microseconds[m] for m in grid)
        if total < limit:
            limit, plan = total, [(edge, small.backend), (None, large.backend)]
    return plan


def with_results(decision: Decision, results: Sequence[Result], backends: Sequence[Backend]) -> Decision:
    """The decision with the measurement in its verdicts: times, their geometric mean, errors, refusals added; the row
    chosen is the best one that measuring left."""
    by_name = {r.backend: r for r in results}
    verdicts = []
    for v in decision.verdicts:
        r = by_name.get(v.backend)
        if r is None or not v.eligible:
            verdicts.append(v)
            continue
        verdicts.append(
            Verdict(
                v.backend,
                (Refusal(r.refusal),) if r.refusal else (),
                microseconds=_mean(r.microseconds.values()) if r.microseconds else None,
                relative_error=r.relative_error,
                times=tuple(r.microseconds.items()),
            )
        )
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
        self.takes_e4m3 = all(takes_e4m3(e) for _, e in plan)

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        experts = self._at(hidden_states.shape[0])
        return experts(hidden_states, topk_ids, topk_weights, router_weight_on_input=router_weight_on_input, out=out)

    def of_e4m3(
        self,
        codes: Tensor,
        scales: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor,
    ) -> Tensor:
        """See protocol.E4m3Experts."""
        experts = cast(E4m3Experts, self._at(codes.shape[0]))
        return experts.of_e4m3(
            codes, scales, topk_ids, topk_weights, router_weight_on_input=router_weight_on_input, out=out
        )

    def _at(self, tokens: int) -> Experts:
        return next(e for most, e in self.plan if most is None or tokens <= most)


@dataclass(frozen=True)
class Remembered:
    """Results of earlier autotuning runs: one JSON file for each (device, versions, shapes).  The self-check at boot
    still runs on the weights themselves, so a remembered winner is not trusted blindly."""

    folder: Path

    def path(
        self,
        p: Problem,
        device_name: str,
        version: str,
        backends: Sequence[Backend] = (),
        grid: Sequence[int] = GRID,
    ) -> Path:
        """device_name: the marketing name of the hardware, with the threads that compute; version: of expertd's code,
        so that other code is measured anew."""
        facts = {
            **{k: str(v) for k, v in vars(p).items() if k != "packages"},
            "packages": {n: x.version for n, x in sorted(p.packages.items())},
            "device_name": device_name,
            "version": version,
            "backends": [b.name for b in backends],
            "grid": list(grid),
            "torch": str(torch.__version__),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"tournament-{digest[:32]}.json"

    def find(self, path: Path) -> list[Result] | None:
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
        """Write the file, atomically.  Raises OSError."""
        with replacing(path) as f:
            f.write(json.dumps([asdict(r) for r in results], indent=1).encode())
