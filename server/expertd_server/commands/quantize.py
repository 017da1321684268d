"""expertd quantize: a quantized copy of an unquantized checkpoint, in a format that other tools read."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertd_server.config.parsers import argument, whole

if TYPE_CHECKING:
    from rich.console import Console

    from expertd_kernels.checkpoint.writer import Summary

__all__ = ["add_parser", "largest_error", "run"]

GIB = 1 << 30


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="write a quantized copy of an unquantized checkpoint",
        description="Quantizes the experts of a bf16, f16 or f32 checkpoint without calibration data (round to nearest,"
        " each scale searched) and writes a new folder: in the format compressed-tensors for integers, mxfp8, mxfp4 and"
        " e4m3 channels, fp8 for e4m3_block128, gpt-oss's own format for its mxfp4, ModelOpt for nvfp4.  All other"
        " tensors and files are copied.",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="folder with config.json and safetensors files")
    parser.add_argument(
        "destination", type=Path, metavar="DST", help="folder to create; it must not exist, or be empty"
    )
    parser.add_argument(
        "--scheme",
        required=True,
        metavar="NAME",
        help="scheme of the weights: int4_g128, int8, e4m3_block128, mxfp4, ...",
    )
    parser.add_argument(
        "--layer-template", metavar="TEMPLATE", help="names of the expert tensors of an unknown model family"
    )
    parser.add_argument("--shard-gib", type=float, default=4.0, metavar="N", help="largest file in GiB (default: 4)")
    parser.add_argument(
        "--threads", type=argument(whole(0)), default=0, metavar="N", help="CPU threads; 0 = torch's default"
    )


def run(args: argparse.Namespace) -> int:
    if args.shard_gib <= 0:
        print(f"expertd quantize: --shard-gib: got {args.shard_gib}, want a number above 0", file=sys.stderr)
        return 2
    import torch
    from rich.console import Console

    from expertd_kernels.checkpoint import open_checkpoint
    from expertd_kernels.checkpoint.writer import quantize_checkpoint
    from expertd_kernels.weights.quantize import scheme_named

    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console(stderr=True)
    start = time.perf_counter()
    try:
        scheme = scheme_named(args.scheme)
        source = open_checkpoint(args.source, layer_template=args.layer_template)
        with _Progress(console) as progress:
            summary = quantize_checkpoint(
                source, args.destination, scheme, shard_bytes=round(args.shard_gib * GIB), progress=progress.update
            )
    except (ValueError, OSError) as e:
        print(f"expertd quantize: {e}", file=sys.stderr)
        return 2 if isinstance(e, (ValueError, FileNotFoundError, NotADirectoryError)) else 1
    _print(summary, args.destination, time.perf_counter() - start)
    return 0


class _Progress:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("quantizing"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("experts"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: Any = None

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done)


def largest_error(errors: Mapping[int, tuple[float, float]]) -> str:
    """What quantizing changed, in a sentence.  errors: (w13, w2) by layer."""
    worst = max(errors, key=lambda n: max(errors[n]))
    w13, w2 = errors[worst]
    return f"largest relative error of the weights: layer {worst}, w13 {w13:.4f}, w2 {w2:.4f} (first expert of each)"


def _print(s: Summary, destination: Path, seconds: float) -> None:
    from expertd.common.tables import console, print_sentence

    layers = f"{s.layers} layer{'s' if s.layers > 1 else ''}"
    size = f"{s.bytes_before / 2**20:,.1f} -> {s.bytes_after / 2**20:,.1f} MiB"
    files = f"{len(s.files)} file{'s' if len(s.files) > 1 else ''}"
    for text in (
        f"{destination}: {s.experts} experts of {layers} in {s.scheme} ({s.format}), {size}, {files}, {seconds:.1f} s",
        largest_error(s.errors),
    ):
        print_sentence(console(), text)
