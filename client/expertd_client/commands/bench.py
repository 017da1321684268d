"""`expertctl bench codec`: the codec beside a bare stream of bytes and the stock protobuf classes, on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from expertd_client import bench_codec

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser("bench", help=text, description="Measures parts of the client on this machine.")
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    codec = "echoes of 8 KiB to 16 MiB: ours, bare bytes, stock protobuf"
    bench_codec.add_arguments(parts.add_parser("codec", help=codec, description=f"Times {codec}."))


def run(args: argparse.Namespace) -> int:
    return bench_codec.run_command(args)
