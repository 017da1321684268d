"""Two GPUs of one host: who reaches which experts how fast.

    python tests/load/two_gpus.py [--model qwen3-30b-a3b:int4_g128] [--layers 0-7] [--tokens 1,8,64,128,512]
                                  [--parts pairs,cluster] [--out DIR]

pairs     a server on each GPU, a caller on each, all four ways, through the torch module that a model calls
          (RemoteExperts): from GPU to GPU where that can be had, else by shared memory
cluster   two servers with half of the experts each, one client (ExpertCluster), beside one server with all of them

Layers take turns.  Times are of the caller's clock from the call until its stream has the answer, medians; `ahead` is
the time a call of many that are given to the stream without waiting.  Every way's answer is compared with the float32
reference, over NaN; the exit code is 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from served import Server

from expertd_client import ExpertClient, ExpertCluster
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs

GPUS = ("cuda:0", "cuda:1")
CHECKED_ROWS = 4


class Bench:
    """rows: what was measured; faults: what was wrong."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows, self.faults = args, [], []
        first, _, last = args.layers.partition("-")
        self.layers = list(range(int(first), int(last or first) + 1))
        self.source = SyntheticModel.parse(args.model, torch.device(GPUS[0]))

    def serve(self, name: str, gpu: str, *more: str) -> Server:
        command = ["--synthetic", self.args.model, "--layers", self.args.layers, "--device", gpu, *more]
        return Server(name, command, self.args.out / f"{name}.log")

    def error(self, layer: int, x: Any, ids: Any, w: Any, out: Any) -> float:
        weights = self.source.load(layer, range(self.experts)).to(torch.device(GPUS[0]))
        few = [t[:CHECKED_ROWS].to(GPUS[0]) for t in (x, ids, w)]
        return float(relative_error(out[:CHECKED_ROWS].to(GPUS[0]).float(), reference(weights, *few)))

    def measure(self, row: dict[str, Any], device: str, call: Callable[[int, Any, Any, Any], Any], tokens: int) -> None:
        """call(layer, x, ids, weights) -> [M, H] on `device`; a row of what it takes."""
        x, ids, w = random_inputs(tokens, self.hidden, self.experts, self.top_k, seed=tokens, device=device)
        on_gpu = device != "cpu"

        def synchronize() -> None:
            if on_gpu:
                torch.cuda.synchronize(device)

        for layer in self.layers * 3:
            out = call(layer, x, ids, w)
        synchronize()
        times, n = [], 0
        end = time.perf_counter() + self.args.seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            out = call(self.layers[n % len(self.layers)], x, ids, w)
            synchronize()
            times.append(time.perf_counter() - begin)
            n += 1
        layer = self.layers[(n - 1) % len(self.layers)]
        row |= {"tokens": tokens, "p50_us": statistics.median(times) * 1e6, "tokens_per_s": tokens * n / sum(times)}
        row["error"] = self.error(layer, x, ids, w, torch.as_tensor(out))
        if on_gpu:
            begin, rounds = time.perf_counter(), 20
            for _ in range(rounds):
                for layer in self.layers:
                    call(layer, x, ids, w)
            synchronize()
            row["ahead_us"] = (time.perf_counter() - begin) / rounds / len(self.layers) * 1e6
        good = row["error"] <= tolerance("bf16")
        if not good:
            self.faults.append(str(row))
        self.rows.append(row)
        print(
            f"{row['part']:8} {row['caller']:7} -> {row['server']:16} {row['transport']:10} {tokens:5} tokens"
            f" {row['p50_us']:8.1f} us, ahead {row.get('ahead_us', float('nan')):7.1f},"
            f" {row['tokens_per_s']:9.0f} tok/s, error {row['error']:.1e}{'' if good else ' WRONG'}",
            flush=True,
        )

    def describe(self, address: str) -> None:
        with ExpertClient(address) as client:
            d = client.describe()
        self.hidden, self.top_k, self.experts = d.model.hidden_size, d.layers[0].top_k, d.layers[0].num_experts
        print(f"{self.args.model}, {len(self.layers)} layers, {d.layers[0].backend}, torch {torch.__version__}")

    def pairs(self, servers: list[Server]) -> None:
        for gpu, server in zip(GPUS, servers, strict=True):
            for device in GPUS:
                with ExpertClient(server.address, timeout_s=60) as client, torch.inference_mode():
                    modules = {n: RemoteExperts(client, n).eval() for n in self.layers}

                    def ask(n: int, *t: Any, modules: Any = modules) -> Any:
                        return modules[n](*t)

                    for tokens in self.args.tokens:
                        row = {"part": "pairs", "caller": device, "server": gpu, "transport": "?"}
                        x = random_inputs(1, self.hidden, self.experts, self.top_k, seed=0, device=device)
                        modules[self.layers[0]](*x)
                        way = client.device_transport(int(device[-1]))
                        row["transport"] = "cuda_ipc" if not way.reason else client.session().transport
                        self.measure(row, device, ask, tokens)
                    if way.reason:
                        print(f"         {device} -> {gpu}: {way.reason}")

    def cluster(self, whole: Server, halves: list[Server]) -> None:
        for name, forwarder in (
            ("one", ExpertClient(whole.address, timeout_s=60)),
            ("a cluster of one", ExpertCluster([whole.address])),
            ("two halves", ExpertCluster([s.address for s in halves])),
        ):
            with forwarder:

                def ask(n: int, *t: Any, forwarder: Any = forwarder) -> Any:
                    return forwarder.forward(n, *t).output

                for tokens in self.args.tokens:
                    row = {"part": "cluster", "caller": "host", "server": name, "transport": "shm"}
                    self.measure(row, "cpu", ask, tokens)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="qwen3-30b-a3b:int4_g128")
    parser.add_argument("--layers", default="0-7")
    parser.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 64, 128, 512])
    parser.add_argument("--parts", type=lambda t: t.split(","), default=["pairs", "cluster"])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("build/two_gpus"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    whole = [bench.serve(f"whole{i}", gpu) for i, gpu in enumerate(GPUS)]
    halves = [bench.serve(f"half{i}", gpu, "--shard", f"{i}/2") for i, gpu in enumerate(GPUS)]
    try:
        for server in (*whole, *halves):
            server.wait(240)
        bench.describe(whole[0].address)
        if "pairs" in args.parts:
            bench.pairs(whole)
        if "cluster" in args.parts:
            bench.cluster(whole[0], halves)
    finally:
        for server in (*whole, *halves):
            if server.process.poll() is None:
                server.stop(20)
    (args.out / "two_gpus.json").write_text(json.dumps({"model": args.model, "rows": bench.rows}, indent=1))
    for fault in bench.faults:
        print("WRONG:", fault)
    return 1 if bench.faults else 0


if __name__ == "__main__":
    sys.exit(main())
