"""What a call of one layer costs beside its kernel, stage by stage, over shared memory; several source trees in turns.

    python tests/load/layer_overhead.py [OLD_TREE ...] [--rounds 60] [--calls 6] [--experts 16] [--wide 128]
        [--threads 1]

Each tree (this one, and those named, each with its own .venv) has a server and a client of its own.  They take turns of
--calls calls; only one tree works at a time.  Before each call that is timed, the client computes the experts of a
layer itself, as a model computes between two layers: so the server sleeps, and caches are used.  Columns:

own        transformers' experts in the client
module     RemoteExperts
torch      ExpertClient.forward with tensors of torch; numpy: with arrays; slot: tensors that lie in shared memory

The stages of `module` are medians of their own: Python before the library is called; until the server has the request
(copies, ring, its core wakes); queue and collect; the kernel; until the library returns (the client wakes, or has
prepared the answer); Python after.  Server and client are on one clock.  Medians of what takes turns can be compared;
absolute times are this machine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from served import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from tiny_models import save, tiny_model

from expertd.shm.in_flight import RequestsInFlight
from expertd.shm.layout import Completion
from expertd_client import ExpertClient
from expertd_client.engines.torch_experts import RemoteExperts

HIDDEN, ROUTES = 256, 8
TOKENS = (1, 32)
WAYS = ("own", "module", "torch", "numpy", "slot")
STAGES = ("python before", "to the server", "queue, collect", "kernel", "back", "python after")


class Watch:
    """When the library was called last, and when it returned; with what answer."""

    def __init__(self) -> None:
        self.begin_ns = self.end_ns = 0
        self.answer = Completion()
        for name in ("call", "call_beside"):  # the second is of trees that have it
            if (inner := getattr(RequestsInFlight, name, None)) is not None:
                setattr(RequestsInFlight, name, self._seen(inner))

    def _seen(self, inner: Callable[..., int]) -> Callable[..., int]:
        def call(client: Any, *args: Any) -> int:
            self.begin_ns = time.monotonic_ns()
            ticket = inner(client, *args)
            self.end_ns = time.monotonic_ns()
            self.answer = next(x for x in args if isinstance(x, Completion))
            return ticket

        return call

    def stages(self, begin_ns: int, end_ns: int) -> list[float]:
        """Microseconds of STAGES."""
        a = self.answer
        queued_ns = a.arrival_ns + a.queue_ns + a.collect_ns
        times = (begin_ns, self.begin_ns, a.arrival_ns, queued_ns, queued_ns + a.kernel_ns, self.end_ns, end_ns)
        return [(b - a) / 1e3 for a, b in pairwise(times)]


def serve_turns(address: str, experts: int, wide: int) -> None:
    """Of one process: a line of tokens and calls in, a line of times out."""
    torch.set_num_threads(1)
    model = tiny_model("qwen3_moe", experts=experts, **_sizes(wide))
    watch, clients = Watch(), {tokens: ExpertClient(address) for tokens in TOKENS}  # a session knows its usual answers
    assert all(client.session(timeout_s=30).transport == "shm" for client in clients.values())
    batches = {tokens: Batch(model, client, tokens) for tokens, client in clients.items()}
    print("ready", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(batches[asked["tokens"]].turn(watch, asked["calls"])), flush=True)
    for client in clients.values():
        client.close()


class Batch:
    """Inputs of so many tokens, and what is called with them."""

    def __init__(self, model: Any, client: ExpertClient, tokens: int) -> None:
        own, remote = model.model.layers[0].mlp.experts, RemoteExperts(client, 0).eval()
        torch.manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN)
        ids = torch.rand(tokens, model.config.num_experts).topk(ROUTES).indices
        weights = torch.full((tokens, ROUTES), 1 / ROUTES)
        arrays = x.numpy(), ids.numpy(), weights.numpy()
        slot = client.slot(tokens, HIDDEN, ROUTES, "f32")
        slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = arrays
        self.between = lambda: own(x, ids, weights)
        self.ways: dict[str, Any] = {
            "own": self.between,
            "module": lambda: remote(x, ids, weights),
            "torch": lambda: client.forward(0, x, ids, weights),
            "numpy": lambda: client.forward(0, *arrays),
            "slot": lambda: slot.forward(0),
        }
        assert tuple(self.ways) == WAYS
        with torch.inference_mode():
            wanted = own(x, ids, weights)
            assert float((remote(x, ids, weights) - wanted).norm() / wanted.norm()) < 1e-5

    def turn(self, watch: Watch, calls: int) -> dict[str, list[Any]]:
        """Microseconds of each call, by way; those of the stages of `module`."""
        us: dict[str, list[Any]] = {name: [] for name in (*WAYS, "stages")}
        for n in range(calls + 2):
            for name, call in self.ways.items():
                self.between()
                begin_ns = time.monotonic_ns()
                answer = call()
                end_ns = time.monotonic_ns()
                if n >= 2:
                    us[name].append((end_ns - begin_ns) / 1e3)
                    if name == "module":
                        us["stages"].append(watch.stages(begin_ns, end_ns))
                del answer
        return us


class Tree:
    """A server of one source tree, and a client that waits for its turn."""

    def __init__(self, path: Path, folder: Path, out: Path, args: argparse.Namespace, stack: ExitStack) -> None:
        python = str(path / ".venv/bin/python")
        options = ["--compute-dtype", "float32", "--device", "cpu", "--threads", str(args.threads)]
        options += ["--tcp-listen", "127.0.0.1:0"]
        log = out / f"server-{path.parent.name}-{path.name}.log"
        server = Server(str(path), ["--checkpoint", str(folder), *options], log, python=python)
        stack.callback(server.process.kill)
        server.wait(180)
        worker = [python, __file__, "--worker", server.address]
        self.process = subprocess.Popen(
            [*worker, "--experts", str(args.experts), "--wide", str(args.wide)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self.process.kill)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.us: dict[int, dict[str, list[Any]]] = {n: {name: [] for name in (*WAYS, "stages")} for n in TOKENS}

    def turn(self, tokens: int, calls: int, counts: bool) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"tokens": tokens, "calls": calls}), file=self.process.stdin, flush=True)
        for name, found in json.loads(self.process.stdout.readline()).items():
            if counts:
                self.us[tokens][name] += found


def _sizes(wide: int) -> dict[str, int]:
    return {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": wide,
        "num_hidden_layers": 1,
        "num_experts_per_tok": ROUTES,
    }


def show(trees: dict[str, Tree]) -> None:
    for title, columns in (("way", WAYS), ("stages of module", STAGES)):
        print(f"\n| tokens | {title} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}")
        for tokens in TOKENS:
            for name, tree in trees.items():
                us = tree.us[tokens]
                columns_us = [us[way] for way in WAYS] if columns is WAYS else zip(*us["stages"], strict=True)
                cells = " | ".join(f"{statistics.median(column):.0f}" for column in columns_us)
                print(f"| {tokens} | {name} | {cells} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("trees", nargs="*", type=Path)
    for name, value in (("rounds", 60), ("calls", 6), ("experts", 16), ("wide", 128), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("build/layer_overhead"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve_turns(args.worker, args.experts, args.wide)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertd-model-")))
        save(tiny_model("qwen3_moe", experts=args.experts, **_sizes(args.wide)), folder)
        paths = {str(path): path.resolve() for path in args.trees} | {"this tree": Path(__file__).parents[2]}
        trees = {name: Tree(path, folder, args.out, args, stack) for name, path in paths.items()}
        for n in range(args.rounds + 1):
            for tokens in TOKENS:
                for tree in trees.values():
                    tree.turn(tokens, args.calls, counts=n > 0)
        show(trees)
    return 0


if __name__ == "__main__":
    sys.exit(main())
