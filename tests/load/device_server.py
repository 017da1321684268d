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
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from served import Report, Server, latency, verify

from expertd_client import ExpertClient
from expertd_kernels import relative_error, tolerance
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.packed.integrity import reference_rows
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs

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


def weights_of(name: str, device: str) -> tuple:
    args = (CASES if device != "cpu" else SMALL)[name]
    source = open_checkpoint(args[1]) if args[0] == "--checkpoint" else SyntheticModel.parse(args[1])
    layer = source.layers[0]
    return source.load(layer).to(torch.device(device)), layer


def boot(r: Report, names: list[str], run: str) -> dict[str, Server]:
    """All at once; those that serve before the time is over."""
    cases = CASES if r.args.device != "cpu" else SMALL
    waiting = {}
    for n in names:
        cache = r.args.out / f"cache-{n}"
        args = [*cases[n], "--device", r.args.device, "--cache", str(cache)]
        waiting[n] = Server(n, args, r.args.out / f"{n}-{run}.log")
        r.servers.append(waiting[n])
    ready: dict[str, Server] = {}
    while waiting and r.left() > 6:
        for n, s in list(waiting.items()):
            try:
                if not s.poll():
                    continue
            except RuntimeError as e:
                r.check(False, str(e))
            else:
                ready[n] = s
                r.say(f"{n} {run}: SERVING after {s.seconds:.1f} s; {s.line('loaded .*')}; {s.line('cache: .*')}")
            del waiting[n]
        time.sleep(0.05)
    for n, s in waiting.items():
        r.check(False, f"{n} {run}: not SERVING after {time.monotonic() - s.start:.0f} s: {s.text()[-400:]}")
    r.found[f"boot {run}"] = {n: [s.seconds, s.line("loaded .*")] for n, s in ready.items()}
    return ready


def throughput(s: Report, server: Server, tokens: int, processes: int, callers: int, seconds: float) -> None:
    """callers in a closed loop, spread over processes."""
    command = [sys.executable, "-m", "expertctl.cli", "load", server.address, "--m", str(tokens), "--json"]
    command += ["--concurrency", str(callers // processes), "--duration", str(seconds), "--warmup", "8"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    found = [json.loads(p.communicate(timeout=seconds + 20)[0])["runs"][0] for p in runs]
    s.found[f"load {tokens} x {callers} in {processes}"] = found
    rate = sum(f.get("tokens_per_s", 0.0) for f in found)
    shown = {k: v for k, v in found[0].items() if isinstance(v, (int, float))}
    s.say(f"{callers} callers in {processes} processes, M = {tokens}: {rate:,.0f} tokens/s; {json.dumps(shown)[:300]}")


def together(s: Report, server: Server, weights, layer: int, top_k: int) -> None:
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


def drain(s: Report, server: Server, weights, layer: int, top_k: int) -> None:
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


def run(s: Report) -> None:
    loaded: dict[str, tuple] = {}
    cases = s.args.cases
    reader = threading.Thread(target=lambda: loaded.update({n: weights_of(n, s.args.device) for n in cases}))
    reader.start()
    first = boot(s, cases, "first")
    reader.join()
    top_k = 8 if s.args.device != "cpu" else 2
    for n, server in first.items():
        s.stage(f"verify {n}", 2, lambda n=n, server=server: verify(s, server, *loaded[n]))
        if n == "qwen3":
            s.stage("drain", 2, lambda n=n, server=server: drain(s, server, *loaded[n], top_k))
        else:
            s.stage(f"stop {n}", 0, lambda server=server: s.check(server.stop(15) == 0, server.text()[-300:]))
    if s.left() < 10:
        s.say(f"second boots: not reached, {s.left():.0f} s are left")
        return
    again = boot(s, list(first), "second")
    for n, server in again.items():
        with ExpertClient(server.address) as client:
            s.check(all(x.from_cache for x in client.describe().layers), f"{n}: a second boot packed again")
        s.stage(f"verify {n}", 2, lambda n=n, server=server: verify(s, server, *loaded[n]))
    if "qwen3" in again:
        figures(s, again["qwen3"], *loaded["qwen3"], top_k)
    for n, server in again.items():
        s.stage(f"stop {n}", 0, lambda server=server: s.check(server.stop(15) == 0, server.text()[-300:]))


def figures(s: Report, server: Server, weights, layer: int, top_k: int) -> None:
    for m in s.args.sizes:
        s.stage(f"latency {m}", 1.5, lambda m=m: latency(s, server, weights, layer, top_k, m))
    s.stage("8 callers", 2, lambda: together(s, server, weights, layer, top_k))
    for tokens, processes in ((8, 1), (8, 4), (256, 4)):
        s.stage(f"load {tokens}", 4, lambda t=tokens, p=processes: throughput(s, server, t, p, 8, 1.5))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=66)
    parser.add_argument("--out", type=Path, default=Path("build/device_server"))
    parser.add_argument("--graph", action="store_true", help="time the layer alone in this process, too (compiles)")
    parser.add_argument("--cases", type=lambda t: t.split(","), default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--sizes", type=lambda t: [int(m) for m in t.split(",")], default=[1, 8, 64, 512])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    s = Report(args)
    try:
        run(s)
    finally:
        code = s.end("device_server.json")
    return code


if __name__ == "__main__":
    sys.exit(main())
