"""Experts that are moved among devices as routing drifts (--move-rate), beside a placement by frequency that stays.

    python tests/load/drift.py simulate [--shares 0.1,0.3] [--minutes 10] [--rate 200MiB]
    python tests/load/drift.py real [--slow-us 200] [--seconds 60]

simulate: the server's own decisions on a virtual clock, for layers of 128 experts, 8 a token.  What batches take comes
from a plane each for a GPU and its host (GPU, CPU below).  Both placements begin with the most used experts on the GPU.
Routing is Zipf 1.1, and every --every seconds a tenth of the experts change ranks; rows "even" have even routing.  The
ratio is the time of all batches, of what stays over what is moved.  "At most" is over what somebody would take who
knows the popularity of every moment and moves at once.

real: one server with two memory nodes of this host, one of them slowed, with and without moves, for the same calls.
Every answer is compared with the float32 reference; the exit code is 1 where one is wrong or a call fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertd.common.surface import Surface
from expertd_server.config.parsers import size
from expertd_server.residence.following import Following

E, K = 128, 8
LAYER_BYTES = 290 << 20
"""Of packed weights of a layer of Qwen3-30B-A3B in int4."""
PACK_S = 0.6
"""That making such a layer takes in the simulation."""
GPU, CPU = (48.0, 2.1, 0.05), (50.0, 62.0, 1.5)
"""Microseconds: of any batch, of each expert that it reaches, of each route.  The lines lie near the medians of one run
on an H200 with its 16 cores: 64, 146 and 222 us for 96 experts, 150 to 330, 1,018 and 1,818 for 32, with 1, 8 and 32
tokens of even routes."""


def line(start: float, expert: float, route: float, most: int = E) -> Surface:
    """A surface that is a plane."""
    counts = [e for e in (1, 2, 4, 8, 16, 32, 64, 128) if e <= most]
    return Surface(tuple((e, e * r, start + expert * e + route * e * r) for e in counts for r in (1, 4, 16, 64)))


class Routing:
    """Popularity of the experts of one layer, Zipf's by rank; of those, a part change their ranks now and then."""

    def __init__(self, experts: int, exponent: float, part: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
        self.rank, self.part = self.rng.permutation(experts), part

    @property
    def share(self) -> NDArray[np.float64]:
        found = self.weights[self.rank]
        return np.asarray(found / found.sum())

    def drift(self) -> None:
        """A part of the experts exchange their ranks among each other."""
        n = max(2, round(self.part * len(self.rank)))
        some = self.rng.choice(len(self.rank), n, replace=False)
        self.rank[some] = self.rank[np.roll(some, 1)]

    def tokens(self, tokens: int, k: int) -> NDArray[np.int32]:
        """[tokens, k] ids, those of a token different."""
        keys = np.log(self.share) + self.rng.gumbel(size=(tokens, len(self.rank)))
        return np.argpartition(-keys, k - 1, axis=1)[:, :k].astype(np.int32)


def first(share: NDArray[np.float64], fast: int) -> NDArray[np.int64]:
    """By frequency: the most used on device 0."""
    where = np.ones(len(share), np.int64)
    where[np.argsort(-share, kind="stable")[:fast]] = 0
    return where


class Simulated:
    """Layers on a GPU and its host, computed in turn, with the decisions of a server that moves experts."""

    def __init__(self, tokens: int, fast: int, exponent: float, args: argparse.Namespace) -> None:
        self.args, self.surfaces, self.tokens = args, [line(*GPU, fast), line(*CPU)], tokens
        self.routing = [Routing(E, exponent, args.part, seed) for seed in range(args.layers)]
        self.known: dict[tuple[int, int, int], float] = {}
        self.stays = [first(r.share, fast) for r in self.routing]
        self.where, self.best, self.fast = [w.copy() for w in self.stays], list(self.stays), fast
        self.following = Following(args.rate)
        self.moves = 0

    def run(self) -> tuple[float, float, float]:
        """Seconds of all batches (that stays, that is moved, with the most used of every moment on the GPU).  All see
        the same batches; the clock is the second's."""
        now = look = 0.0
        drift, total = self.args.every, np.zeros(3)
        made: tuple[float, int, NDArray[np.int64]] | None = None
        while now < 60 * self.args.minutes:
            for n, r in enumerate(self.routing):
                routes = np.bincount(r.tokens(self.tokens, K).ravel(), minlength=E)
                took = [self.took(routes, w) for w in (self.stays[n], self.where[n], self.best[n])]
                total += took
                now += self.args.layers_of * took[1]
                self.following.count(n, routes, 1, now)
            if made is not None and now >= made[0]:
                self.where[made[1]], made = made[2], None
            if made is None and now >= look:
                layers = {n: (w, self.surfaces) for n, w in enumerate(self.where)}
                found = self.following.best(layers, now)
                look = now + 2.0
                if found is not None:
                    took_s = PACK_S * self.args.layers_of
                    made = now + took_s, found[0], found[1].where
                    look = now + took_s + self.following.rest_s(LAYER_BYTES * self.args.layers_of, took_s)
                    self.moves += found[1].moved
            if now >= drift:
                drift += self.args.every
                for n, r in enumerate(self.routing):
                    r.drift()
                    self.best[n] = first(r.share, self.fast)
        return float(total[0]), float(total[1]), float(total[2])

    def took(self, routes: NDArray[np.int64], where: NDArray[np.int64]) -> float:
        """Of a batch, seconds."""
        out = 0.0
        for s, surface in enumerate(self.surfaces):
            of = routes[where == s]
            key = s, int(np.count_nonzero(of)), int(of.sum())
            if key not in self.known:
                self.known[key] = float(surface(np.array([key[1]]), np.array([key[2]]))[0]) * 1e-6
            out = max(out, self.known[key])
        return out


def simulate(args: argparse.Namespace) -> int:
    print(f"{args.layers * args.layers_of} layers of {E} experts, {K} a token, {args.minutes:g} minutes")
    print("routing    on the GPU   tokens   stays/moved   at most   experts moved")
    for name, exponent in (("Zipf 1.1", 1.1), ("even", 0.0)):
        for share in args.shares:
            for tokens in args.tokens:
                world = Simulated(tokens, round(share * E), exponent, args)
                stays, moved, best = world.run()
                figures = f"{stays / moved:13.3f} {stays / best:9.3f} {world.moves:15}"
                print(f"{name:10} {share:10.0%} {tokens:8} {figures}", flush=True)
    return 0


# ---- for real --------------------------------------------------------------------------------------------------------


class Real:
    """Servers `stays` and `moves`, called in turn with the same batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from expertd_kernels.sources.synthetic import SyntheticModel

        self.args, self.torch = args, torch
        source = SyntheticModel.parse(args.model, "cpu")
        self.info, self.weights = source.info(0), source.load(0)
        self.routing = Routing(self.info.num_experts, args.exponent, args.part, 1)
        self.faults = 0

    def run(self) -> int:
        from served import Server

        from expertd_client import ExpertClient

        out, a = self.args.out, self.args
        out.mkdir(parents=True, exist_ok=True)
        stats, count = out / "stats.json", self.info.num_experts
        stats.write_text(json.dumps({"0": (1e6 * self.routing.share).tolist()}))
        fast = max(1, round(a.fast * count))
        options = ["--synthetic", a.model, "--layers", "0", "--device", "cpu:0,cpu:1", "--threads", "2"]
        options += ["--split", f"{fast},{count - fast}", "--routing-stats", str(stats), "--max-tokens", "64"]
        options += ["--test-part-us", f"0,{a.slow_us}", "--metrics-listen", "127.0.0.1:0"]
        cores = sorted(os.sched_getaffinity(0))
        env = {"EXPERTD_CPU_NODES": f"{cores[0]};{cores[-1]}"}
        servers = {
            "stays": Server("stays", options, out / "stays.log", env),
            "moves": Server("moves", [*options, "--move-rate", str(a.rate)], out / "moves.log", env),
        }
        try:
            for server in servers.values():
                server.wait(120)
            clients = {name: ExpertClient(s.address, timeout_s=30) for name, s in servers.items()}
            took = self.calls(clients)
            parts = clients["moves"].describe().layers[0].parts
            print(f"in the end: {', '.join(f'{p.device}: {p.why}' for p in parts)}")
        finally:
            for server in servers.values():
                if server.process.poll() is None:
                    server.stop(30)
        self.tell(took, servers["moves"].text())
        return 1 if self.faults else 0

    def calls(self, clients: dict[str, object]) -> dict[str, list[tuple[float, float]]]:
        """(when, seconds) of each call."""
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
        begin, drift = time.monotonic(), self.args.every
        while (now := time.monotonic() - begin) < self.args.seconds:
            if now > drift and now < 0.75 * self.args.seconds:
                drift += self.args.every
                self.routing.drift()
            batch = self.batch()
            right = self.right(batch)
            for name, client in clients.items():
                at = time.perf_counter()
                try:
                    answer = client.forward(0, *batch)  # type: ignore[attr-defined]
                except Exception as e:
                    self.faults += 1
                    print(f"FAULT: {name}: {type(e).__name__}: {e}")
                    continue
                took[name].append((now, time.perf_counter() - at))
                self.compare(name, answer, right)
        return took

    def batch(self) -> tuple[object, object, object]:
        torch, k = self.torch, self.info.top_k
        ids = torch.from_numpy(self.routing.tokens(self.args.tokens, k))
        x = torch.randn(len(ids), self.info.hidden_size).to(torch.bfloat16)
        return x, ids, torch.full((len(ids), k), 1.0 / k)

    def right(self, batch: tuple[object, object, object]) -> object:
        from expertd_kernels import reference

        return reference(self.weights, *batch)  # type: ignore[arg-type]

    def compare(self, name: str, answer: object, right: object) -> None:
        from expertd_kernels import relative_error, tolerance

        out = self.torch.as_tensor(answer.output).float()  # type: ignore[attr-defined]
        error = relative_error(out, right)  # type: ignore[arg-type]
        if not error <= tolerance("bf16"):
            self.faults += 1
            print(f"FAULT: {name}: an answer's error is {error:.1e}")

    def tell(self, took: dict[str, list[tuple[float, float]]], log: str) -> None:
        print("seconds      stays: median, p99 us      moves: median, p99 us      sums stays/moves")
        ends = np.linspace(0, self.args.seconds, 7)
        for first_s, last_s in itertools.pairwise(ends):
            print(self._row(f"{first_s:.0f}-{last_s:.0f}", took, lambda t, a=first_s, b=last_s: a <= t < b))
        print(self._row("all", took, lambda t: True))
        for text in log.splitlines():
            if "experts" in text and " to cpu" in text:
                print(f"    {text[-150:]}")
        print(f"{sum(map(len, took.values()))} calls, {self.faults} faults")

    @staticmethod
    def _row(name: str, took: dict[str, list[tuple[float, float]]], of: Callable[[float], bool]) -> str:
        us = {n: np.array([1e6 * s for t, s in found if of(t)]) for n, found in took.items()}
        if not all(map(len, us.values())):
            return f"{name:10} no calls"
        each = "".join(f"{np.median(v):16.0f}, {np.percentile(v, 99):6.0f}  " for v in us.values())
        return f"{name:10} {each} {us['stays'].sum() / us['moves'].sum():16.2f}"


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    ways = parser.add_subparsers(dest="way", required=True)
    for name, way in _ways(ways):
        way.add_argument("--rate", type=size, default="200MiB", help="bytes of packed weights a second")
        way.add_argument("--part", type=float, default=0.1, help="of the experts that change ranks at once")
        way.add_argument("--every", type=float, default=15.0 if name == "simulate" else 20.0, help="seconds")
    return parser.parse_args(argv)


def _ways(ways: object) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    a = ways.add_parser("simulate")  # type: ignore[attr-defined]
    a.add_argument("--shares", type=lambda t: [float(x) for x in t.split(",")], default=[0.1, 0.3])
    a.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=[1, 8])
    a.add_argument("--minutes", type=float, default=10.0)
    a.add_argument("--layers", type=int, default=2, help="that are simulated")
    a.add_argument("--layers-of", type=int, default=24, help="layers that each of them stands for")
    yield "simulate", a
    b = ways.add_parser("real")
    b.add_argument("--model", default="tiny-many:int4_g128")
    b.add_argument("--tokens", type=int, default=8)
    b.add_argument("--fast", type=float, default=0.3, help="part of the experts on the device that is not slowed")
    b.add_argument("--slow-us", type=int, default=200, help="more for each route on the other")
    b.add_argument("--exponent", type=float, default=1.1, help="Zipf's; 0 = even")
    b.add_argument("--seconds", type=float, default=60.0)
    b.add_argument("--out", type=Path, default=Path("build/drift"))
    yield "real", b


def main(argv: list[str]) -> int:
    args = parsed(argv)
    return simulate(args) if args.way == "simulate" else Real(args).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
