"""`python -m expertd_kernels.bench numerics`: every row of the table that runs here, over every scheme that it claims,
against the float32 reference.

A layer of each scheme is built in three shapes: small and aligned; 60 experts and sizes that no tile divides; 128
experts with biases and swigluoai, where the row takes them, and odd sizes, where it takes those.  Each is called with
several numbers of tokens and four kinds of routes: uniform; through an expert-parallel map that sends half of them
elsewhere (-1); all tokens to one expert; to a quarter of the experts, the others empty.  Output buffers start as NaN,
rows without a route must come out zero, and a row that promises the same bits is called twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from expertd_kernels.activation import Activation
from expertd_kernels.backends.protocol import Experts
from expertd_kernels.bench.rows import picked
from expertd_kernels.bench.workers import NoResult, run_tasks
from expertd_kernels.builder import build
from expertd_kernels.canonical import QuantTensor, Weights
from expertd_kernels.float32 import reference
from expertd_kernels.matrix import SCHEMES
from expertd_kernels.numerics import relative_error, tolerance
from expertd_kernels.oracle import Backend, decide
from expertd_kernels.probe import detect_device, installed_packages
from expertd_kernels.problem import Device, Package, Problem
from expertd_kernels.scheme import WHOLE, ActivationQuant, Scheme
from expertd_kernels.synthetic import random_inputs, random_weights
from expertd_kernels.table import BACKENDS

__all__ = ["GRIDS", "Grid", "Layer", "Outcome", "Shape", "check_layer", "layers", "main", "markdown", "routes"]

EXTRA_SCHEMES = ("int4_g32_zp", "int8_g32", "int8_g32_zp", "e4m3_g128")
"""Beside the kinds of the oracle's matrix: other group sizes with and without zero points."""
ROUTINGS = ("uniform", "absent", "one", "few")
STATIC_SCALE = 0.02
"""Static input scale: 448 steps reach 9, about what unit normals and their products do; for e2m1 a sixth of it, so that
e4m3 scales of blocks reach as far."""


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
        s = Scheme.parse(self.scheme)
        return Problem(
            device, s, s, self.experts, self.hidden, self.intermediate, self.top_k, Activation.parse(self.activation),
            bias=self.bias, activation_quant=self.activations, checkpoint_activation=self.activations,
            compute_dtype=self.compute_dtype, packages=packages,
        )  # fmt: skip

    def weights(self, device: str) -> Weights:
        """Integers with scales of both signs, as checkpoints have them; static input scales where they are used."""
        signed = Scheme.parse(self.scheme).element.integer
        w = random_weights(
            self.scheme, self.experts, self.hidden, self.intermediate, activation=Activation.parse(self.activation),
            bias=self.bias, signed_scales=signed, device=device, seed=self.experts,
        )  # fmt: skip
        static = {ActivationQuant.E4M3_TENSOR: 1.0, ActivationQuant.NVFP4: 6.0}.get(self.activations)
        if static is not None:
            w = replace(w, w13=_equal_segments(w.w13))
            w = replace(w, input_scales=torch.full((self.experts, 2), STATIC_SCALE / static, device=device))
        return w


@dataclass(frozen=True)
class Outcome:
    """errors: worst relative error by tokens; faults: a sentence each; empty = right."""

    errors: Mapping[int, float] = field(default_factory=dict)
    tolerance: float = 0.0
    faults: tuple[str, ...] = ()
    seconds: float = 0.0
    ran: bool = True


def _equal_segments(q: QuantTensor) -> QuantTensor:
    """Gate and up rows with the same scale of the matrix and second-level scale: some kernels have one for both."""
    fields = {}
    if q.global_scales is not None:
        fields["global_scales"] = q.global_scales[:, :1].expand_as(q.global_scales).contiguous()
    if q.scales is not None and q.scheme.rows == q.scheme.cols == WHOLE:
        fields["scales"] = q.scales[:, :1].expand_as(q.scales).contiguous()
    return replace(q, **fields)  # type: ignore[arg-type]


def _claims(backend: Backend) -> Iterator[tuple[str, ActivationQuant]]:
    """(scheme, rounding) that a line of the row covers, of the schemes that can be named."""
    for name in (*SCHEMES, *EXTRA_SCHEMES):
        s = Scheme.parse(name)
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
    grid: Grid, device: Device, packages: Mapping[str, Package], names: Sequence[str] = ()
) -> tuple[list[Layer], dict[str, str]]:
    """The layers to check, those of the first shape first; and why rows have none.  ValueError for an unknown name."""
    known = {b.name: b for b in BACKENDS}
    rows = picked(names or ["all"], list(known))
    found: list[Layer] = []
    refused: dict[str, str] = {}
    for shape in grid.shapes:
        for b in (known[n] for n in rows):
            for scheme, how in _claims(b):
                for dtype in sorted(b.compute_dtypes & set(shape.dtypes)):
                    layer, why = _fit(b, shape, scheme, how, dtype, device, packages)
                    found += [layer] if layer else []
                    refused.setdefault(b.name, "; ".join(why))
    served = {layer.backend for layer in found}
    return found, {name: why for name, why in refused.items() if name not in served}


