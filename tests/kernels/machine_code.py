"""`python tests/kernels/machine_code.py OUT.json [--against OLD.json] [--only TEXT]`: hashes of the machine code of
every launch of the Hopper rows over the layers and tokens of the bench, made by the installed Triton; no GPU needed.

A change of names, rooms or rules that is meant to leave the kernels alone proves it with two runs.  With --against,
each launch whose code, shared memory or grid differs is named; exit code 1 where there is one."""

from __future__ import annotations

import os

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # or hashes would change with every line above a kernel

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from dry_gpu import launches, layer

from expertd_kernels.bench.cuda import SUITE
from expertd_kernels.weights.scheme import ActivationQuant

TOKENS = tuple(1 << i for i in range(14))
ROUNDED = (
    ("qwen3-30b-a3b", "e4m3_block128", "e4m3_group128"),
    ("deepseek-v3/64", "e4m3_block128", "e4m3_group128"),
    ("mixtral-8x7b", "e4m3_block128", "e4m3_group128"),
    ("qwen3-30b-a3b", "e4m3_channel", "e4m3_token"),
    ("qwen3-30b-a3b", "e4m3_tensor", "e4m3_tensor"),
)
LAYERS = (
    *dict.fromkeys((shape, scheme, "none") for shape, scheme, _ in SUITE),
    ("qwen3-30b-a3b", "int4_g32_zp", "none"),
    *ROUNDED,
)


def facts(found: Any) -> dict[str, Any]:
    """What must not differ of a launch."""
    made = found.compiled
    return {
        "code": hashlib.sha256(made.asm["cubin"]).hexdigest()[:12],
        "shared": made.metadata.shared,
        "grid": list(found.grid),
    }


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("out", type=Path)
    p.add_argument("--against", type=Path)
    p.add_argument("--only", default="", help="layers whose name has this text")
    args = p.parse_args()
    index: dict[str, dict[str, Any]] = {}
    for shape, scheme, rounding in LAYERS:
        name = f"{shape} {scheme} {rounding}"
        if args.only not in name:
            continue
        experts = layer(shape, scheme, ActivationQuant(rounding))
        for tokens in TOKENS:
            for i, found in enumerate(launches(experts, shape, tokens)):
                index[f"{name} M={tokens} {i} {found.kernel}"] = facts(found)
        print(name, len(index), flush=True)
    args.out.write_text(json.dumps(index, indent=1) + "\n")
    if args.against is None:
        return 0
    old = {k: v for k, v in json.loads(args.against.read_text()).items() if args.only in k}
    changed = [k for k in sorted(old.keys() | index.keys()) if old.get(k) != index.get(k)]
    for k in changed:
        print(f"{k}: {old.get(k)} -> {index.get(k)}")
    print(f"{len(changed)} of {len(index)} launches differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
