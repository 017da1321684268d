"""`expertctl plan`: expert load and unequal servers -> a placement."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from expertctl.commands.options import add_credentials, credentials, new_file
from expertctl.common.counts import at_least, duration_s
from expertctl.planner import observe, picture, recorded
from expertctl.planner.expected import Part, expected, parts_of, speed_of
from expertctl.planner.observe import Counters, Machine
from expertctl.planner.plan import plan
from expertctl.planner.problem import held_of, placement_of
from expertctl.planner.recorded import Recorded
from expertd.common.tables import console, print_sentence
from expertd.errors import PlacementError
from expertd.placement import Placement
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.transports.address import parse_address

__all__ = ["add_parser", "run"]

_DETAILS = """The load comes from the metrics of the servers (--metrics, or "metrics" in the inventory), since they
started or in --window, or from a file (--trace).  The speed of a server is its number of routes per second of kernel
time, or without metrics what it measured when it started; its room is what its memory allows, less one layer for
moving.  Both can be set in the inventory (--servers), a JSON file:
{"10.0.0.1:50051": {"metrics": "10.0.0.1:9464", "speed": 2e6, "experts": 40, "host": "a", "delay_us": 200}}
The expected time of a layer, for batches of 1, 8 and 64 tokens, comes from what each server measured at its start,
or from a file (--surfaces), and from the network's delay there and back (delay_us).  A "zone"
is known as a "host" is; "drain": true empties a server.
Nothing is changed; expertctl apply moves the experts."""


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "plan",
        help=text,
        description="Computes which server should serve which experts, from the load of the experts and the speed and"
        " memory of the servers.",
        epilog=_DETAILS,
    )
    parser.add_argument(
        "address", metavar="ADDRESS", nargs="*", help="servers, which are asked for their experts and memory"
    )
    parser.add_argument(
        "--servers", type=Path, metavar="FILE", help="JSON inventory: servers with speed, memory, host, zone"
    )
    parser.add_argument("--current", type=Path, metavar="FILE", help="current placement, instead of asking the servers")
    parser.add_argument("--offline", action="store_true", help="ask no server: the files have everything")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="load: JSON {layer: [routes of each expert]}, or an npy file"
    )
    load.add_argument(
        "--window",
        type=duration_s,
        metavar="TIME",
        help="how long to count the load (default: all since the servers started)",
    )
    parser.add_argument("--metrics", type=at_least(1), metavar="PORT", help="metrics port of the servers, usually 9464")
    parser.add_argument("--record", type=new_file, metavar="FILE", help="write the measured load, as --trace reads it")
    parser.add_argument(
        "--max-moves", type=at_least(0), metavar="N", help="most experts that may move (default: no limit)"
    )
    parser.add_argument(
        "--copies", type=at_least(1), default=1, metavar="N", help="least replicas of each expert (default: 1)"
    )
    parser.add_argument(
        "--extra", type=at_least(0), metavar="N", help="additional replicas in each layer (default: as many as fit)"
    )
    parser.add_argument(
        "--groups",
        type=at_least(1),
        default=0,
        metavar="N",
        help="groups of experts that stay in one zone (default: none)",
    )
    parser.add_argument(
        "--surfaces",
        type=Path,
        metavar="FILE",
        help="what batches take at servers that do not run yet, as --record-surfaces wrote it; they are not asked",
    )
    parser.add_argument(
        "--record-surfaces", type=new_file, metavar="FILE", help="write what the servers measured when they started"
    )
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="file for the placement")
    parser.add_argument("--svg", type=new_file, metavar="FILE", help="file for a picture of it")
    parser.add_argument(
        "--timeout", type=duration_s, default=10.0, metavar="TIME", help="for each query (default: 10s)"
    )
    parser.add_argument("--json", action="store_true", help="print only the placement")
    add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    current = None if args.current is None else Placement.from_file(args.current)
    machines = _machines(args, current)
    described: dict[str, pb.DescribeResponse] = {}
    known = {} if args.surfaces is None else recorded.read(args.surfaces)
    machines = {a: machines.get(a, Machine()) for a in [*machines, *known]}
    if not args.offline:
        described = observe.ask([a for a in machines if a not in known], credentials(args), args.timeout)
        current = current or Placement.from_describe(described)
    if args.surfaces is not None:
        recorded.require_alike(args.surfaces, known, described)
    machines = {a: _measured(m, known.get(a)) for a, m in machines.items()}
    counted = _counted(args, {a: m for a, m in machines.items() if a not in known})
    loads = _loads(args, current, counted)
    problem = observe.problem_of(loads, observe.places_of(machines, described, counted, len(loads)))
    held = None if current is None else held_of(problem, current)
    found = plan(problem, held, max_moves=args.max_moves, least=args.copies, extra=args.extra, groups=args.groups)
    epoch, fingerprint = (0, "") if current is None else (current.epoch, current.fingerprint)
    placement = placement_of(problem, found.held, epoch + 1, fingerprint)
    rows = picture.bars(problem, held, found)
    if args.output is not None:
        args.output.write_text(placement.to_json(), encoding="utf-8")
    if args.svg is not None:
        args.svg.write_text(picture.svg(rows, picture.sentence(found)), encoding="utf-8")
    if args.json:
        print(placement.to_json(), end="")
        return 0
    out = console()
    out.print(picture.table(rows, out.width))
    print_sentence(out, picture.sentence(found))
    parts: dict[str, Mapping[int, Sequence[Part]]] = {**parts_of(described)}
    parts |= {a: {0: r.parts} for a, r in known.items()}
    top_k = max(
        [*(layer.top_k for d in described.values() for layer in d.layers), *(r.top_k for r in known.values())],
        default=0,
    )
    if after := expected(problem, found.held, parts, top_k) if top_k else []:
        out.print(picture.times([] if held is None else expected(problem, held, parts, top_k), after))
    if args.record_surfaces is not None:
        recorded.write(args.record_surfaces, described)
    for path in (args.output, args.svg, args.record, args.record_surfaces):
        if path is not None:
            out.print(f"written: {path}", soft_wrap=True)
    return 0


def _machines(args: argparse.Namespace, current: Placement | None) -> dict[str, Machine]:
    known = {} if args.servers is None else observe.inventory(args.servers)
    placed = () if current is None else (s.address for s in current.servers)
    addresses = dict.fromkeys([*args.address, *known, *(placed if not args.address and not known else ())])
    if not addresses:
        raise PlacementError.about("servers", got="none", want="addresses, --servers FILE or --current FILE")
    return {address: known.get(address, Machine()) for address in addresses}


def _require_alike(path: Path, loads: observe.Loads, current: Placement | None) -> None:
    """Raises PlacementError for a trace of another model."""
    for layer, row in loads.items():
        want = None if current is None or not current.num_experts else current.num_experts.get(layer, 0)
        if want is not None and want != len(row):
            raise PlacementError.about(
                f"{path}: layer {layer}",
                got=f"{len(row)} numbers",
                want=f"{want}, one for each expert" if want else "a layer that servers hold",
                remedy="is it another model's? expertctl plan --record writes one",
            )


def _measured(machine: Machine, found: Recorded | None) -> Machine:
    """With the speed that was recorded, where none is given."""
    if found is None or machine.speed:
        return machine
    return replace(machine, speed=speed_of({0: found.parts}, found.top_k))


def _counted(args: argparse.Namespace, machines: Mapping[str, Machine]) -> dict[str, Counters]:
    """What servers counted; {} where a trace says it, and speeds need not be measured."""
    urls = {a: m.metrics for a, m in machines.items() if m.metrics}
    if args.metrics is not None:
        urls = {a: parse_address(a).with_port(args.metrics) for a in machines} | urls
    if args.offline or not urls:
        return {}
    before = observe.scrape(urls, args.timeout) if args.window else {}
    if args.window:
        time.sleep(args.window)
    after = observe.scrape(urls, args.timeout)
    return {a: c.since(before.get(a, Counters())) for a, c in after.items()}


def _loads(args: argparse.Namespace, current: Placement | None, counted: Mapping[str, Counters]) -> observe.Loads:
    if args.trace is not None:
        loads = observe.read_loads(args.trace)
        _require_alike(args.trace, loads, current)
    elif not counted:
        raise PlacementError.about("load", got="none", want="--trace FILE, or --metrics PORT of servers that run")
    else:
        assert current is not None
        loads = observe.loads_of(counted.values(), current.num_experts)
        if not any(row.any() for row in loads.values()):
            remedy = "wait for calls" if args.window is None else "send calls during --window, or leave it out"
            raise PlacementError.about("load", got="none that any server counted", want="some", remedy=remedy)
    if args.record is not None:
        args.record.write_text(json.dumps({n: row.tolist() for n, row in loads.items()}), encoding="utf-8")
    return loads
