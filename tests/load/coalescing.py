"""Does coalescing pay?  8 clients with 8 tokens each at once, against the same calls one after another, on one server.

    python tests/load/coalescing.py [--synthetic gpt-oss-20b:mxfp4] [--clients 8] [--tokens 8] [--rounds 20] [--json]

Starts `expertd serve` as a process of its own with one layer of the model, calls it from plain grpcio clients over
loopback, compares every answer of the concurrent calls with that of the same call made alone, and prints both
throughputs and their ratio.  Exit code 1 = an answer differs by more than the tolerance, or the ratio is below
--least.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_kernels import relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.models import MODELS

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def start(args: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    """The server and its address, once it serves."""
    command = [
        sys.executable,
        "-m",
        "expertd_server.commands.cli",
        "serve",
        "--synthetic",
        args.synthetic,
        "--layers",
        "0",
    ]
    command += ["--listen", "127.0.0.1:0", "--device", args.device, "--threads", str(args.threads)]
    command += ["--backend", args.backend]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"serving on (\S+)", line):
            return process, found[1]
        print("  " + line.rstrip(), file=sys.stderr)
    raise SystemExit(f"coalescing: the server did not come up (exit code {process.wait()})")


def requests(args: argparse.Namespace) -> list[pb.ForwardRequest]:
    """One for each client: its own tokens and its own routes, uniform over the experts."""
    shape = MODELS[args.synthetic.partition(":")[0]]
    out = []
    for i in range(args.clients):
        x, ids, w = random_inputs(args.tokens, shape.hidden_size, shape.num_experts, shape.top_k, seed=i)
        out.append(
            pb.ForwardRequest(
                layer=0,
                hidden_states=pb.Tensor(
                    dtype=pb.DATA_TYPE_BF16, shape=x.shape, raw=x.view(torch.int16).numpy().tobytes()
                ),
                topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=ids.shape, raw=ids.numpy().tobytes()),
                topk_weights=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=w.shape, raw=w.numpy().tobytes()),
            )
        )
    return out


def output(a: pb.ForwardResponse) -> torch.Tensor:
    raw = np.frombuffer(a.output.raw, np.int16).reshape(list(a.output.shape))
    return torch.from_numpy(raw.copy()).view(torch.bfloat16)


def one_after_another(stubs, batches, rounds) -> tuple[float, list[pb.ForwardResponse]]:
    """(seconds, the answers of the last round)"""
    begin = time.perf_counter()
    for _ in range(rounds):
        answers = [stub.Forward(r) for stub, r in zip(stubs, batches, strict=True)]
    return time.perf_counter() - begin, answers


def at_once(stubs, batches, rounds) -> tuple[float, list[list[pb.ForwardResponse]]]:
    """(seconds, the answers of every client).  Each client sends its next call when it has its last answer."""
    barrier = threading.Barrier(len(stubs) + 1)

    def client(stub, r) -> list[pb.ForwardResponse]:
        barrier.wait()
        return [stub.Forward(r) for _ in range(rounds)]

    with ThreadPoolExecutor(len(stubs)) as pool:
        futures = [pool.submit(client, stub, r) for stub, r in zip(stubs, batches, strict=True)]
        barrier.wait()
        begin = time.perf_counter()
        answers = [f.result() for f in futures]
        return time.perf_counter() - begin, answers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--synthetic", default="gpt-oss-20b:mxfp4")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of the server's kernels; 0 = torch's default")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--least", type=float, default=0.0, help="fail below this ratio")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    batches = requests(args)
    process, address = start(args)
    channels = [grpc.insecure_channel(address, options=OPTIONS) for _ in batches]
    try:
        stubs = [ExpertServiceStub(c) for c in channels]
        one_after_another(stubs, batches, 1)
        alone_s, alone = one_after_another(stubs, batches, args.rounds)
        together_s, together = at_once(stubs, batches, args.rounds)
    finally:
        for c in channels:
            c.close()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    errors = [relative_error(output(b), output(a)) for a, mine in zip(alone, together, strict=True) for b in mine]
    joined = [a.timing.batch_tokens for mine in together for a in mine]
    tokens = args.clients * args.tokens * args.rounds
    found = {
        "synthetic": args.synthetic,
        "backend": alone[0].timing.backend,
        "clients": args.clients,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "one_after_another_tokens_per_s": tokens / alone_s,
        "at_once_tokens_per_s": tokens / together_s,
        "ratio": alone_s / together_s,
        "mean_joined_tokens": statistics.fmean(joined),
        "kernel_ms_alone": statistics.median(a.timing.kernel_ns for a in alone) / 1e6,
        "kernel_ms_joined": statistics.median(a.timing.kernel_ns for mine in together for a in mine) / 1e6,
        "largest_relative_difference": max(errors),
        "tolerance": tolerance("bf16"),
    }
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        table = Table(title=f"{args.synthetic} on {found['backend']}: {args.clients} clients x {args.tokens} tokens")
        for name in ("calls", "tokens/s", "tokens a batch", "kernel ms a batch"):
            table.add_column(name, justify="right")
        table.add_row(
            "one after another",
            f"{tokens / alone_s:,.0f}",
            str(args.tokens),
            f"{found['kernel_ms_alone']:.2f}",
        )
        table.add_row(
            "at once",
            f"{tokens / together_s:,.0f}",
            f"{found['mean_joined_tokens']:.1f}",
            f"{found['kernel_ms_joined']:.2f}",
        )
        Console().print(table)
        print(
            f"ratio {found['ratio']:.2f}; largest relative difference {max(errors):.1e},"
            f" tolerance {tolerance('bf16'):.0e}"
        )
    return 0 if code == 0 and max(errors) <= tolerance("bf16") and found["ratio"] >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
