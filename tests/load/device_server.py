"""The server on an accelerator: boots, answers, latency and throughput through gRPC, a drain under load, a second boot.

    python tests/load/device_server.py [--device cuda] [--seconds 66] [--out DIR] [--sizes 1,8,64,512] [--cases qwen3]

Boots one `expertd serve` for each row of CASES at the same time, compares answers of our client and of plain grpcio
with the float32 reference, sends SIGTERM under load, boots again from the cache, and measures Qwen3's server: round
trips beside the times that the server tells of each stage (and, with --graph, that of the layer alone), and 8 callers.
Everything ends after --seconds; what was not reached is said.  Exit code 1 = an answer, an exit code or a second boot
is not what it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import torch

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_client import ExpertClient
from expertd_kernels import build, decide, detect_device, problem_of, relative_error, tolerance
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.proof import reference_rows
from expertd_kernels.synthetic import SyntheticModel, random_inputs

ROOT = Path(__file__).parents[2]
FIXTURE = str(ROOT / "tests" / "fixtures" / "mxfp4-oai-modelopt-gptoss-ns")
CASES: dict[str, list[str]] = {
    "qwen3": ["--synthetic", "qwen3-30b-a3b:int4_g128", "--layers", "0-1"],
    "gpt-oss": ["--synthetic", "gpt-oss-20b:mxfp4", "--layers", "0", "--oracle", "measure", "--copies", "2"],
    "file": ["--checkpoint", FIXTURE, "--max-tokens", "512"],
}
SMALL = {
    "qwen3": ["--synthetic", "tiny:int4_g128"],
    "gpt-oss": ["--synthetic", "tiny-oss:mxfp4", "--layers", "0", "--oracle", "measure", "--copies", "2"],
    "file": ["--checkpoint", FIXTURE, "--max-tokens", "512"],
}
"""The same for machines without an accelerator: the script itself is tried with --device cpu."""
SETS = 8
"""Inputs that take turns, so that weights come from memory: 8 sets of one token touch 150 MB of Qwen3's layer."""


class Server:
    """`expertd serve` as a process; seconds: from its start to SERVING."""

    def __init__(self, name: str, args: list[str], log: Path) -> None:
        self.name, self.log, self.start = name, log, time.monotonic()
        command = [sys.executable, "-m", "expertd_server.cli", "serve", "--listen", "127.0.0.1:0", *args]
        with log.open("wb") as out:
            env = os.environ | {"PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        self.address, self.seconds = "", 0.0

    def poll(self) -> bool:
        """Whether it serves.  RuntimeError where it ended."""
        if found := re.search(r"serving on (\S+)", self.log.read_text()):
            self.address, self.seconds = found[1], time.monotonic() - self.start
            return True
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.text()[-1500:]}")
        return False

    def text(self) -> str:
        return self.log.read_text()

    def line(self, pattern: str) -> str:
        found = re.search(pattern, self.text())
        return found[0] if found else ""

    def stop(self, wait_s: float) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(wait_s)


