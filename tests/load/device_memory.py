"""What a server of a whole model really holds of its device, beside what it said it would.

    python tests/load/device_memory.py [--device cuda] [--cases qwen3,deepseek] [--seconds 230] [--out DIR]

Boots `expertd serve --max-tokens 4096` for each row of CASES, one after another; looks at the device's free memory
while it loads, when it serves, and when every layer has computed every size that a graph is captured for and its
largest batch; then compares answers with the float32 reference.  Prints, in GiB: packed weights, scratch,
buffers, graphs, the driver's context (of a process that does nothing else), the rest, the total, and the difference of
the total and the packed weights.  Exit code 1 = the difference is more than --most GiB, the total more than the server
said, or an answer is wrong.  Nothing else may use the device meanwhile.  With --device cpu the same of small models, by
the server's own resident memory: the script itself is tried that way.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch
from served import Report, Server, verify

from expertd_client import ExpertClient
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs
from expertd_server.engine.sizes import sizes_up_to

GIB = 1 << 30
TOKENS = 4096
CASES: dict[str, list[str]] = {
    "qwen3": ["--synthetic", "qwen3-30b-a3b:int4_g128"],
    "deepseek": ["--synthetic", "deepseek-v3:e4m3_block128", "--layers", "3-22", "--shard", "0/8"],
    "deepseek-int4": ["--synthetic", "deepseek-v3:int4_g128", "--layers", "3-22", "--shard", "0/8"],
    "deepseek-w8a8": [
        *("--synthetic", "deepseek-v3:e4m3_block128", "--layers", "3-22", "--shard", "0/8"),
        *("--activations", "checkpoint", "--backend", "gluon_w8a8"),
    ],
}
SMALL = {"qwen3": ["--synthetic", "tiny:int4_g128"], "deepseek": ["--synthetic", "tiny:e4m3_block128"]}
ROUNDS = 6
"""Of each size and layer: twice on each of two lanes captures, and once more replays."""


class Meter:
    """What is taken, now and at most since it began."""

    def __init__(self, device: str, server: Server | None = None) -> None:
        self.device, self.server = device, server
        self.start = 0 if device == "cpu" else self.free()
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def free() -> int:
        return int(torch.cuda.mem_get_info()[0])

    def taken(self) -> int:
        if self.device != "cpu":
            return self.start - self.free()
        assert self.server is not None
        lines = Path(f"/proc/{self.server.process.pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), 0)

    def _watch(self) -> None:
        while not self._stop.wait(0.03):
            self.peak = max(self.peak, self.taken())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def context_bytes() -> int:
    """Of a process that has asked the device for 512 bytes, and computed nothing."""
    code = "import sys, torch; torch.zeros(1, device='cuda'); print('there', flush=True); sys.stdin.read()"
    before = Meter.free()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        taken = before - Meter.free()
        process.communicate("")
    return taken


def device_bytes(server: Server) -> dict[str, int]:
    """expertd_device_bytes, by what; {} on a CPU."""
    where = server.line(r"http://\S+/metrics")
    with urllib.request.urlopen(where, timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'^expertd_device_bytes\{what="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {what: int(float(value)) for what, value in found}


def every_size(s: Report, server: Server, hidden: int, experts: int) -> None:
    """Every layer at every size that is captured, then at the largest batch."""
    sizes = sizes_up_to(TOKENS) if s.args.device != "cpu" else [1, 8, 64]
    with ExpertClient(server.address, timeout_s=60) as client:
        layers = client.describe().layers
        for m in sizes:
            x, ids, w = random_inputs(m, hidden, experts, layers[0].top_k, seed=m)
            for layer in layers:
                for _ in range(2 if m == TOKENS else ROUNDS):
                    client.forward(layer.layer, x, ids, w)
            if s.left() < 5:
                s.check(False, f"{server.name}: sizes up to {m} of {sizes} only, the time is over")
                return


def case(s: Report, name: str, context: int) -> None:
    args = (SMALL if s.args.device == "cpu" else CASES)[name]
    more = ["--device", s.args.device, "--max-tokens", str(TOKENS), "--metrics-listen", "127.0.0.1:0"]
    server = Server(name, [*args, *more], s.args.out / f"{name}.log")
    s.servers.append(server)
    meter = Meter(s.args.device, server)
    server.wait(max(5.0, s.left()))
    booted, peak = meter.taken(), meter.peak
    s.say(
        f"{name}: SERVING after {server.seconds:.1f} s; {server.line('loaded .*')}; {server.line('(read .*|)bound .*')}"
    )
    with ExpertClient(server.address) as client:
        d = client.describe()
    every_size(s, server, d.model.hidden_size, d.layers[0].num_experts)
    taken, torchs = meter.taken(), device_bytes(server)
    meter.stop()
    rest = taken - d.memory.weights_bytes - d.memory.scratch_bytes - d.memory.buffers_bytes - context
    table(s, name, d.memory, context, taken - booted, rest, booted, peak, taken, torchs)
    said = d.memory.weights_bytes + d.memory.scratch_bytes + d.memory.buffers_bytes
    said += d.memory.graphs_bytes + d.memory.context_bytes
    if s.args.device != "cpu":
        over = (taken - d.memory.weights_bytes) / GIB
        s.check(over <= s.args.most, f"{name}: {over:.2f} GiB beside the packed weights, want at most {s.args.most}")
        s.check(taken <= said, f"{name}: {taken / GIB:.2f} GiB, it said {said / GIB:.2f}")
    whole = len(d.layers[0].held) == 1 and d.layers[0].held[0].count == d.layers[0].num_experts
    for n in (d.layers[0].layer, d.layers[-1].layer) if whole else ():  # this process computes now: nothing is measured
        weights = SyntheticModel.parse(args[1], s.args.device).load(n)
        s.stage(f"{name}, layer {n}", 3, lambda n=n, weights=weights: verify(s, server, weights, n))
    s.check(server.stop(30) == 0, f"{name}: {server.text()[-300:]}")


def table(
    s: Report,
    name: str,
    m,
    context: int,
    grown: int,
    rest: int,
    booted: int,
    peak: int,
    taken: int,
    torchs: dict[str, int],
) -> None:
    """What was said, and what was found where it can be told apart.  torchs: expertd_device_bytes, {} on a CPU."""
    rows = {
        "packed weights": (m.weights_bytes, None),
        "scratch": (m.scratch_bytes, None),
        "buffers": (m.buffers_bytes, None),
        "graphs (grown since SERVING, largest batches included)": (m.graphs_bytes, grown),
        "context": (m.context_bytes, context),
        "rest: kernels, libraries, graphs": (0, rest),
        "when SERVING": (0, booted),
        "most while loading": (0, peak),
        "total": (m.weights_bytes + m.scratch_bytes + m.buffers_bytes + m.graphs_bytes + m.context_bytes, taken),
        "total less packed weights": (
            m.scratch_bytes + m.buffers_bytes + m.graphs_bytes + m.context_bytes,
            taken - m.weights_bytes,
        ),
    }
    if torchs:
        tensors = m.weights_bytes + m.scratch_bytes + m.buffers_bytes
        rows |= {
            "torch: tensors beside weights, scratch, buffers": (0, torchs["allocated"] - tensors),
            "torch: kept without a tensor": (0, torchs["reserved"] - torchs["allocated"]),
            "not torch's: context, modules, graphs": (m.graphs_bytes + m.context_bytes, taken - torchs["reserved"]),
        }
    s.say(f"{name}, GiB: said, found")
    for what, (said, found) in rows.items():
        said_text = f"{said / GIB:.3f}" if said else ""
        s.say(f"    {what:56} {said_text:>8} {'' if found is None else f'{found / GIB:.3f}':>8}")
    s.found[name] = {what: list(pair) for what, pair in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--out", type=Path, default=Path("build/device_memory"))
    parser.add_argument("--most", type=float, default=1.5, help="GiB beside the packed weights")
    parser.add_argument("--cases", type=lambda t: t.split(","), default=["qwen3", "deepseek"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    s = Report(args)
    try:
        context = 0
        if args.device != "cpu":
            torch.cuda.init()
            context = context_bytes()
        for name in args.cases:
            s.stage(name, 20, lambda name=name: case(s, name, context))
            time.sleep(0.5)
    finally:
        code = s.end("device_memory.json")
    return code


if __name__ == "__main__":
    sys.exit(main())
