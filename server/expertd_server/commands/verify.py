"""expertd verify: experts through the chosen backend, against the float32 reference and given answers."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expertd_server.commands.quantize import largest_error
from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from expertd_server.boot.verification import CaseResult, LayerResult

__all__ = ["add_parser", "run"]

_OPTIONS = (
    "checkpoint", "synthetic", "layer_template", "quantize", "layers", "experts", "shard", "device", "backend",
    "compute_dtype", "activations", "deterministic", "threads",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check a checkpoint's experts against the float32 reference",
        description="Loads each layer, runs the selected backend and the float32 reference on random inputs that reach"
        " every expert, and prints the relative error ||out - ref|| / ||ref||.  Answers in a file"
        " expected.safetensors of"
        " the checkpoint are compared, too.  The reference computes with the weights that are served, after --quantize"
        " the quantized ones; what --quantize changed in them is printed below, without a tolerance.  Exit code 0 if"
        " every error is within its tolerance, else 1.",
    )
    add_flags(parser, _OPTIONS)
    parser.add_argument(
        "--reference-experts",
        type=int,
        metavar="N",
        help="compare only N experts of each layer with the reference (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.compute_dtype == "f32":
        args.compute_dtype = "float32"
    try:
        config = resolve(args)
        if args.reference_experts is not None and args.reference_experts < 1:
            raise ConfigError(f"--reference-experts: got {args.reference_experts}, want a whole number >= 1")
    except ConfigError as e:
        print(f"expertd verify: {e}", file=sys.stderr)
        return 2
    import torch

    from expertd_kernels.oracle.probe import packages_for
    from expertd_kernels.oracle.table import BACKENDS
    from expertd_server.boot.assignment import BootError, assign_layers, open_source, resolve_device
    from expertd_server.boot.verification import read_cases, verify_layers

    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        device, where = resolve_device(config.device)
        source = open_source(config)
        assignments = assign_layers(config, source, device, packages_for(device, BACKENDS, config.cache))
        given = config.checkpoint is not None and config.quantize is None  # answers are those of the stored weights
        cases = read_cases(config.checkpoint / "expected.safetensors") if config.checkpoint and given else []
    except (BootError, ValueError) as e:
        print(f"expertd verify: {e}", file=sys.stderr)
        return e.exit_code if isinstance(e, BootError) else 2
    report = _Report(args.json, len(assignments))
    layers, compared = verify_layers(
        assignments, source, where, cases, reference_experts=args.reference_experts, done=report.done
    )
    if args.json:
        print(json.dumps(_as_json(layers, compared), indent=2))
    else:
        _print(report.console, layers, compared)
    if cases and not compared:
        what = f"expected.safetensors is of layer {cases[0].layer}, which was not verified with all its experts"
        print(f"expertd verify: {what}: not compared", file=sys.stderr)
    return 0 if all(r.ok for r in layers) and all(c.ok for c in compared) else 1


class _Report:
    """A line on stderr for each layer as it is done, so that a long run is seen to move."""

    def __init__(self, quiet: bool, layers: int) -> None:
        from rich.console import Console

        self.console = Console(width=None if sys.stdout.isatty() else 120)
        self._count, self._layers, self._quiet = 0, layers, quiet or layers < 2

    def done(self, r: LayerResult) -> None:
        self._count += 1
        if not self._quiet:
            state = f"relative error {r.relative_error:.1e}" if r.ok else "FAILED"
            print(
                f"[{self._count}/{self._layers}] layer {r.layer}: {state}, {r.seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )


def _number(x: float) -> float | None:
    """JSON has no infinity: null stands for an output that holds NaN, or for none at all."""
    return x if math.isfinite(x) else None


def _as_json(layers: Sequence[LayerResult], cases: Sequence[CaseResult]) -> dict[str, Any]:
    return {
        "layers": [
            {
                "layer": r.layer,
                "scheme": r.scheme,
                "backend": r.backend,
                "relative_error": _number(r.relative_error),
                "tolerance": r.tolerance,
                "ok": r.ok,
                "fault": r.fault,
                "quantization_error": _weights(r),
                "experts": r.experts,
                "experts_compared": r.experts_compared,
                "seconds": round(r.seconds, 4),
                "bytes_read": r.bytes_read,
            }
            for r in layers
        ],
        "expected": [
            {
                "case": c.case,
                "relative_error": _number(c.relative_error),
                "layer": c.layer,
                "against": c.against,
                "tolerance": c.tolerance,
                "ok": c.ok,
            }
            for c in cases
        ],
    }


def _weights(r: LayerResult) -> dict[str, float] | None:
    return None if r.quantization_error is None else dict(zip(("w13", "w2"), r.quantization_error, strict=True))


def _print(console: Console, layers: Sequence[LayerResult], cases: Sequence[CaseResult]) -> None:
    from rich.table import Table
    from rich.text import Text

    from expertd.common.tables import print_sentence, print_table

    def row(error: float, limit: float, ok: bool) -> tuple[str, str, Text]:
        return f"{error:.2e}", f"{limit:.0e}", Text("ok", "green") if ok else Text("FAILED", "bold red")

    table = Table(show_edge=False, pad_edge=False)
    for name in ("layer", "scheme", "backend", "experts", "error", "tolerance", "", "MiB", "s"):
        numeric = name in ("layer", "error", "tolerance", "MiB", "s")
        table.add_column(name, justify="right" if numeric else "left")
    for r in layers:
        some = f"{r.experts_compared} of {r.experts}" if r.experts_compared < r.experts else str(r.experts)
        table.add_row(
            str(r.layer), r.scheme, r.backend or "none", some, *row(r.relative_error, r.tolerance, r.ok),
            f"{r.bytes_read / 2**20:.1f}", f"{r.seconds:.2f}",
        )  # fmt: skip
    print_table(console, table)
    for r in layers:
        if r.fault:
            print_sentence(console, f"layer {r.layer}: {r.fault}")
    if lost := {r.layer: r.quantization_error for r in layers if r.quantization_error is not None}:
        print_sentence(console, largest_error(lost))
    if cases:
        console.print()
        table = Table(show_edge=False, pad_edge=False)
        for name in ("case", "layer", "compared with", "error", "tolerance", ""):
            table.add_column(name, justify="right" if name in ("layer", "error", "tolerance") else "left")
        for c in cases:
            table.add_row(c.case, str(c.layer), c.against, *row(c.relative_error, c.tolerance, c.ok))
        print_table(console, table)
