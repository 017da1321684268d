"""What the scripts of this folder share: `expertd serve` as a process, answers against the float32 reference, round
trips, and a report of what was found."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import torch

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_client import ExpertClient
from expertd_kernels import build, decide, detect_device, problem_of, relative_error, tolerance
from expertd_kernels.measure.timing import captured, time_calls
from expertd_kernels.packed.integrity import reference_rows
from expertd_kernels.sources.synthetic import random_inputs

__all__ = ["SETS", "Report", "Server", "latency", "message", "verify"]

SETS = 8
"""Inputs that take turns, so that weights come from memory: 8 sets of one token touch 150 MB of Qwen3's layer."""


class Server:
    """`expertd serve` as a process; seconds: from its start to SERVING."""

    def __init__(
        self, name: str, args: list[str], log: Path, env: dict[str, str] | None = None, python: str = sys.executable
    ) -> None:
        """env: variables besides this process's; python: whose packages serve."""
        self.name, self.log, self.start = name, log, time.monotonic()
        command = [python, "-m", "expertd_server.commands.cli", "serve", "--listen", "127.0.0.1:0", *args]
        with log.open("wb") as out:
            more = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=more)
        self.address, self.seconds = "", 0.0

    def poll(self) -> bool:
        """Whether it serves.  RuntimeError where it ended."""
        if found := re.search(r"serving on (\S+)", self.log.read_text()):
            self.address, self.seconds = found[1], time.monotonic() - self.start
            return True
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.text()[-1500:]}")
        return False

    def wait(self, limit_s: float) -> None:
        """Until it serves.  RuntimeError where it ended, or where that takes longer than limit_s."""
        while not self.poll():
            if time.monotonic() - self.start > limit_s:
                raise RuntimeError(f"{self.name} does not serve after {limit_s:.0f} s: {self.text()[-1500:]}")
            time.sleep(0.02)

    def text(self) -> str:
        return self.log.read_text()

    def line(self, pattern: str) -> str:
        found = re.search(pattern, self.text())
        return found[0] if found else ""

    def stop(self, wait_s: float) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(wait_s)


