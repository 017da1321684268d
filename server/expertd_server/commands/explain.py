"""expertd explain: the oracle's table, without loading weights."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError, ServeConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from expertd_kernels.common.problem import Device, Package
    from expertd_kernels.sources.source import ExpertSource
    from expertd_server.boot.assignment import Assignment
    from expertd_server.boot.joint import Place
    from expertd_server.boot.memory import MemoryPlan

__all__ = ["add_parser", "run"]

_NOT_HERE = "--oracle measure needs a device of this machine and its installed packages; the table has the rules alone"

_ELSEWHERE = (
    "assumed: room for everything within --memory-limit, which bounds accelerators: not all devices are on this machine"
)

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
        " b580), an architecture (sm100, gfx950) or a kind (cuda); several share layers (cuda:0,cpu or h100,cpu)",
    )
    parser.add_argument(
        "--packages",
        choices=("installed", "assumed"),
        help="judge by the packages of this machine, or as if all were installed (default for other devices)",
    )
    parser.add_argument("--all", action="store_true", help="also show the backends for other devices, one line each")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from expertd_server.boot.assignment import BootError

    try:
        config = resolve(args)
        return _run_joint(config, args) if config.joins else _run_alone(config, args)
    except (ConfigError, BootError) as e:
        print(f"expertd explain: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else e.exit_code


def _run_alone(config: ServeConfig, args: argparse.Namespace) -> int:
    """Of one device.  Raises BootError."""
    from rich.console import Console

    from expertd.common.tables import print_sentence
    from expertd_server.boot.assignment import assign_layers, open_source, resolve_device
    from expertd_server.boot.memory import free_bytes, host_text, memory_json, memory_text, plan_memory
    from expertd_server.views.render import decisions_json, print_decisions

    device, here = _device(config.device)
    assumed = (args.packages or ("installed" if here else "assumed")) == "assumed"
    source = open_source(config)
    assignments = assign_layers(config, source, device, _packages(config, device, here, assumed))
    if config.oracle == "measure":
        if assumed or not here:
            print(f"expertd explain: nothing was measured: {_NOT_HERE}", file=sys.stderr)
        else:
            assignments = _measured(config, source, assignments)
    memory = plan_memory(config, assignments)
    free = free_bytes(resolve_device(config.device)[1]) if here else 0
    refusal = _refusal(memory, config, assignments, free)
    if args.json:
        premises = {"packages": "assumed" if assumed else "installed", "memory": memory_json(memory, free)}
        print(json.dumps({**premises, "does_not_fit": refusal, **decisions_json(assignments)}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in _premises([(config.device, device, here)], assumed):
        print_sentence(console, line)
    print_decisions(console, assignments, every_row=args.all)
    for line in [*memory_text(memory, free), host_text([memory]), *_fitting(refusal)]:
        print_sentence(console, line)
    return 0


def _run_joint(config: ServeConfig, args: argparse.Namespace) -> int:
    """Of devices that share layers.  Raises BootError."""
    from rich.console import Console

    from expertd.common.tables import print_sentence
    from expertd_server.boot.assignment import open_source
    from expertd_server.boot.joint import JointAssigner
    from expertd_server.boot.memory import by_site, free_bytes, host_text, memory_json, memory_text, plan_memory
    from expertd_server.views.render import decisions_json, print_decisions

    places, here = _places(config)
    assumed = (args.packages or ("installed" if here else "assumed")) == "assumed"
    packages = [_packages(config, p.kind, here, assumed) for p in places]
    assigner = JointAssigner(config, open_source(config), places, packages)
    free = {p.name: free_bytes(p.device) if here else 0 for p in places}
    assigner.settle([free[p.name] for p in places])
    assignments = assigner.all()
    parts = [part for a in assignments for part in a.each]
    plans = [(name, plan_memory(own, these)) for name, own, these in by_site(config, assignments)]
    if args.json:
        memory = {name: memory_json(plan, free[name]) for name, plan in plans}
        premises = {"packages": "assumed" if assumed else "installed", "memory": memory}
        print(json.dumps({**premises, "experts": assigner.shares_text(), **decisions_json(parts)}, indent=2))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in _premises([(p.name, p.kind, here) for p in places], assumed):
        print_sentence(console, line)
    if not here:
        print_sentence(console, _ELSEWHERE)
    print_sentence(console, f"experts of each layer: {assigner.shares_text()}")
    print_decisions(console, parts, every_row=args.all)
    for name, plan in plans:
        for line in memory_text(plan, free[name]):
            print_sentence(console, f"{name}: {line}")
    print_sentence(console, host_text([plan for _, plan in plans]))
    return 0


def _packages(config: ServeConfig, device: Device, here: bool, assumed: bool) -> Mapping[str, Package]:
    """By which the backends are judged.  here: whether the device is of this machine."""
    from expertd_kernels.oracle.probe import assumed_packages, installed_packages, packages_for
    from expertd_kernels.oracle.table import BACKENDS

    if assumed:
        return assumed_packages(BACKENDS)
    return packages_for(device, BACKENDS, config.cache) if here else installed_packages(BACKENDS)


def _refusal(plan: MemoryPlan, config: ServeConfig, assignments: list[Assignment], free: int) -> str | None:
    """Why `expertd serve` would not start for want of memory, and what would fit; None: the plan fits, as far as is
    known."""
    from expertd_server.boot.assignment import BootError
    from expertd_server.boot.memory import require_room

    try:
        require_room(plan, config, assignments, free)
    except BootError as e:
        return str(e)
    return None


def _fitting(refusal: str | None) -> list[str]:
    return [f"does not fit, expertd serve would not start: {refusal}"] if refusal else []


def _places(config: ServeConfig) -> tuple[list[Place], bool]:
    """The devices that share layers, and whether all of them are of this machine: only then is their memory known.
    Raises BootError."""
    import torch

    from expertd_server.boot.joint import Place, resolve_places

    found = [(name, *_device(name)) for name in config.devices]
    if all(here for _, _, here in found):
        return resolve_places(config), True
    return [
        Place(name, kind, torch.device("cuda" if kind.kind == "rocm" else kind.kind, site))
        for site, (name, kind, _) in enumerate(found)
    ], False


def _device(name: str) -> tuple[Device, bool]:
    """The device of that name, and whether it is on this machine.  A number (cuda:0, h100:1) tells devices that share
    layers apart.  Raises BootError."""
    from expertd_kernels.common.problem import NAMED_DEVICES
    from expertd_kernels.oracle.devices import KINDS, named_device
    from expertd_server.boot.assignment import BootError, WrongOptionError, resolve_device

    kind, _, number = name.partition(":")
    named = named_device(kind) if number.isdigit() or kind == name else None
    if named is not None and kind not in KINDS:
        return named, False
    try:
        return resolve_device("cpu" if kind == "cpu" else name)[0], True  # memory nodes: resolve_places()
    except BootError as e:
        if named is not None:
            return named, False
        names = ", ".join(NAMED_DEVICES)
        raise WrongOptionError(
            f"{e}; devices that need not be on this machine: {names}, or products such as h100"
        ) from e


def _premises(devices: Sequence[tuple[str, Device, bool]], assumed: bool) -> list[str]:
    """What the tables rest on, where that is not this machine as it is.  devices: (name asked for, device, whether it
    is on this machine)."""
    from expertd_kernels.oracle.devices import KINDS

    out = []
    if assumed:
        out.append(
            "assumed: all packages are installed, at suitable versions (--packages installed uses those of this"
            " machine)"
        )
    out += [
        f"this machine has no {name} device: the table is for {device.arch}"
        for name, device, here in devices
        if not here and name.partition(":")[0] in KINDS
    ]
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
