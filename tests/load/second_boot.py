"""How much a cache of packed weights shortens a boot, and what a damaged entry does.

    python tests/load/second_boot.py [--device cuda] [--kind gptq:1.2] [--sizes 1,8,64] [--seconds 90] [--out DIR]

Writes a random checkpoint with layers of Qwen3-30B-A3B's shape and boots one `expertd serve` after another from it:

    bare     an empty cache, nothing compiled either (the first start on a machine)
    second   everything in the cache: round trips are measured with this one
    damaged  one byte of an entry was turned: it must be found, said, and made again
    packing  an empty cache, kernels compiled before: what packing alone costs

Each must give right answers.  Exit code 1 = one does not, or something was packed that was in the cache, or the damage
was not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from served import Report, Server, latency, verify

from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.checkpoint.synthetic_files import write_synthetic

TOP_K = 8


def bare_start_s(device: str) -> float:
    """Seconds of a process that imports torch and touches the device, and does nothing else."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import torch; torch.ones(1, device={device!r})"], check=True)
    return time.monotonic() - begin


def turn_a_byte(cache: Path) -> Path:
    """In the middle of one entry: in its weights."""
    entry = min(cache.glob("*.packed"))
    entry.chmod(0o644)
    with entry.open("r+b") as f:
        f.seek(entry.stat().st_size // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 0x40]))
    return entry


class Boots:
    """Servers of one checkpoint, one at a time."""

    def __init__(self, report: Report, checkpoint: Path) -> None:
        self.report, self.checkpoint = report, checkpoint
        source = open_checkpoint(str(checkpoint))
        self.layers = source.layers
        self.weights = source.load(self.layers[0]).to(torch.device(report.args.device))
        self.seconds: dict[str, float] = {}

    def run(self, name: str, cache: Path, lookups: str, measure: bool = False) -> str:
        """Boot, check, perhaps measure, stop; returns what the server printed.

        lookups: what it must say of the cache."""
        r = self.report
        args = ["--checkpoint", str(self.checkpoint), "--device", r.args.device, "--cache", str(cache)]
        compiled = {"TRITON_CACHE_DIR": str(r.args.out / "compiled")}
        server = Server(name, args, r.args.out / f"{name}.log", compiled)
        r.servers.append(server)
        server.wait(r.left())
        self.seconds[name] = server.seconds
        r.say(f"{name}: serving after {server.seconds:.2f} s; {server.line('loaded .*')}; {server.line('cache: .*')}")
        r.check(f"cache: {lookups}" in server.text(), f"{name}: want 'cache: {lookups}' in:\n{server.text()[-1500:]}")
        layer = self.layers[0]
        verify(r, server, self.weights, layer)
        if measure:
            for m in r.args.sizes:
                r.stage(f"round trips of {m}", 2, lambda m=m: latency(r, server, self.weights, layer, TOP_K, m))
        r.check(server.stop(20) == 0, f"{name}: {server.text()[-500:]}")
        return server.text()

    def check(self, name: str, cache: Path, lookups: str) -> None:
        """run() for its checks alone."""
        self.run(name, cache, lookups)


def run(r: Report) -> None:
    out: Path = r.args.out
    checkpoint = out / "checkpoint"
    shutil.rmtree(out, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    write_synthetic(checkpoint, r.args.kind)
    boots = Boots(r, checkpoint)
    layers, cache = len(boots.layers), out / "cache"
    r.say(f"{layers} layers, {sum(p.stat().st_size for p in checkpoint.iterdir()) / 1e9:.2f} GB")
    r.say(f"a process that imports torch and touches the device takes {bare_start_s(r.args.device):.2f} s")
    boots.run("bare", cache, f"{layers} miss")
    boots.run("second", cache, f"{layers} hit", measure=True)
    entry = turn_a_byte(cache)
    rest = f", {layers - 1} hit" if layers > 1 else ""
    r.stage("damaged", 8, lambda: damaged(boots, cache, f"1 damaged{rest}", entry))
    r.stage("packing", 8, lambda: boots.check("packing", out / "cache2", f"{layers} miss"))
    s = boots.seconds
    r.found["seconds to serving"] = s
    r.say(", ".join(f"{n} is {v / s['second']:.1f} times as long as the second" for n, v in s.items() if n != "second"))


def damaged(boots: Boots, cache: Path, lookups: str, entry: Path) -> None:
    text = boots.run("damaged", cache, lookups)
    found = next((line for line in text.splitlines() if "cache: " in line and entry.name in line), "")
    boots.report.say(f"the server said: {found}")
    boots.report.check("packing it again" in text, f"the damage was not named:\n{text[-1500:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", default="gptq:1.2", help="KIND:GIB of the random checkpoint")
    parser.add_argument("--sizes", type=lambda t: [int(m) for m in t.split(",")], default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--out", type=Path, default=Path("build/second_boot"), help="emptied first")
    args = parser.parse_args()
    args.graph = False
    r = Report(args)
    try:
        run(r)
    finally:
        code = r.end("second_boot.json")
    return code


if __name__ == "__main__":
    sys.exit(main())
