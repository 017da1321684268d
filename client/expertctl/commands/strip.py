"""`expertctl strip`: a copy of a checkpoint without its experts, for a frontend."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import progress

from expertd.common.tables import console
from expertd_client.engines.strip import strip

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "strip",
        help=text,
        description="Copies a checkpoint without the tensors of its routed experts, for an engine whose experts are"
        " served by expertd.  If nothing that is left is quantized, config.json loses its quantization entry.",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="folder with config.json and safetensors files")
    parser.add_argument(
        "destination", type=Path, metavar="DST", help="folder to create; it must not exist, or be empty"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def run(args: argparse.Namespace) -> int:
    out = console()
    columns = (progress.TextColumn("copying"), progress.BarColumn(), progress.DownloadColumn())
    with progress.Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        done = strip(args.source, args.destination, lambda n, total: bar.update(task, completed=n, total=total))
    if args.json:
        print(json.dumps(asdict(done)))
        return 0
    rest = "nothing of them is quantized" if done.plain else "some of them are quantized, as config.json says"
    out.print(
        f"{args.destination}: {done.tensors} tensors, {done.tensor_bytes / 2**20:,.1f} MiB in {len(done.files)}"
        f" file{'s' if len(done.files) != 1 else ''}; {rest}\n"
        f"left out: {done.left_out} tensors of experts, {done.left_out_bytes / 2**20:,.1f} MiB"
    )
    return 0
