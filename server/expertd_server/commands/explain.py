"""expertd explain: the oracle's table, without loading weights."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from expertd_server.config import ConfigError, ServeConfig, add_flags, resolve

if TYPE_CHECKING:
    from expertd_kernels.sources.source import ExpertSource
    from expertd_server.boot.assignment import Assignment

__all__ = ["add_parser", "run"]

_NOT_HERE = (
    "--oracle measure takes a device of this machine and its installed packages; the table is of the rules alone"
)

_OPTIONS = (
    "checkpoint", "synthetic", "layer_template", "quantize", "layers", "experts", "shard", "backend", "compute_dtype",
    "activations", "deterministic", "oracle", "copies", "cache", "max_tokens", "threads",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="print which backend would serve each layer, and why not the others",
        description="Prints the oracle's table for each layer: every backend with every reason against it.  Reads"
        " headers, no weights; with --oracle measure, on a device that is here, also runs a tournament on one layer of"
        " each distinct problem, unless it is remembered.",
    )
    add_flags(parser, _OPTIONS)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="a device of this machine (auto, cpu, cuda[:N], xpu[:N]) or one that is not here, as sm100",
    )
    parser.add_argument(
        "--packages",
        choices=("installed", "assumed"),
        help="judge by this machine's packages, or as if all were installed (default for a device that is not here)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from expertd_kernels.oracle.probe import assumed_packages, installed_packages, packages_for
    from expertd_kernels.oracle.table import BACKENDS
    from expertd_kernels.problem import NAMED_DEVICES
    from expertd_server.boot.assignment import BootError, assign_layers, open_source, resolve_device
    from expertd_server.views.render import decisions_json, print_decisions

    try:
        config = resolve(args)
        named = NAMED_DEVICES.get(config.device)
        device = named or _present(resolve_device, config.device, list(NAMED_DEVICES))
        assumed = (args.packages or ("assumed" if named else "installed")) == "assumed"
        if assumed:
            packages = assumed_packages(BACKENDS)
        else:
            packages = installed_packages(BACKENDS) if named else packages_for(device, BACKENDS, config.cache)
        source = open_source(config)
        assignments = assign_layers(config, source, device, packages)
        if config.oracle == "measure":
            if named or assumed:
                print(f"expertd explain: nothing is measured: {_NOT_HERE}", file=sys.stderr)
            else:
                assignments = _measured(config, source, assignments)
    except (ConfigError, BootError) as e:
        print(f"expertd explain: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    if args.json:
        print(json.dumps(decisions_json(assignments), indent=2))
    else:
        print_decisions(Console(width=None if sys.stdout.isatty() else 120), assignments)
    return 0


def _measured(config: ServeConfig, source: ExpertSource, assignments: list[Assignment]) -> list[Assignment]:
    """The assignments with the tournament's results."""
    import torch

    from expertd_server.boot.assignment import resolve_device
    from expertd_server.boot.measuring import Tournaments
    from expertd_server.boot.prepare import Workshop

    if config.threads:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)[1]
    oracle = Tournaments.of(config, device, assignments)
    return assignments if oracle is None else oracle.run(assignments, Workshop(source, device))


def _present(resolve_device: Any, name: str, named: list[str]) -> Any:
    from expertd_server.boot.assignment import BootError

    try:
        return resolve_device(name)[0]
    except BootError as e:
        raise BootError(f"{e}; devices that need not be here: {', '.join(named)}") from e