def routes(kind: str, ids: Tensor, experts: int) -> Tensor:
    """ids [M, k] int32 of `experts` experts -> slots of the kind's pattern; "absent": ids of 2 * experts experts, of
    which every other one is held here."""
    if kind == "absent":
        here = torch.arange(2 * experts, device=ids.device, dtype=torch.int32)
        expert_map = torch.where(here % 2 == 0, here // 2, -1).int()
        return expert_map[ids.long()]
    if kind == "one":
        return torch.where(torch.arange(ids.shape[1], device=ids.device) == 0, experts // 2, -1).int().expand_as(ids)
    if kind == "few":
        few = max(ids.shape[1], experts // 4)
        return (ids[:, :1] + torch.arange(ids.shape[1], device=ids.device)).int() % few
    return ids


def check_point(
    experts: Experts, weights: Weights, layer: Layer, tokens: int, kind: str, same_bits: bool
) -> tuple[float, str]:
    """(relative error, fault or "") of one call."""
    E = layer.experts
    dtype = torch.float32 if layer.compute_dtype == "f32" else torch.bfloat16
    drawn = 2 * E if kind == "absent" else E
    x, ids, w = random_inputs(tokens, layer.hidden, drawn, layer.top_k, seed=tokens, dtype=dtype, device=weights.device)
    slots = routes(kind, ids, E).contiguous()
    outs = []
    for _ in range(2 if same_bits else 1):
        outs.append(torch.full_like(x, float("nan")))
        experts(x, slots, w, out=outs[-1])
    error = relative_error(outs[0], reference(weights, x, slots, w))
    limit = tolerance(layer.compute_dtype, layer.activations)
    at = f"{tokens} tokens, {kind} routes: "
    if not error <= limit:
        return error, f"{at}relative error {error:.2e}, want <= {limit:.0e}"
    if bool(outs[0][(slots < 0).all(dim=1)].any()):
        return error, f"{at}a row without a route is not zero"
    if not torch.equal(outs[0], outs[-1]):
        return error, f"{at}a second call gave other bits"
    return error, ""


def check_layer(layer: Layer, device_name: str, tokens: Sequence[int]) -> Outcome:
    """Build the layer and check every number of tokens with every kind of routes.  Never raises: a fault is text."""
    begin = time.perf_counter()
    errors: dict[int, float] = {}
    faults: list[str] = []
    limit = tolerance(layer.compute_dtype, layer.activations)
    try:
        torch.set_num_threads(1)
        decision = decide(layer.problem(detect_device(device_name), installed_packages(BACKENDS)), pin=layer.backend)
        weights = layer.weights(device_name)
        experts = build(decision, weights)
        same_bits = decision.require().deterministic
        for m in tokens:
            for kind in ROUTINGS:
                error, fault = check_point(experts, weights, layer, m, kind, same_bits)
                errors[m] = max(errors.get(m, 0.0), error)
                faults += [fault] if fault else []
    except Exception as e:
        text = " ".join(str(e).split())
        faults.append(f"{type(e).__name__}: {text[:300]}")
    return Outcome(errors, limit, tuple(faults), time.perf_counter() - begin)


def context_usable(device_name: str) -> bool:
    """Whether the process's GPU context still works: an illegal access breaks it for good."""
    if not device_name.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    torch.cuda.empty_cache()
    return True


def machine(device: Device) -> dict[str, str]:
    """Device, driver, versions, commit; without the compiled CPU kernel what is known without it."""
    from expertd_kernels.backends import cpu_native
    from expertd_kernels.bench import cpu, cuda

    if device.kind in ("cuda", "rocm"):
        facts = cuda.machine()
    elif cpu_native.kernel_error():
        facts = {"cpu": device.arch, "torch": str(torch.__version__), "compiled kernel": "none"}
    else:
        facts = cpu.machine()
    facts["python"] = ".".join(map(str, sys.version_info[:3]))
    there = {name: p.version for name, p in installed_packages(BACKENDS).items() if not p.error}
    return {**facts, **there}


def _cells(layer: Layer, outcome: Outcome, tokens: Sequence[int]) -> list[str]:
    how = "" if layer.activations is ActivationQuant.NONE else f" x {layer.activations.value}"
    kind = layer.activation + (" + bias" if layer.bias else "")
    errors = [f"{outcome.errors[m]:.1e}" if m in outcome.errors else "-" for m in tokens]
    verdict = "right" if not outcome.faults else "WRONG" if outcome.ran else "not run"
    return [f"`{layer.backend}`", layer.scheme + how, layer.compute_dtype, str(layer.experts), str(layer.top_k),
            f"{layer.hidden} / {layer.intermediate}", kind, *errors, f"{outcome.tolerance:.0e}", verdict]  # fmt: skip


def markdown(
    facts: Mapping[str, str], tokens: Sequence[int], found: Sequence[tuple[Layer, Outcome]], refused: Mapping[str, str]
) -> str:
    """The committed page: facts, counts, a line a layer, the faults, the rows that were left out."""
    ran = [o for _, o in found if o.ran]
    wrong = sum(bool(o.faults) for o in ran)
    head = ["backend", "weights", "compute", "E", "top_k", "H / I", "activation", *(f"M = {m}" for m in tokens),
            "tolerance", ""]  # fmt: skip
    lines = [head, ["---"] * len(head), *(_cells(layer, o, tokens) for layer, o in found)]
    faults = [f"- `{layer.backend}` {layer.scheme} E {layer.experts}: {f}" for layer, o in found for f in o.faults]
    left = [f"- `{name}`: {why}" for name, why in refused.items()]
    parts = [
        "# Relative error against the float32 reference",
        "Written by `python -m expertd_kernels.bench numerics`. " + "; ".join(f"{k} {v}" for k, v in facts.items()),
        f"{len(found)} layers, {len(ran)} checked, {wrong} wrong. A cell is the worst of {len(ROUTINGS)} kinds of"
        f" routes ({', '.join(ROUTINGS)}).",
        "\n".join("| " + " | ".join(cells) + " |" for cells in lines),
        *(["## Faults", "\n".join(faults)] if faults else []),
        *(["## Rows that do not run here", "\n".join(left)] if left else []),
    ]
    return "\n\n".join(parts) + "\n"


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m expertd_kernels.bench numerics", description=__doc__)
    p.add_argument("--device", choices=["cpu", "cuda", "xpu"], default="cpu")
    p.add_argument("--backend", metavar="LIST", default="", help="rows of the table, all, -NAME for all but it")
    p.add_argument("--grid", choices=sorted(GRIDS), default="full")
    p.add_argument("--m", metavar="LIST", default="", help="numbers of tokens (default: the grid's)")
    p.add_argument("--jobs", type=int, default=1, help="processes at a time; kernels compile beside each other")
    p.add_argument("--budget", type=float, default=480.0, metavar="S", help="seconds for all layers (default 480)")
    p.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for one layer (default 300)")
    p.add_argument("--out", type=Path, metavar="FILE.md", help="write the table here")
    p.add_argument("--json", type=Path, metavar="FILE", help="and every figure here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where an answer was wrong, a name is unknown, or nothing was checked."""
    args = _parser().parse_args(argv)
    try:
        device = detect_device(args.device)
        grid = GRIDS[args.grid]
        tokens = tuple(int(m) for m in args.m.split(",")) if args.m else grid.tokens
        there = installed_packages(BACKENDS, probe_imports=True)  # one that is broken is told once, not for each layer
        todo, refused = layers(grid, device, there, [n for n in args.backend.split(",") if n])
    except (RuntimeError, ValueError) as e:
        print(e, file=sys.stderr)
        return 1
    results: dict[Layer, Outcome] = {}
    target = partial(check_layer, device_name=args.device, tokens=tokens)
    usable = partial(context_usable, args.device)
    for layer, got in run_tasks(target, todo, jobs=args.jobs, budget_s=args.budget, limit_s=args.limit, usable=usable):
        outcome = Outcome(faults=(got.reason,), ran=got.ran) if isinstance(got, NoResult) else got
        results[layer] = outcome
        print(f"{' '.join(_cells(layer, outcome, tokens))} {outcome.seconds:.1f} s", *outcome.faults[:2], flush=True)
    found = [
        (layer, results[layer]) for layer in sorted(todo, key=lambda x: [b.name for b in BACKENDS].index(x.backend))
    ]
    page = markdown(machine(device), tokens, found, refused)
    if args.out:
        args.out.write_text(page)
    if args.json:
        rows = [{**asdict(a), "activations": a.activations.value, **asdict(o)} for a, o in found]
        args.json.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")
    print("\n".join(page.split("\n\n")[1:3]))
    ran = [o for _, o in found if o.ran]
    return 0 if ran and not any(o.faults for o in ran) else 1
