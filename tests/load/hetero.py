"""A layer whose experts a GPU and its host's CPU share, beside each part alone.

    python tests/load/hetero.py [--devices cuda:0,cpu] [--split 96,32] [--model qwen3-30b-a3b:int4_g128]
                                [--tokens 1,8,32,2048] [--seconds 110] [--out DIR]

Three servers of one layer: all devices together (`expertd serve --device A,B --split N,N`), and each device alone with
its part of the experts.  Calls come from one client through shared memory, one at a time; the servers take turns.
First every answer is compared with the float32 reference, and that of the joined layer with the sum of the parts'.
Then medians and p99 of the round trip in us, and medians of the time in the kernel as the server tells it.

Needs no installation: the packages of this checkout are found beside this file.  The exit code is 1 where an answer is
wrong or a server does not start; what is wrong is printed, with the end of that server's log.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PATHS = [str(ROOT / part) for part in ("proto", "kernels", "server", "client")]


def _find_packages() -> None:
    """For this process and its servers, installed or not."""
    import importlib.metadata

    paths = [*_PATHS, str(Path(__file__).parent)]
    try:
        importlib.metadata.version("expertd")
    except importlib.metadata.PackageNotFoundError:
        folder = Path(tempfile.mkdtemp())
        facts = folder / "expertd-0.0.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: expertd\nVersion: 0.0.0\n")
        paths.append(str(folder))
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])


class Bench:
    """faults: what was wrong."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.monotonic()
        self.faults: list[str] = []
        self.servers: dict[str, Any] = {}
        self.clients: dict[str, Any] = {}
        self.expected: dict[int, float] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.1f}] {text}", flush=True)

    def left(self) -> float:
        return float(self.args.seconds - (time.monotonic() - self.begin))

    def fault(self, text: str) -> None:
        self.faults.append(text)
        self.say(f"FAULT: {text}")

    def start(self) -> None:
        """The servers: the joined one first, which measures its threads, then the others with as many at once."""
        common = ["--synthetic", self.args.model, "--layers", "0", "--max-tokens", str(max(self.args.tokens))]
        split = ",".join(map(str, self.args.split))
        self.launch("joined", [*common, "--device", ",".join(self.args.devices), "--split", split])
        self.wait("joined")
        threads = self.servers["joined"].line(r"cpu kernel: \d+ thread") if "joined" in self.servers else ""
        if threads:
            common += ["--threads", threads.split()[2]]
        first = 0
        for device, n in zip(self.args.devices, self.args.split, strict=True):
            self.launch(device, [*common, "--device", device, "--experts", f"{first}-{first + n - 1}"])
            first += n
        for device in self.args.devices:
            self.wait(device)

    def launch(self, name: str, options: list[str]) -> None:
        from served import Server

        try:
            log = self.args.out / f"{name.replace(':', '')}.log"
            self.servers[name] = Server(name, [*options, *self.args.more], log)
        except Exception as e:
            self.fault(f"{name} cannot be started: {e}")

    def wait(self, name: str) -> None:
        from expertd_client import ExpertClient

        try:
            server = self.servers[name]
            server.wait(max(5.0, time.monotonic() - server.start + self.left() - 15))
            self.clients[name] = ExpertClient(server.address, timeout_s=30)
            self.say(f"{name}: serves after {server.seconds:.1f} s")
            for pattern in (r"experts of each layer.*", r"cpu kernel: \d+ thread.*", r"loaded 1 layers.*"):
                if line := server.line(pattern):
                    self.say(f"    {line}")
        except Exception as e:
            self.fault(f"{name} does not start: {e}")

    def check(self) -> None:
        """Answers of every server against float32."""
        import torch

        from expertd_kernels import relative_error, tolerance
        from expertd_kernels.packed.integrity import reference_rows
        from expertd_kernels.sources.synthetic import SyntheticModel

        cuda = self.args.devices[0] if self.args.devices[0].startswith("cuda") else "cpu"
        self.source = SyntheticModel.parse(self.args.model, torch.device(cuda))
        info = self.source.info(0)
        self.H, self.E, self.k = info.hidden_size, info.num_experts, info.top_k
        weights = self.source.load(0)
        self.say(f"reference weights on {cuda}; session: {self.clients['joined'].session().transport}")
        limit = tolerance("bf16")
        for tokens in [t for t in (1, 3, 8, 32, 100, 700) if t <= max(self.args.tokens)]:
            if self.left() < 0.2 * self.args.seconds:
                self.say(f"{tokens} tokens: not compared, {self.left():.0f} s are left")
                continue
            x, ids, w = self.inputs(tokens, 1000 + tokens)
            if tokens > 1:
                ids[0, :] = -1
                ids[1, 0] = -1
            parts = [
                torch.as_tensor(self.clients[d].forward(0, x, ids, w, output_dtype="f32").output).float()
                for d in self.args.devices
                if d in self.clients
            ]
            every = len(parts) == len(self.args.devices)
            if tokens <= 8 or not every:  # dequantizing an expert takes a CPU long
                right = reference_rows(weights, x.to(cuda), ids.to(cuda), w.to(cuda), False).float().cpu()
            else:
                right = sum(parts)
            for again in range(4):  # the first calls are launched one by one, the next from graphs
                out = torch.as_tensor(self.clients["joined"].forward(0, x, ids, w).output).float()
                error = relative_error(out, right)
                if error > limit or not bool(torch.isfinite(out).all()):
                    self.fault(f"joined, {tokens} tokens, call {again}: error {error:.2e}, tolerance {limit:.0e}")
                if bool((out[0] != 0).any()) and tokens > 1:
                    self.fault(f"joined, {tokens} tokens: a row without a route is not zero")
            against = "float32" if tokens <= 8 or not every else "the sum of the parts"
            text = f"{tokens} tokens: joined against {against} {error:.1e}"
            if every:
                text += f", the parts' sum {relative_error(sum(parts), right):.1e}"
            self.say(text + f" (tolerance {limit:.0e})")

    def forecast(self) -> None:
        """What `expertctl plan` expects of the joined layer, from what its server measured when it started."""
        import numpy as np

        from expertctl.planner.expected import expected, parts_of
        from expertctl.planner.problem import Place, Problem

        described = {"joined": self.clients["joined"].describe(include_decisions=True)}
        for p in described["joined"].layers[0].parts:
            points = ", ".join(f"{s.experts}/{s.routes} {s.microseconds:.0f}" for s in p.surface)
            self.say(f"{p.device}: {p.backend}, {p.why}; us by experts/routes: {points}")
        problem = Problem((0,), (self.E,), np.ones((1, self.E)), (Place("joined", 1.0, self.E),))
        held = np.ones((1, 1, self.E), np.bool_)
        few = [t for t in self.args.tokens if t <= 256]
        for e in expected(problem, held, parts_of(described), self.k, few):
            self.expected[e.callers] = e.layer_us

    def inputs(self, tokens: int, seed: int) -> Any:
        from expertd_kernels.sources.synthetic import random_inputs

        return random_inputs(tokens, self.H, self.E, self.k, seed=seed)

    def measure(self, tokens: int, seconds: float) -> None:
        """Every server in turns, on the same requests; sets of inputs take turns, so that weights come from memory."""
        sets = [self.inputs(tokens, seed) for seed in range(8 if tokens > 64 else 32)]
        took: dict[str, list[float]] = {name: [] for name in self.clients}
        kernel: dict[str, list[float]] = {name: [] for name in self.clients}
        for client in self.clients.values():
            for t in sets[:4]:
                client.forward(0, *t)
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end or n < 3:
            for name, client in self.clients.items():
                for i in range(8 if tokens > 64 else 16):
                    t = sets[(n * 16 + i) % len(sets)]
                    begin = time.perf_counter()
                    answer = client.forward(0, *t)
                    took[name].append((time.perf_counter() - begin) * 1e6)
                    kernel[name].append(answer.timing.kernel_ns / 1e3)
                    del answer
            n += 1
        medians = {}
        for name, us in took.items():
            us.sort()
            medians[name] = statistics.median(us)
            self.say(
                f"{tokens:5} tokens  {name:8} median {medians[name]:9.0f} us, p99 {us[int(0.99 * (len(us) - 1))]:9.0f},"
                f" least {us[0]:9.0f}; kernel median {statistics.median(kernel[name]):9.0f} ({len(us)} calls)"
            )
        parts = [medians[d] for d in self.args.devices if d in medians]
        if "joined" in medians and len(parts) == len(self.args.devices):
            more, times = medians["joined"] - max(parts), medians["joined"] / max(parts)
            self.say(f"{tokens:5} tokens  joined takes the slower part {more:+.0f} us, {times:.2f} times")
        if tokens in self.expected:
            took_us = statistics.median(kernel["joined"])
            self.say(
                f"{tokens:5} tokens  joined, kernel: {took_us:.0f} us measured, {self.expected[tokens]:.0f} expected"
                f" ({took_us / self.expected[tokens] - 1:+.0%})"
            )

    def end(self) -> int:
        for client in self.clients.values():
            client.close()
        for name, server in self.servers.items():
            warnings = [line for line in server.text().splitlines() if "WARN" in line.upper() or "Traceback" in line]
            for line in warnings[:10]:
                self.say(f"{name}'s log: {line[:300]}")
            try:
                if server.process.poll() is None and (code := server.stop(10)):
                    self.fault(f"{name} ended with {code}: {server.text()[-600:]}")
            except Exception as e:
                server.process.kill()
                self.fault(f"{name} does not end: {e}: {server.text()[-1500:]}")
        self.say(f"{len(self.faults)} faults; logs in {self.args.out}")
        return 1 if self.faults else 0


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--devices", type=lambda t: t.split(","), default=["cuda:0", "cpu"])
    parser.add_argument("--split", type=_numbers, default=[96, 32])
    parser.add_argument("--model", default="qwen3-30b-a3b:int4_g128")
    parser.add_argument("--tokens", type=_numbers, default=[1, 8, 32, 2048])
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--out", type=Path, default=Path("build/hetero"))
    parser.add_argument("more", nargs="*", help="after --: options for all servers")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    _find_packages()
    bench = Bench(args)
    try:
        bench.start()
        if "joined" in bench.clients:
            bench.check()
            try:
                bench.forecast()
            except Exception as e:
                bench.fault(f"forecast: {type(e).__name__}: {e}")
        for i, tokens in enumerate(args.tokens):
            if "joined" in bench.clients and bench.left() > 8:
                bench.measure(tokens, min(6.0, (bench.left() - 6) / (len(args.tokens) - i)))
    except Exception:
        bench.fault(traceback.format_exc())
        for name, server in bench.servers.items():
            bench.say(f"{name}: {server.text()[-1500:]}")
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
