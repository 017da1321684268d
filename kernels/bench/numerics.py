"""`python kernels/bench/numerics.py`: every row of the table that runs here, over every scheme that it claims,
against the float32 reference.

A layer of each scheme is built in three shapes: small and aligned; 60 experts and sizes that no tile divides; 128
experts with biases and swigluoai, where the row takes them, and odd sizes, where it takes those.  Each is called with
several numbers of tokens and four kinds of routes: uniform; through an expert-parallel map that sends half of them
elsewhere (-1); all tokens to one expert; to a quarter of the experts, the others empty.  Output buffers start as NaN,
rows without a route must come out zero, and a row that promises the same bits is called twice.

Where one run is too short for all layers, the next one takes up its figures (--earlier) and checks what is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from expertd_kernels.bench.workers import NoResult, run_tasks
from expertd_kernels.common.problem import Device
from expertd_kernels.common.protocol import Experts
from expertd_kernels.oracle.decision import decide
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import build
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import COMPUTE_DTYPE, relative_error, tolerance
from numerics_grid import EVERY_SCHEME, GRIDS, Layer, layers
from numerics_table import ROUTINGS, Outcome, cells, earlier, markdown, write_figures

__all__ = ["check_layer", "check_point", "main", "routes"]


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
    dtype = COMPUTE_DTYPE[layer.compute_dtype]
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
    from expertd_kernels.bench import cpu, cuda
    from expertd_kernels.native import library as native

    if device.kind in ("cuda", "rocm"):
        facts = cuda.machine()
    elif native.kernel_error():
        facts = {"cpu": device.arch, "torch": str(torch.__version__), "compiled kernel": "none"}
    else:
        facts = cpu.machine()
    facts["python"] = ".".join(map(str, sys.version_info[:3]))
    there = {name: p.version for name, p in installed_packages(BACKENDS).items() if not p.error}
    return {**facts, **there}


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    p.add_argument("--device", choices=["cpu", "cuda", "xpu"], default="cpu")
    p.add_argument("--backend", metavar="LIST", default="", help="rows of the table, all, -NAME for all but it")
    p.add_argument("--scheme", metavar="LIST", default="", help="weights (default: all that rows claim)")
    p.add_argument("--grid", choices=sorted(GRIDS), default="full")
    p.add_argument("--m", metavar="LIST", default="", help="numbers of tokens (default: the grid's)")
    p.add_argument("--jobs", type=int, default=1, help="processes at a time; kernels compile beside each other")
    p.add_argument("--budget", type=float, default=480.0, metavar="S", help="seconds for all layers (default 480)")
    p.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for one layer (default 300)")
    p.add_argument("--out", type=Path, metavar="FILE.md", help="write the table here")
    p.add_argument("--write-every", type=float, default=10.0, metavar="S", help="seconds between writes of both")
    p.add_argument("--csv", type=Path, metavar="FILE", help="and every figure here")
    p.add_argument(
        "--earlier",
        type=Path,
        metavar="FILE",
        help="--csv of an earlier run on the same machine and versions: what was right there is not checked again",
    )
    return p


def _check(
    args: argparse.Namespace,
    todo: Sequence[Layer],
    tokens: Sequence[int],
    facts: Mapping[str, str],
    refused: Mapping[str, str],
    known: Mapping[Layer, Outcome],
) -> int:
    """Check all layers but the known ones in processes, write the files; the exit code."""
    results = {layer: Outcome(faults=("not run: the run ended before",), ran=False) for layer in todo} | dict(known)
    todo = [layer for layer in todo if layer not in known]
    rows = [b.name for b in BACKENDS]
    found = sorted(results, key=lambda layer: rows.index(layer.backend))

    def page() -> str:
        return markdown(facts, tokens, [(layer, results[layer]) for layer in found], refused)

    def write() -> None:
        if args.out:
            args.out.write_text(page())
        if args.csv:
            write_figures(args.csv, facts, tokens, [(layer, results[layer]) for layer in found])

    target = partial(check_layer, device_name=args.device, tokens=tokens)
    usable = partial(context_usable, args.device)
    written = time.monotonic()
    for layer, got in run_tasks(target, todo, jobs=args.jobs, budget_s=args.budget, limit_s=args.limit, usable=usable):
        outcome = Outcome(faults=(got.reason,), ran=got.ran) if isinstance(got, NoResult) else got
        results[layer] = outcome
        print(f"{' '.join(cells(layer, outcome, tokens))} {outcome.seconds:.1f} s", *outcome.faults[:2], flush=True)
        if time.monotonic() - written > args.write_every:  # so that a run that is killed leaves what it knew
            write()
            written = time.monotonic()
    write()
    print("\n".join(page().split("\n\n")[1:3]))
    ran = [o for o in results.values() if o.ran]
    return 0 if ran and not any(o.faults for o in ran) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where an answer was wrong, a name is unknown, or nothing was checked."""
    args = _parser().parse_args(argv)
    try:
        device = detect_device(args.device)
        grid = GRIDS[args.grid]
        tokens = tuple(int(m) for m in args.m.split(",")) if args.m else grid.tokens
        there = installed_packages(BACKENDS, probe_imports=True)  # one that is broken is told once, not for each layer
        names, schemes = ([n for n in text.split(",") if n] for text in (args.backend, args.scheme))
        todo, refused = layers(grid, device, there, names, schemes or EVERY_SCHEME)
    except (RuntimeError, ValueError) as e:
        print(e, file=sys.stderr)
        return 1
    facts = machine(device)  # of the code that is run now, whatever is committed meanwhile
    known: Mapping[Layer, Outcome] = {}
    if args.earlier:
        try:
            known = earlier(args.earlier, facts, tokens, todo)
        except (OSError, ValueError, KeyError, TypeError) as e:
            print(f"--earlier {args.earlier}: {type(e).__name__}: {e}", file=sys.stderr)
            return 1
        print(f"{len(known)} of {len(todo)} layers are known from {args.earlier}")
    return _check(args, todo, tokens, facts, refused, known)


if __name__ == "__main__":
    sys.exit(main())
