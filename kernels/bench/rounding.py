"""`python kernels/bench/rounding.py`: weights rounded on one core of this CPU, by the compiled kernel and by the steps
of torch that it replaces, in turns.  Bits are compared before a time is printed."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from unittest import mock

import torch

from expertd_kernels.native.library import level_in_use, use_threads
from expertd_kernels.native.rounding import rounds
from expertd_kernels.weights import quantize
from expertd_kernels.weights.canonical import QuantTensor
from expertd_kernels.weights.scheme import Element, Scheme

__all__ = ["main"]

SCHEMES = ("int4_g128", "int4_g128_zp", "int4_channel", "mxfp4", "nvfp4", "e4m3_channel")


def rounded(q: QuantTensor, scheme: Scheme, native: bool) -> tuple[QuantTensor, float]:
    """The matrix in `scheme`, and the CPU seconds of this process."""
    taken = rounds if native else lambda columns, block: False
    with mock.patch.object(quantize, "rounds", taken):
        begin = time.process_time()
        out = quantize.quantize_matrix(q, scheme)
        return out, time.process_time() - begin


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", type=int, default=1024, help="of each of 4 experts (1024)")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    use_threads(1)
    w = torch.randn(4, args.rows, args.columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = QuantTensor(Scheme(Element.BF16), (4, args.rows, args.columns), w, segments=2)
    print(f"bf16 {list(w.shape)}, one thread, registers as for {level_in_use()}; millions of weights a CPU second")
    print(f"{'scheme':14} {'torch':>7} {'kernel':>7} {'ratio':>6}")
    for name in SCHEMES:
        scheme = Scheme.parse(name)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.turns):
            found = {}
            for native in (False, True):
                found[native], took = rounded(q, scheme, native)
                seconds[native].append(took)
            for (field, a), (_, b) in zip(found[True].tensors(), found[False].tensors(), strict=True):
                if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                    print(f"{name}: {field} differ")
                    return 1
        slow, quick = (w.numel() / statistics.median(seconds[native]) / 1e6 for native in (False, True))
        print(f"{name:14} {slow:7.1f} {quick:7.1f} {quick / slow:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