class Script:
    """What is found, printed as it comes.  faults: what is wrong."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.monotonic()
        self.out: dict[str, object] = {}
        self.faults: list[str] = []
        self.servers: list[Server] = []

    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.1f}] {text}", flush=True)

    def check(self, ok: bool, what: str) -> None:
        if not ok:
            self.faults.append(what)
            self.say(f"FAULT: {what}")

    def boot(self, names: list[str], run: str) -> dict[str, Server]:
        """All at once; those that serve before the time is over."""
        cases = CASES if self.args.device != "cpu" else SMALL
        waiting = {}
        for n in names:
            cache = self.args.out / f"cache-{n}"
            args = [*cases[n], "--device", self.args.device, "--cache", str(cache)]
            waiting[n] = Server(n, args, self.args.out / f"{n}-{run}.log")
            self.servers.append(waiting[n])
        ready: dict[str, Server] = {}
        while waiting and self.left() > 6:
            for n, s in list(waiting.items()):
                try:
                    if not s.poll():
                        continue
                except RuntimeError as e:
                    self.check(False, str(e))
                else:
                    ready[n] = s
                    self.say(
                        f"{n} {run}: SERVING after {s.seconds:.1f} s; {s.line('loaded .*')}; {s.line('cache: .*')}"
                    )
                del waiting[n]
            time.sleep(0.05)
        for n, s in waiting.items():
            self.check(False, f"{n} {run}: not SERVING after {time.monotonic() - s.start:.0f} s: {s.text()[-400:]}")
        self.out[f"boot {run}"] = {n: [s.seconds, s.line("loaded .*")] for n, s in ready.items()}
        return ready


def weights_of(name: str, device: str) -> tuple:
    args = (CASES if device != "cpu" else SMALL)[name]
    source = open_checkpoint(args[1]) if args[0] == "--checkpoint" else SyntheticModel.parse(args[1])
    layer = source.layers[0]
    return source.load(layer).to(torch.device(device)), layer


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


def verify(s: Script, server: Server, weights, layer: int) -> None:
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
    """Microseconds a call of the layer alone: SETS calls in one CUDA graph."""
    experts = build(decide(problem_of(weights, detect_device(device), top_k=top_k)), weights)
    sets = [
        random_inputs(tokens, weights.hidden_size, weights.num_experts, top_k, seed=i, device=device)
        for i in range(SETS)
    ]
    out = torch.empty_like(sets[0][0])
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        experts(*sets[0], out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for x in sets:
                experts(*x, out=out)
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / SETS)
    return min(times)


def latency(s: Script, server: Server, weights, layer: int, top_k: int, tokens: int) -> None:
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
    s.out[f"latency {tokens}"] = row
    s.say(f"M = {tokens}: " + ", ".join(f"{k} {v:.0f}" for k, v in row.items()) + " us")


def throughput(s: Script, server: Server, tokens: int, processes: int, callers: int, seconds: float) -> None:
    """callers in a closed loop, spread over processes."""
    command = [sys.executable, "-m", "expertd_client.cli", "load", server.address, "--m", str(tokens), "--json"]
    command += ["--concurrency", str(callers // processes), "--duration", str(seconds), "--warmup", "8"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    found = [json.loads(p.communicate(timeout=seconds + 20)[0]) for p in runs]
    s.out[f"load {tokens} x {callers} in {processes}"] = found
    rate = sum(f.get("tokens_per_s", 0.0) for f in found)
    shown = {k: v for k, v in found[0].items() if isinstance(v, (int, float))}
    s.say(f"{callers} callers in {processes} processes, M = {tokens}: {rate:,.0f} tokens/s; {json.dumps(shown)[:300]}")


def together(s: Script, server: Server, weights, layer: int, top_k: int) -> None:
    """8 callers at once: right answers, and batches that join."""
    device = weights.w13.codes.device
    sets = [random_inputs(8, weights.hidden_size, weights.num_experts, top_k, seed=50 + i) for i in range(8)]
    right = [reference_rows(weights, *(t.to(device) for t in x), False).cpu() for x in sets]
    joined, worst, barrier = [0] * 8, [0.0] * 8, threading.Barrier(8)

    def caller(i: int) -> None:
        with ExpertClient(server.address, timeout_s=30) as client:
            client.describe()
            barrier.wait()
            for _ in range(20):
                a = client.forward(layer, *sets[i])
                joined[i] = max(joined[i], a.timing.batch_requests)
                worst[i] = max(worst[i], relative_error(torch.as_tensor(a.output), right[i]))

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    s.say(f"8 callers: worst error {max(worst):.1e}, up to {max(joined)} requests a batch")
    s.check(max(worst) <= tolerance("bf16") and max(joined) > 1, f"8 callers: {worst}, {joined}")


def drain(s: Script, server: Server, weights, layer: int, top_k: int) -> None:
    """SIGTERM while 4 callers call: every one is answered until it is refused, and the exit code is 0."""
    x = random_inputs(64, weights.hidden_size, weights.num_experts, top_k, seed=1)
    answered, ended = [0] * 4, [""] * 4

    def caller(i: int) -> None:
        with ExpertClient(server.address, timeout_s=30) as client:
            while True:
                try:
                    client.forward(layer, *x)
                except Exception as e:
                    ended[i] = type(e).__name__
                    return
                answered[i] += 1

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    time.sleep(0.5)
    begin = time.monotonic()
    code = server.stop(20)
    took = time.monotonic() - begin
    for t in threads:
        t.join()
    said = re.search(r"stopped: all (\d+) requests", server.text())
    s.say(
        f"SIGTERM under load: exit {code} after {took:.2f} s; {sum(answered)} answered; callers ended with {set(ended)}"
    )
    s.check(code == 0 and said is not None, f"drain: exit {code}: {server.text()[-600:]}")
    s.check(set(ended) <= {"DrainingError", "UnavailableError"}, f"drain: {ended}")


def stage(s: Script, name: str, least_s: float, body: Callable[[], None]) -> None:
    if s.left() < least_s:
        s.say(f"{name}: not reached, {s.left():.0f} s are left")
        return
    try:
        body()
    except Exception as e:
        s.check(False, f"{name}: {type(e).__name__}: {e}")


def run(s: Script) -> None:
    loaded: dict[str, tuple] = {}
    cases = s.args.cases
    reader = threading.Thread(target=lambda: loaded.update({n: weights_of(n, s.args.device) for n in cases}))
    reader.start()
    first = s.boot(cases, "first")
    reader.join()
    top_k = 8 if s.args.device != "cpu" else 2
    for n, server in first.items():
        stage(s, f"verify {n}", 2, lambda n=n, server=server: verify(s, server, *loaded[n]))
        if n == "qwen3":
            stage(s, "drain", 2, lambda n=n, server=server: drain(s, server, *loaded[n], top_k))
        else:
            stage(s, f"stop {n}", 0, lambda server=server: s.check(server.stop(15) == 0, server.text()[-300:]))
    if s.left() < 10:
        s.say(f"second boots: not reached, {s.left():.0f} s are left")
        return
    again = s.boot(list(first), "second")
    for n, server in again.items():
        with ExpertClient(server.address) as client:
            s.check(all(x.from_cache for x in client.describe().layers), f"{n}: a second boot packed again")
        stage(s, f"verify {n}", 2, lambda n=n, server=server: verify(s, server, *loaded[n]))
    if "qwen3" in again:
        figures(s, again["qwen3"], *loaded["qwen3"], top_k)
    for n, server in again.items():
        stage(s, f"stop {n}", 0, lambda server=server: s.check(server.stop(15) == 0, server.text()[-300:]))


def figures(s: Script, server: Server, weights, layer: int, top_k: int) -> None:
    for m in s.args.sizes:
        stage(s, f"latency {m}", 1.5, lambda m=m: latency(s, server, weights, layer, top_k, m))
    stage(s, "8 callers", 2, lambda: together(s, server, weights, layer, top_k))
    for tokens, processes in ((8, 1), (8, 4), (256, 4)):
        stage(s, f"load {tokens}", 4, lambda t=tokens, p=processes: throughput(s, server, t, p, 8, 1.5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=66)
    parser.add_argument("--out", type=Path, default=Path("build/device_server"))
    parser.add_argument("--graph", action="store_true", help="time the layer alone in this process, too (compiles)")
    parser.add_argument("--cases", type=lambda t: t.split(","), default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--sizes", type=lambda t: [int(m) for m in t.split(",")], default=[1, 8, 64, 512])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    s = Script(args)
    try:
        run(s)
    finally:
        for server in s.servers:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
        (args.out / "device_server.json").write_text(json.dumps({"found": s.out, "faults": s.faults}, indent=1))
        with contextlib.suppress(OSError):
            s.say(f"{len(s.faults)} faults; details in {args.out}")
    return 1 if s.faults else 0


if __name__ == "__main__":
    sys.exit(main())
