"""How long a first start takes: `expertd serve` with nothing compiled, kernels compiled by processes ahead or not.

    python tests/load/cold_boot.py [--model qwen3-30b-a3b:int4_g128] [--layers 0-3] [--seconds 180] [--out DIR]

Boots in turns, each with an empty folder of Triton's own:

    before   $EXPERTD_COMPILE_PROCESSES=0: by threads of the server, layer by layer
    ahead    by processes, while the server plans and reads

and then `warm`, twice each: with the folder of `ahead`.  Of each boot it prints the seconds from the start of the
process to every line of its log, to SERVING, and of the first call.  Each must give right answers.  Exit code 1 = one
does not, or something could not be compiled ahead.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import torch
from second_boot import bare_start_s
from served import Report, Server, verify

from expertd_client import ExpertClient
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs

ROUNDS = 2


class Timed(Server):
    """A server that notes when each line of its log came."""

    def __init__(self, name: str, args: list[str], log: Path, env: dict[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        super().__init__(name, args, log, env)

    def poll(self) -> bool:
        now, lines = time.monotonic() - self.start, self.log.read_text().splitlines()
        self.lines += [(now, line) for line in lines[len(self.lines) :]]
        return super().poll()


class Boots:
    """Servers of one model, one at a time."""

    def __init__(self, report: Report) -> None:
        self.report, args = report, report.args
        self.seconds: dict[str, list[float]] = {}
        source = SyntheticModel.parse(args.model, torch.device(args.device))
        self.layer = source.layers[0]
        self.weights, self.top_k = source.load(self.layer), source.info(self.layer).top_k

    def run(self, name: str, compiled: Path, env: dict[str, str]) -> None:
        """Boot, call, check, stop."""
        r, a = self.report, self.report.args
        args = ["--synthetic", a.model, "--layers", a.layers, "--device", a.device]
        if a.max_tokens:
            args += ["--max-tokens", str(a.max_tokens)]
        log = a.out / f"{name}-{len(self.seconds.get(name, []))}.log"
        server = Timed(name, args, log, {"TRITON_CACHE_DIR": str(compiled)} | env)
        r.servers.append(server)
        server.wait(r.left())
        self.seconds.setdefault(name, []).append(server.seconds)
        r.say(f"{name}: serving after {server.seconds:.2f} s; the first call {self.first_ms(server):.0f} ms")
        for at, line in server.lines:
            if line.strip() and not line.startswith(("│", "┃", "├", "╭", "╰", "┡", "┏", "└")):
                print(f"        {at:6.2f} s  {line[:150]}", flush=True)
        verify(r, server, self.weights, self.layer)
        r.check(server.stop(20) == 0, f"{name}: {server.text()[-500:]}")
        ahead = server.line(r"\d+ kernels compiled ahead.*")
        r.check("; " not in ahead, f"{name}: {ahead}")
        r.check(name != "ahead" or bool(ahead), f"{name}: nothing was compiled ahead")

    def first_ms(self, server: Server) -> float:
        """Of the first call, a new connection included."""
        batch = random_inputs(1, self.weights.hidden_size, self.weights.num_experts, self.top_k)
        begin = time.perf_counter()
        with ExpertClient(server.address, timeout_s=60) as client:
            client.forward(self.layer, *batch)
        return 1e3 * (time.perf_counter() - begin)


def run(r: Report) -> None:
    out: Path = r.args.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for _ in range(2):
        r.say(f"a process that imports torch and touches the device takes {bare_start_s(r.args.device):.2f} s")
    boots = Boots(r)
    for turn in range(ROUNDS):
        ahead = out / f"compiled-ahead-{turn}"
        r.stage("ahead", 15, lambda folder=ahead: boots.run("ahead", folder, {}))
        r.stage("warm", 15, lambda folder=ahead: boots.run("warm", folder, {}))
        before = out / f"compiled-before-{turn}"
        r.stage("before", 45, lambda folder=before: boots.run("before", folder, {"EXPERTD_COMPILE_PROCESSES": "0"}))
    r.found["seconds to serving"] = boots.seconds
    for name, seconds in boots.seconds.items():
        r.say(f"{name}: " + ", ".join(f"{s:.2f}" for s in seconds) + " s to serving")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="qwen3-30b-a3b:int4_g128", help="MODEL:SCHEME")
    parser.add_argument("--layers", default="0-3")
    parser.add_argument("--max-tokens", type=int, help="of a batch")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--out", type=Path, default=Path("build/cold_boot"), help="emptied first")
    args = parser.parse_args()
    args.graph = False
    r = Report(args)
    try:
        run(r)
    finally:
        code = r.end("cold_boot.json")
    return code


if __name__ == "__main__":
    sys.exit(main())
