"""expertd explain: the oracle's table, without loading weights."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError, ServeConfig

if TYPE_CHECKING:
    from expertd_kernels.common.problem import Device
    from expertd_kernels.sources.source import ExpertSource
    from expertd_server.boot.assignment import Assignment

__all__ = ["add_parser", "run"]

_NOT_HERE = "--oracle measure needs a device of this machine and its installed packages; the table has the rules alone"

_OPTIONS = (
    "checkpoint", "synthetic", "layer_template", "quantize", "layers", "experts", "shard", "backend", "compute_dtype",
    "activations", "deterministic", "oracle", "copies", "cache", "max_tokens", "memory_limit", "warm_up_routes",
    "threads", "split", "routing_stats",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="show which backend would serve each layer, and why not the others",
        description="Shows for each layer which backend expertd serve would use, the reasons against every other"
        " one, and"
        " the memory that the server would need.  Reads headers, no weights, but for --oracle measure: on a device of"
        " this machine it reads them and benchmarks the eligible backends, unless --cache has the results.",
    )
    add_flags(parser, _OPTIONS)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device of this machine (auto, cpu, cuda[:N], rocm[:N], xpu[:N]), or any other: a product (h100, mi300x,"
        " b580), an architecture (sm100, gfx950) or a kind (cuda); several of this machine share layers (cuda:0,cpu)",
    )
    parser.add_argument(
        "--packages",
        choices=("installed", "assumed"),
        help="judge by the packages of this machine, or as if all were installed (default for other devices)",
    )
    parser.add_argument("--all", action="store_true", help="also show the backends for other devices, one line each")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from expertd.common.tables import print_sentence
    from expertd_kernels.oracle.probe import assumed_packages, installed_packages, packages_for
    from expertd_kernels.oracle.table import BACKENDS
    from expertd_server.boot.assignment import BootError, assign_layers, open_source, resolve_device
    from expertd_server.boot.memory import free_bytes, memory_json, memory_text, plan_memory
    from expertd_server.views.render import decisions_json, print_decisions

    try:
        config = resolve(args)
        if config.joins:
            return _run_joint(config, args)
        device, here = _device(config.device)
        assumed = (args.packages or ("installed" if here else "assumed")) == "assumed"
        if assumed:
            packages = assumed_packages(BACKENDS)
        else:
            packages = packages_for(device, BACKENDS, config.cache) if here else installed_packages(BACKENDS)
        source = open_source(config)
        assignments = assign_layers(config, source, device, packages)
        if config.oracle == "measure":
            if assumed or not here:
                print(f"expertd explain: nothing was measured: {_NOT_HERE}", file=sys.stderr)
            else:
                assignments = _measured(config, source, assignments)
    except (ConfigError, BootError) as e:
        print(f"expertd explain: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else e.exit_code
    memory = plan_memory(config, assignments)
    free = free_bytes(resolve_device(config.device)[1]) if here else 0
    if args.json:
        premises = {"packages": "assumed" if assumed else "installed", "memory": memory_json(memory, free)}
        print(json.dumps({**premises, **decisions_json(assignments)}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in _premises(config.device, device, here, assumed):
        print_sentence(console, line)
    print_decisions(console, assignments, every_row=args.all)
    for line in memory_text(memory, free):
        print_sentence(console, line)
    return 0


def _run_joint(config: ServeConfig, args: argparse.Namespace) -> int:
    """Of devices that share layers, all of this machine.  Raises BootError."""
    from rich.console import Console

    from expertd.common.tables import print_sentence
    from expertd_server.boot.assignment import WrongOptionError, open_source
    from expertd_server.boot.joint import JointAssigner, resolve_places
    from expertd_server.boot.memory import by_site, free_bytes, memory_json, memory_text, plan_memory
    from expertd_server.views.render import decisions_json, print_decisions

    if args.packages == "assumed":
        raise WrongOptionError(
            "--packages assumed: got it with several devices, want installed: they are of this machine"
        )
    places = resolve_places(config)
    assigner = JointAssigner(config, open_source(config), places)
    assigner.settle([free_bytes(p.device) for p in places])
    assignments = assigner.all()
    parts = [part for a in assignments for part in a.each]
    free = {p.name: free_bytes(p.device) for p in places}
    plans = [(name, plan_memory(own, these)) for name, own, these in by_site(config, assignments)]
    if args.json:
        premises = {"packages": "installed", "memory": {name: memory_json(plan, free[name]) for name, plan in plans}}
        print(json.dumps({**premises, "experts": assigner.shares_text(), **decisions_json(parts)}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    print_sentence(console, f"experts of each layer: {assigner.shares_text()}")
    print_decisions(console, parts, every_row=args.all)
    for name, plan in plans:
        for line in memory_text(plan, free[name]):
            print_sentence(console, f"{name}: {line}")
    return 0


def _device(name: str) -> tuple[Device, bool]:
    """The device of that name, and whether it is on this machine.  Raises BootError."""
    from expertd_kernels.common.problem import NAMED_DEVICES
    from expertd_kernels.oracle.devices import KINDS, named_device
    from expertd_server.boot.assignment import BootError, WrongOptionError, resolve_device

    named = named_device(name)
    if named is not None and name not in KINDS:
        return named, False
    try:
        return resolve_device(name)[0], True
    except BootError as e:
        if named is not None:
            return named, False
        names = ", ".join(NAMED_DEVICES)
        raise WrongOptionError(
            f"{e}; devices that need not be on this machine: {names}, or products such as h100"
        ) from e


def _premises(asked: str, device: Device, here: bool, assumed: bool) -> list[str]:
    """What the tables rest on, where that is not this machine as it is."""
    from expertd_kernels.oracle.devices import KINDS

    out = []
    if assumed:
        out.append(
            "assumed: all packages are installed, at suitable versions (--packages installed uses those of this"
            " machine)"
        )
    if not here and asked in KINDS:
        out.append(f"this machine has no {asked} device: the table is for {device.arch}")
    return out


def _measured(config: ServeConfig, source: ExpertSource, assignments: list[Assignment]) -> list[Assignment]:
    """The assignments with the autotuning's results."""
    import torch

    from expertd_server.boot.assignment import resolve_device
    from expertd_server.boot.autotuning import Autotuning
    from expertd_server.boot.prepare import Workshop

    if config.threads:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)[1]
    oracle = Autotuning.of(config, device, assignments)
    return assignments if oracle is None else oracle.run(assignments, Workshop(source, device))
