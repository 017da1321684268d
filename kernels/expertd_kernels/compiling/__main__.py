"""The process that ahead.py starts: python -m expertd_kernels.compiling PROCESSES

Reads a pickled Job from its own parent on stdin, once everything is imported; writes one line of JSON (ahead.Outcome).
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    begin = time.perf_counter()
    import torch

    torch.set_num_threads(1)  # threads would be lost in forks
    from expertd_kernels.backends import gluon_sm90, gluon_w8a8, triton  # noqa: F401 - while the parent is planning
    from expertd_kernels.compiling.compiler import compile_all, kernels_of, with_launchers

    ready = time.perf_counter()
    raw = sys.stdin.buffer.read()
    if not raw:
        return 0
    taken = time.perf_counter()
    kernels, faults = kernels_of(pickle.loads(raw))
    found = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="expertd-") as claims:
        faults += compile_all(with_launchers(kernels, Path(claims)), int(sys.argv[1]))
    end = time.perf_counter()
    seconds = {"importing": ready - begin, "finding": found - taken, "compiling": end - found}
    print(json.dumps({"kernels": len(kernels), "faults": faults, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