class Report:
    """What a script finds, printed as it comes and kept as JSON.  faults: what is wrong; servers: ended with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        """args: with seconds, device, out and, for latency(), graph."""
        self.args, self.begin = args, time.monotonic()
        self.found: dict[str, object] = {}
        self.faults: list[str] = []
        self.servers: list[Server] = []

    def left(self) -> float:
        return float(self.args.seconds - (time.monotonic() - self.begin))

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.1f}] {text}", flush=True)

    def check(self, ok: bool, what: str) -> None:
        if not ok:
            self.faults.append(what)
            self.say(f"FAULT: {what}")

    def stage(self, name: str, least_s: float, body: Callable[[], None]) -> None:
        """Run body() if that many seconds are left; what it raises is a fault."""
        if self.left() < least_s:
            self.say(f"{name}: not reached, {self.left():.0f} s are left")
            return
        try:
            body()
        except Exception as e:
            self.check(False, f"{name}: {type(e).__name__}: {e}")

    def end(self, file: str) -> int:
        """Kill what still runs, write the JSON `file` into the output folder; the exit code."""
        for server in self.servers:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
        (self.args.out / file).write_text(json.dumps({"found": self.found, "faults": self.faults}, indent=1))
        self.say(f"{len(self.faults)} faults; details in {self.args.out}")
        return 1 if self.faults else 0


def message(layer: int, x, ids, w) -> pb.ForwardRequest:
    def tensor(dtype, t):
        raw = t.view(torch.int16) if t.dtype is torch.bfloat16 else t
        return pb.Tensor(dtype=dtype, shape=t.shape, raw=raw.contiguous().numpy().tobytes())

    return pb.ForwardRequest(
        request_id=1,
        layer=layer,
        hidden_states=tensor(pb.DATA_TYPE_BF16, x),
        topk_ids=tensor(pb.DATA_TYPE_I32, ids),
        topk_weights=tensor(pb.DATA_TYPE_F32, w),
    )


def verify(s: Report, server: Server, weights, layer: int) -> None:
    """Our client and plain grpcio against the float32 reference; what Describe says."""
    device = weights.w13.codes.device
    E, H = weights.num_experts, weights.hidden_size
    with ExpertClient(server.address, timeout_s=60) as client:
        d = client.describe(include_decisions=True)
        found = d.layers[0]
        for m in (1, 7, 40):
            x, ids, w = random_inputs(m, H, E, found.top_k, seed=m)
            if m == 7:
                ids[0], ids[3, 1] = -1, -1
            right = reference_rows(weights, x.to(device), ids.to(device), w.to(device), False).cpu()
            a = client.forward(layer, x, ids, w)
            error = relative_error(torch.as_tensor(a.output), right)
            with grpc.insecure_channel(server.address) as channel:
                b = ExpertServiceStub(channel).Forward(message(layer, x, ids, w))
            plain = torch.frombuffer(bytearray(b.output.raw), dtype=torch.bfloat16).view(m, H)
            other = relative_error(plain, right)
            s.say(f"{server.name} M = {m}: error {error:.1e}, plain grpcio {other:.1e}, on {b.timing.backend}")
            s.check(max(error, other) <= tolerance("bf16"), f"{server.name} M = {m}: error {error}, {other}")
            s.check(b.routes_computed == int((ids >= 0).sum()), f"{server.name} M = {m}: {b.routes_computed} routes")
    plan = ", ".join(f"{p.backend} up to {p.max_tokens or 'any'}" for p in found.plan)
    s.say(f"{server.name}: {found.backend}, chosen by {found.chosen_by}, plan {plan}, from cache {found.from_cache}")
    for v in found.verdicts:
        times = ", ".join(f"{t.tokens}: {t.microseconds:.0f}" for t in v.times)
        if times or v.relative_error:
            s.say(f"    {v.backend}: {times and times + ' us, '}error {v.relative_error:.1e} {'; '.join(v.refusals)}")


def graph_us(weights, device: str, top_k: int, tokens: int) -> float:
    """Microseconds a call of the layer alone: replayed from CUDA graphs."""
    experts = build(decide(problem_of(weights, detect_device(device), top_k=top_k)), weights)
    sets = [
        random_inputs(tokens, weights.hidden_size, weights.num_experts, top_k, seed=i, device=device)
        for i in range(SETS)
    ]
    out = torch.empty_like(sets[0][0])
    where = torch.device(device)
    with torch.inference_mode():
        return time_calls(captured(lambda i: experts(*sets[i], out=out), SETS, where), SETS, where)


def latency(s: Report, server: Server, weights, layer: int, top_k: int, tokens: int) -> None:
    """One caller, one request at a time: medians in microseconds."""
    sets = [
        random_inputs(tokens, weights.hidden_size, weights.num_experts, top_k, seed=i) for i in range(min(SETS, 300))
    ]
    rounds = 200 if tokens <= 64 else 60
    took, timings = [], []
    with ExpertClient(server.address, timeout_s=30) as client:
        for i in range(rounds + 10):
            begin = time.perf_counter()
            answer = client.forward(layer, *sets[i % SETS])
            if i >= 10:
                took.append((time.perf_counter() - begin) * 1e6)
                timings.append(answer.timing)
    names = ("decode_ns", "queue_ns", "copy_in_ns", "kernel_ns", "copy_out_ns", "encode_ns")
    stages = {n[:-3]: statistics.median(getattr(t, n) for t in timings) / 1e3 for n in names}
    row = {"round trip": statistics.median(took), "fastest": min(took), **stages}
    if s.args.graph:
        row["graph"] = graph_us(weights, s.args.device, top_k, tokens)
    s.found[f"latency {tokens}"] = row
    s.say(f"M = {tokens}: " + ", ".join(f"{k} {v:.0f}" for k, v in row.items()) + " us")
