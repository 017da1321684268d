"""The cost of `--deterministic batches` on a CPU: each layer with and without it, in turns, at each level that runs.

    python kernels/bench/cpu_invariant.py --threads 2 [--levels avx2] [--schemes int4_g128,bf16] [--tokens 1,16,256]

Prints, for each level, scheme and number of tokens: the medians of both in ms, default / invariant, the error against
the float32 reference, and whether the last token has the same bits alone and in the batch.  The last-level cache is
emptied before each call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import torch

from expertd_kernels import detect_device, problem_of, reference, relative_error
from expertd_kernels.backends import cpu
from expertd_kernels.native import library as native
from expertd_kernels.sources.synthetic import random_inputs, random_weights

SCHEMES = "int4_g128,mxfp4,int8_g128,e4m3_block128,bf16"
EMPTIED = 600 << 20


def seconds(experts: cpu.CpuExperts, inputs: tuple[torch.Tensor, ...], other: torch.Tensor) -> float:
    """Of one call from memory."""
    native.library().expertd_cpu_read_gb_s(experts.context.handle, other.data_ptr(), other.numel())
    out = torch.empty_like(inputs[0])
    start = time.perf_counter()
    experts(*inputs, out=out)
    return time.perf_counter() - start


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def compared(
    pair: Sequence[cpu.CpuExperts], inputs: Inputs, want: torch.Tensor, other: torch.Tensor, rounds: int
) -> str:
    """Both variants of a layer, in turns: times, ratio, error, and whether the bits are the same alone."""
    times: list[list[float]] = [[], []]
    for i in range(rounds + 1):  # the first one warms up
        for which in (0, 1) if i % 2 else (1, 0):
            times[which].append(seconds(pair[which], inputs, other))
    x, ids, w = inputs
    n = len(want)
    error = relative_error(pair[1](x[:n], ids[:n], w[:n]), want)
    same = torch.equal(pair[1](x[-1:], ids[-1:], w[-1:])[0], pair[1](*inputs)[-1])
    a, b = (1e3 * statistics.median(t[1:]) for t in times)
    return f"{a:9.2f} {b:9.2f} {a / b:6.2f} {error:8.1e} {'same' if same else 'DIFFER'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--levels", default=",".join(native.levels()), help="comma-separated")
    parser.add_argument("--schemes", default=SCHEMES, help="comma-separated")
    parser.add_argument("--tokens", default="1,4,16,256,1024", help="comma-separated")
    parser.add_argument("--shape", default="32,2048,768,4", help="experts, hidden, intermediate, top_k")
    parser.add_argument("--threads", type=int, default=native.default_threads())
    parser.add_argument("--rounds", type=int, default=7, help="calls of each variant")
    args = parser.parse_args()
    E, H, I, k = map(int, args.shape.split(","))
    args.other = torch.zeros(EMPTIED, dtype=torch.uint8)
    print(f"E {E}, H {H}, I {I}, top_k {k}; {args.threads} threads; medians of {args.rounds}, ms")
    print(f"{'level':20} {'scheme':14} {'M':>5} {'default':>9} {'invariant':>9} {'ratio':>6} {'error':>8} bits")
    for scheme in args.schemes.split(","):
        weights = random_weights(scheme, E, H, I)
        problems = [
            problem_of(weights, detect_device("cpu"), top_k=k, batch_invariant=invariant) for invariant in (False, True)
        ]
        packed = cpu.pack(weights, problems[0])
        batches = [random_inputs(m, H, E, k, seed=m, dtype=torch.bfloat16) for m in map(int, args.tokens.split(","))]
        wants = [reference(weights, *(t[:4] for t in inputs)) for inputs in batches]
        for level in args.levels.split(","):
            os.environ["EXPERTD_CPU_ISA"] = level
            pair = [cpu.CpuExperts(packed, p, native.context(threads=args.threads)) for p in problems]
            for inputs, want in zip(batches, wants, strict=True):
                said = compared(pair, inputs, want, args.other, args.rounds)
                print(f"{level:20} {scheme:14} {len(inputs[0]):5} {said}", flush=True)


if __name__ == "__main__":
    main()
