"""What callers on the server's host get of an accelerator: `expertd serve`, and clients in processes of their own.

    python tests/load/data_path.py [--device cuda] [--model qwen3-30b-a3b:int4_g128] [--layers 0-3] [--seconds 1]
                                   [--threads N]
                                   [--loads 1x1,1x8,8x8] [--transports shm,tcp,inline] [--out FILE.json]

A load is CALLERSxTOKENS: each caller sends its next request when the last one is answered, going through the layers.
"s" behind it: tensors are made in a slot.  The last answer of each caller is compared with the float32 reference
(its memory was poisoned before); a row without that is an error, and the exit code 1.  busy: part of the time in which
the device computed batches, as the server counts it.  around: median of what a request takes beyond its own kernel, one
in sixteen looked at; of it queue and collect are the server's, before the kernel.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import re
import sys
import time
import urllib.request
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from expertd_client import ExpertClient, GrpcTransport
from expertd_client.transports.tcp.connection import TcpTransport

LOADS = "1x1,1x8,1x64,1x128,1x512,1x2048,1x128s,1x512s,8x8,32x4,8x256s"
CHECKED_ROWS = 4


def inputs(caller: int, tokens: int, experts: int, top_k: int, hidden: int) -> tuple[Any, Any, Any]:
    """bf16 [M, H], ids [M, top_k] i32 without repeats, weights [M, top_k] f32."""
    g = np.random.default_rng(1000 + caller)
    x = g.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    ids = g.random((tokens, experts)).argsort(1)[:, :top_k].astype(np.int32)
    return x, ids, g.random((tokens, top_k), np.float32) / np.float32(top_k)


def call(
    caller: int, address: str, load: Load, shape: tuple[int, int, int], layers: list[int], seconds: float, way: str,
    start: Barrier, out: Any,
) -> None:  # fmt: skip
    """One process: puts (caller, seconds of each call, (whole, queue, collect, kernel) ns of some, rows of the last
    output, its layer)."""
    ways = {"shm": lambda: address, "tcp": lambda: GrpcTransport(address, offers=[TcpTransport(address)])}
    with ExpertClient(ways.get(way, lambda: GrpcTransport(address))(), timeout_s=60) as client:
        got = client.session().transport
        assert got == way, (got, client.session())
        x, ids, w = inputs(caller, load.tokens, *shape)
        if load.slot:
            slot = client.slot(*x.shape, ids.shape[1])
            slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = x, ids, w
            ask = slot.forward
        else:
            last: list[Any] = []

            def ask(layer: int) -> Any:
                last[:] = [client.forward(layer, x, ids, w)]
                return last[0].output

        for _ in range(6):
            for layer in layers:
                output = ask(layer)
        output[:] = float("nan")
        start.wait(120)
        end, times, stages, n = time.perf_counter() + seconds, [], [], 0
        while (begin := time.perf_counter()) < end:
            output = ask(layers[n % len(layers)])
            times.append(time.perf_counter() - begin)
            n += 1
            if n % 16 == 0:
                t = (slot if load.slot else last[0]).timing
                stages.append((times[-1] * 1e9, t.queue_ns, t.copy_in_ns, t.kernel_ns))
        out.put((caller, times, stages, output[:CHECKED_ROWS].astype(np.float32), layers[(n - 1) % len(layers)]))
        start.wait(120)


class Load:
    def __init__(self, text: str) -> None:
        m = re.fullmatch(r"(\d+)x(\d+)(s?)", text)
        if m is None:
            raise argparse.ArgumentTypeError(f"load: got {text!r}, want CALLERSxTOKENS, as 8x256, or 8x256s")
        self.text, self.callers, self.tokens, self.slot = text, int(m[1]), int(m[2]), bool(m[3])


def kernel_seconds(metrics: str) -> float:
    text = urllib.request.urlopen(metrics, timeout=10).read().decode()
    return sum(float(v) for v in re.findall(r"^expertd_kernel_seconds_sum\{.*?\} (\S+)", text, re.M))


def measure(load: Load, way: str, server: Any, shape: tuple[int, int, int], layers: list[int], args: Any) -> Any:
    """The row of one load."""
    spawn = mp.get_context("spawn")
    start, out = spawn.Barrier(load.callers + 1), spawn.Queue()
    callers = [
        spawn.Process(
            target=call, args=(i, server.address, load, shape, layers, args.seconds, way, start, out), daemon=True
        )
        for i in range(load.callers)
    ]
    for p in callers:
        p.start()
    metrics = re.search(r"metrics on (\S+)", server.text())[1]
    start.wait(120)
    before, begin = kernel_seconds(metrics), time.perf_counter()
    found = [out.get(timeout=args.seconds + 60) for _ in callers]
    busy = (kernel_seconds(metrics) - before) / (time.perf_counter() - begin)
    start.wait(120)
    for p in callers:
        p.join(20)
    times = np.sort(np.concatenate([np.array(t[1][len(t[1]) // 10 :]) for t in found])) * 1e6
    requests = sum(len(t[1]) for t in found) / args.seconds
    whole, queue, collect, kernel = np.concatenate([np.array(t[2]) for t in found]).T / 1e3
    row = {
        "transport": way, "load": load.text, "p50_us": times[len(times) // 2], "p99_us": times[int(len(times) * 0.99)],
        "p999_us": times[int(len(times) * 0.999)], "requests_per_s": requests,
        "tokens_per_s": requests * load.tokens, "busy": busy,
        "kernel_us": float(np.median(kernel)), "around_us": float(np.median(whole - kernel)),
        "queue_us": float(np.median(queue)), "collect_us": float(np.median(collect)),
    }  # fmt: skip
    return row, found


def error_of(found: list[Any], load: Load, shape: tuple[int, int, int], weights: dict[int, Any], device: str) -> float:
    """The largest relative error of the callers' last answers."""
    import torch

    from expertd_kernels import reference, relative_error

    worst = 0.0
    for caller, _, _, rows, layer in found[:4]:
        x, ids, w = (t[:CHECKED_ROWS] for t in inputs(caller, load.tokens, *shape))
        hidden = torch.from_numpy(x.astype(np.float32)).bfloat16().to(device)
        want = reference(weights[layer], hidden, *(torch.from_numpy(t).to(device) for t in (ids, w)))
        worst = max(worst, float(relative_error(torch.from_numpy(rows).to(device), want)))
    return worst


