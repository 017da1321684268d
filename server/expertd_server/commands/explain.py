"""expertd explain: the oracle's table, without loading weights."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from expertd_server.config import ConfigError, add_flags, resolve

__all__ = ["add_parser", "run"]

_OPTIONS = (
    "checkpoint", "synthetic", "layer_template", "quantize", "layers", "experts", "shard", "backend", "compute_dtype",
    "activations",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="print which backend would serve each layer, and why not the others",
        description="Prints the oracle's table for each layer: every backend with every reason against it.  Reads"
        " headers, no weights.",
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

    from expertd_kernels.probe import assumed_packages, installed_packages
    from expertd_kernels.problem import NAMED_DEVICES
    from expertd_kernels.table import BACKENDS
    from expertd_server.boot import BootError, open_source, plan_layers, resolve_device
    from expertd_server.render import decisions_json, print_decisions

    try:
        config = resolve(args)
        named = NAMED_DEVICES.get(config.device)
        device = named or _present(resolve_device, config.device, list(NAMED_DEVICES))
        assumed = (args.packages or ("assumed" if named else "installed")) == "assumed"
        packages = assumed_packages(BACKENDS) if assumed else installed_packages(BACKENDS)
        plans = plan_layers(config, open_source(config), device, packages)
    except (ConfigError, BootError) as e:
        print(f"expertd explain: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    if args.json:
        print(json.dumps(decisions_json(plans), indent=2))
    else:
        print_decisions(Console(width=None if sys.stdout.isatty() else 120), plans)
    return 0


def _present(resolve_device: Any, name: str, named: list[str]) -> Any:
    from expertd_server.boot import BootError

    try:
        return resolve_device(name)[0]
    except BootError as e:
        raise BootError(f"{e}; devices that need not be here: {', '.join(named)}") from e
