"""Layer time of four equal servers under skewed routing, with replica slots for a tenth of the experts.

    python tests/load/skew.py simulate [--tokens 64,1024]     what the planner expects, by a surface like a CPU's
    python tests/load/skew.py real [--calls 20]               four `expertd serve` of a tiny model, moved to each plan

Routing is the load kit's hot:4:P, with P chosen so that MaxVio (routes of the hottest expert over the mean, less 1) is
0.2 to 4.  The hot experts are neighbours, so a plain split has them all at one server.  For each: layer time over that
at 0.2, with replicas by the plan for that load, and with the plain split.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, closing

import numpy as np
from numpy.typing import NDArray

from expertctl.bench.faults.processes import ServerProcess
from expertctl.common.workload import LayerShape, with_routes
from expertctl.load.routing import Routing
from expertctl.planner import observe
from expertctl.planner.expected import Part, expected
from expertctl.planner.plan import plan
from expertctl.planner.problem import Held, Place, Problem, placement_of
from expertctl.rebalancing.rebalance import Options, Progress, Rebalancer
from expertd.common.surface import Surface
from expertd.placement import Placement
from expertd_client.cluster import ExpertCluster

SERVERS, HOT = 4, 4
VIOLATIONS = (0.2, 0.5, 1.0, 2.0, 4.0)
ROUTE_US = 1000


def log_weights(shape: LayerShape, share: float) -> NDArray[np.float64]:
    return np.sort(Routing("hot", hot=HOT, share=share).log_weights(shape, 0))[::-1].copy()


def tokens_of(weights: NDArray[np.float64], tokens: int, k: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """[tokens, k] ids, those of a token different."""
    keys = weights + rng.gumbel(size=(tokens, len(weights)))
    return np.argpartition(-keys, k - 1, axis=1)[:, :k].astype(np.int32)


def load_of(weights: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """[experts] routes, of many tokens."""
    ids = tokens_of(weights, 8192, k, np.random.default_rng(1))
    return np.bincount(ids.ravel(), minlength=len(weights)).astype(np.float64)


def weights_for(shape: LayerShape, violation: float) -> NDArray[np.float64]:
    """Weights of which the routes have that MaxVio."""
    low, high = HOT / shape.num_experts, 0.999
    for _ in range(24):
        middle = (low + high) / 2
        load = load_of(log_weights(shape, middle), shape.top_k)
        hot = np.argsort(-load)[:HOT]
        low, high = (middle, high) if load[hot].mean() / load.mean() - 1 < violation else (low, middle)
    return log_weights(shape, (low + high) / 2)


def problem(load: NDArray[np.float64], addresses: list[str], extra: int) -> Problem:
    room = -(-(len(load) + extra) // SERVERS)
    return Problem((0,), (len(load),), load[None], tuple(Place(a, 1.0, room, a) for a in addresses))


def split(count: int) -> Held:
    held = np.zeros((1, SERVERS, count), np.bool_)
    for s in range(SERVERS):
        held[0, s, s * count // SERVERS : (s + 1) * count // SERVERS] = True
    return held


def simulate(args: argparse.Namespace) -> int:
    shape = LayerShape(0, 2048, 128, 8)
    extra = round(0.1 * shape.num_experts)
    points = tuple((e, e * r, 50.0 + 15.0 * e + 4.0 * e * r) for e in (1, 4, 16, 64, 128) for r in (1, 4, 16, 64))
    names = [f"s{n}" for n in range(SERVERS)]
    parts = {a: {0: [Part("cpu", frozenset(range(shape.num_experts)), Surface(points))]} for a in names}
    print(f"{SERVERS} servers, {shape.num_experts} experts, {extra} replica slots")
    print("MaxVio    tokens   planned us   over 0.2   plain us   over 0.2")
    first: dict[int, tuple[float, float]] = {}
    for violation in VIOLATIONS:
        load = load_of(weights_for(shape, violation), shape.top_k)
        p, plain = problem(load, names, extra), split(shape.num_experts)
        found = plan(p, least=1, extra=extra).held
        for tokens in args.tokens:
            us = [expected(p, h, parts, shape.top_k, (tokens,))[0].layer_us for h in (found, plain)]
            first.setdefault(tokens, (us[0], us[1]))
            ratios = [u / f for u, f in zip(us, first[tokens], strict=True)]
            print(f"{violation:6} {tokens:9} {us[0]:12.0f} {ratios[0]:10.2f} {us[1]:10.0f} {ratios[1]:10.2f}")
    return 0


def real(args: argparse.Namespace) -> int:
    shape = LayerShape(0, 256, 64, 4)
    extra, rng, faults = round(0.1 * shape.num_experts), np.random.default_rng(2), 0
    model = ["--synthetic", "tiny-many:int4_g128", "--layers", "0", "--device", "cpu", "--threads", "1"]
    more = ["--test-route-us", str(ROUTE_US), "--max-tokens", "256", "--admin-listen", "127.0.0.1:0"]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess([*model, *more, "--shard", f"{n}/{SERVERS}"])) for n in range(SERVERS)
        ]
        addresses = [s.ready() for s in servers]
        print("MaxVio   held          planned ms   over 0.2   plain ms   over 0.2   failed")
        first: list[float] = []
        rows = [(v, weights_for(shape, v)) for v in VIOLATIONS]
        took: dict[tuple[float, bool], float] = {}
        held = {}
        for violation, weights in [(v, w) for planned in (False, True) for v, w in rows]:
            planned = (violation, False) in took
            now = Placement.from_describe(observe.ask(addresses))
            p = problem(load_of(weights, shape.top_k), addresses, extra)
            if planned:
                found = plan(p, least=1, extra=extra).held
                held[violation] = found[0].sum(axis=1).tolist()
                with closing(
                    Rebalancer(placement_of(p, found, now.epoch + 1, now.fingerprint), options=Options())
                ) as m:
                    m.run(Progress())
            with ExpertCluster(addresses) as cluster:
                times = []
                for _ in range(args.calls):
                    ids = tokens_of(weights, 64, shape.top_k, rng)
                    begin = time.perf_counter()
                    try:
                        cluster.forward_request(with_routes(rng, shape, ids))
                    except Exception as e:
                        faults += 1
                        print(f"FAULT: {e}")
                    times.append(time.perf_counter() - begin)
            took[violation, planned] = statistics.median(times)
        for violation in VIOLATIONS:
            pair = [took[violation, True], took[violation, False]]
            first = first or pair
            a, b = (t / f for t, f in zip(pair, first, strict=True))
            print(
                f"{violation:6}   {held[violation]}  {1e3 * pair[0]:8.0f} {a:10.2f} {1e3 * pair[1]:10.0f} {b:10.2f}",
                faults,
            )
    return 1 if faults else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    ways = parser.add_subparsers(dest="way", required=True)
    a = ways.add_parser("simulate")
    a.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=[64, 1024])
    ways.add_parser("real").add_argument("--calls", type=int, default=20)
    args = parser.parse_args(argv)
    return simulate(args) if args.way == "simulate" else real(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