def main() -> int:
    import torch
    from served import Server  # not at the top: each caller's process reads this file, and needs no torch

    from expertd_kernels import tolerance
    from expertd_kernels.sources.synthetic import SyntheticModel

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="qwen3-30b-a3b:int4_g128")
    parser.add_argument("--layers", default="0-3")
    parser.add_argument("--experts", type=int, default=0, help="the first so many of each layer; default: all")
    parser.add_argument("--threads", help="of the server's kernels on a CPU; default: its own choice")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--transports", type=lambda t: t.split(","), default=["shm", "inline"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    loads = [Load(text) for text in args.loads.split(",")]
    source = SyntheticModel.parse(args.model, torch.device(args.device))
    first, _, last = args.layers.partition("-")
    layers = list(range(int(first), int(last or first) + 1))
    log = (args.out or Path("build/data_path.json")).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = ["--synthetic", args.model, "--layers", args.layers, "--device", args.device]
    command += ["--metrics-listen", "127.0.0.1:0"]
    if "tcp" in args.transports:
        command += ["--tcp-listen", "127.0.0.1:0"]
    if args.threads:
        command += ["--threads", args.threads]
    if args.experts:
        command += ["--experts", f"0-{args.experts - 1}"]
    server = Server("server", command, log)
    server.wait(200)
    with ExpertClient(server.address) as client:
        d = client.describe()
    shape = (args.experts or d.layers[0].num_experts, d.layers[0].top_k, d.model.hidden_size)
    device = args.device
    weights = {n: source.load(n, range(shape[0])).to(torch.device(device)) for n in layers}
    print(f"{args.model}, {len(layers)} layers, {d.layers[0].backend}, {torch.__version__}", flush=True)
    rows, ok = [], True
    for load in loads:
        for way in args.transports:
            if load.slot and way != "shm":
                continue
            try:
                row, found = measure(load, way, server, shape, layers, args)
            except Exception as e:
                print(f"{way} {load.text}: {type(e).__name__}: {e}", flush=True)
                ok = False
                continue
            row["error"] = error_of(found, load, shape, weights, device)
            good = row["error"] <= tolerance("bf16")
            ok &= good
            rows.append(row)
            print(
                f"{way:7s} {load.text:8s} us: p50 {row['p50_us']:8.1f} p99 {row['p99_us']:8.1f}"
                f" p99.9 {row['p999_us']:8.1f} kernel {row['kernel_us']:7.1f} around {row['around_us']:6.1f}"
                f" (queue {row['queue_us']:.1f} collect {row['collect_us']:.1f})"
                f" {row['requests_per_s']:9.0f} req/s {row['tokens_per_s']:10.0f} tok/s busy {row['busy']:.2f}"
                f" error {row['error']:.1e}{'' if good else ' WRONG'}",
                flush=True,
            )
    if args.out is not None:
        args.out.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1))
    server.stop(20)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
