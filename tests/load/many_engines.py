"""Many inference engines at once on one server, or on a cluster of three: python tests/load/many_engines.py

    [--engines 64] [--servers 1|3] [--seconds 180] [--steps-per-s 2] [--max-tokens 4096] [--json]

Each engine is a process with a tiny model of its own and an identity of its own (a token in the server's file of
callers); of 8 engines one is transformers, two are torch modules (RemoteExperts), five are numpy.  They are forked from
one process that has imported torch and transformers, so that 64 of them fit into a small machine.

    join       they come one after the other
    quiet      all of them speak
    churn      again and again two of them are killed, two stand still (SIGSTOP), two leave; then they come back
    elsewhere  all speak; one more identity floods another server of this host: what that takes of the machine alone
    flood      the same at their own server (one of the three)

A request that runs is not interrupted: --max-tokens bounds how long a flood's batch keeps the others waiting.

Every generation of every engine is compared with its own model in its own process.  The table has, of each phase, the
tokens, the calls and their latencies: the median and p99 over all engines' calls, and p99 of the engine whose p99 is
the largest.  Exit code 1 = a wrong token, an error, an engine that does not come back, or a server that ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from served import Server

PHASES = {"quiet": 0.25, "churn": 0.3, "elsewhere": 0.2, "flood": 0.25}
"""Parts of --seconds.  Joining comes before."""
MIX = ("numpy", "torch", "numpy", "numpy", "torch", "numpy", "transformers", "numpy")
READY_S = 300.0
STILL_S = 1.5
AT_ONCE = 4
"""Engines that start together: each imports nothing, but computes what it expects."""
FLOOD_TOKENS, FLOOD_IN_FLIGHT = 512, 8


@dataclass
class Spans:
    """phase -> (begin, end), by time.monotonic; still: of each engine, when it was stopped, killed or away."""

    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    still: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)


class Crowd:
    """The engines' processes."""

    def __init__(self, context: Any, engines: list[Any]) -> None:
        self.context = context
        self.engines = {engine.name: engine for engine in engines}
        self.processes: dict[str, Any] = {}

    def start(self, name: str) -> None:
        import engine_process

        process = self.context.Process(target=engine_process.run, args=(self.engines[name],), daemon=True)
        process.start()
        self.processes[name] = process

    def generations(self, name: str) -> int:
        """Lines of its file: it is up where there is one more than before it was started."""
        out = self.engines[name].out
        return len(out.read_bytes().splitlines()) if out.exists() else 0

    def wait(self, name: str, lines: int) -> None:
        """Until its file has so many lines.  RuntimeError where it ends or takes too long."""
        end_s = time.monotonic() + READY_S
        while self.generations(name) < lines:
            if not self.processes[name].is_alive() or time.monotonic() > end_s:
                raise RuntimeError(f"{name} does not speak: exit code {self.processes[name].exitcode}")
            time.sleep(0.02)

    def send(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)

    def end(self) -> list[str]:
        """SIGTERM to all; the names of those that did not end in order."""
        for process in self.processes.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.terminate()
        bad = []
        for name, process in self.processes.items():
            process.join(60)
            if process.exitcode != 0:
                bad.append(f"{name}: exit code {process.exitcode}")
                process.kill()
        return bad


def churn(crowd: Crowd, spans: Spans, end_s: float, rng: random.Random) -> None:
    """Turns of six engines: two are killed and come back, two stand still and go on, two leave and come back."""
    while time.monotonic() < end_s:
        chosen = rng.sample(list(crowd.engines), min(6, len(crowd.engines)))
        turn = [(name, ("kill", "still", "leave")[n % 3]) for n, name in enumerate(chosen)]
        begin_s = time.monotonic()
        for name, what in turn:
            crowd.send(name, {"kill": signal.SIGKILL, "still": signal.SIGSTOP, "leave": signal.SIGTERM}[what])
        time.sleep(STILL_S)
        lines = {name: away(crowd, name, what) for name, what in turn}
        for name, what in turn:
            if what == "still":
                crowd.send(name, signal.SIGCONT)
            else:
                crowd.start(name)
        for name, what in turn:
            crowd.wait(name, lines[name] + (what != "still"))
            spans.still.setdefault(name, []).append((begin_s, time.monotonic()))
            spans.events[what] += 1


def away(crowd: Crowd, name: str, what: str) -> int:
    """An engine that was killed or told to leave has ended.  How many lines it wrote."""
    if what != "still":
        crowd.processes[name].join(60)
    if what == "leave" and crowd.processes[name].exitcode != 0:
        raise RuntimeError(f"{name} left with exit code {crowd.processes[name].exitcode}")
    if what == "kill":
        cut_short(crowd.engines[name].out)
    return crowd.generations(name)


def cut_short(out: Path) -> None:
    """A killed engine may have left half a line."""
    data = out.read_bytes()
    out.write_bytes(data[: data.rfind(b"\n") + 1])


def flooded(crowd: Crowd, flooder: Any, address: str, seconds: float, begun: Callable[[], None]) -> int:
    """Requests that were answered within `seconds` of the first answer, when begun() is called."""
    import engine_process

    flooder.out.unlink(missing_ok=True)
    arguments = (flooder, address, FLOOD_IN_FLIGHT, FLOOD_TOKENS)
    process = crowd.context.Process(target=engine_process.flood, args=arguments, daemon=True)
    process.start()
    end_s = time.monotonic() + READY_S
    while not flooder.out.exists():
        if not process.is_alive() or time.monotonic() > end_s:
            raise RuntimeError(f"the flood does not begin: exit code {process.exitcode}")
        time.sleep(0.02)
    begun()
    time.sleep(seconds)
    process.terminate()
    process.join(120)
    if process.exitcode != 0:
        raise RuntimeError(f"the flood ended with {process.exitcode}")
    return int(json.loads(flooder.out.read_text().splitlines()[-1])["flooded"])


def play(crowd: Crowd, flooder: Any, near: str, far: str, seconds: float) -> tuple[Spans, dict[str, int]]:
    """All phases.  near, far: addresses of a server of the engines, and of another one."""
    spans, floods, rng = Spans(), {}, random.Random(0)
    for n, name in enumerate(names := list(crowd.engines)):
        crowd.start(name)
        if n >= AT_ONCE:
            crowd.wait(names[n - AT_ONCE], 1)
    for name in names:
        crowd.wait(name, 2)
    spans.events["join"] = len(names)
    begin = dict.fromkeys(PHASES, 0.0)
    for phase, part in PHASES.items():
        begin[phase] = time.monotonic()
        if phase == "churn":
            churn(crowd, spans, begin[phase] + part * seconds, rng)
        elif phase == "quiet":
            time.sleep(part * seconds)
        else:
            now = partial(_now, begin, phase)
            floods[phase] = flooded(crowd, flooder, near if phase == "flood" else far, part * seconds, now)
        spans.phases[phase] = begin[phase], time.monotonic()
    return spans, floods


def _now(begin: dict[str, float], phase: str) -> None:
    begin[phase] = time.monotonic()


@dataclass
class Phase:
    """What the engines did in one phase.  us: of each engine, its calls."""

    generations: int = 0
    tokens: int = 0
    us: dict[str, list[int]] = field(default_factory=dict)

    def row(self) -> list[float]:
        """Generations, tokens, calls, p50, p99, and p99 of the worst engine, in ms."""
        every = np.concatenate([np.asarray(us, float) for us in self.us.values()] or [np.zeros(1)]) / 1e3
        worst = max((float(np.quantile(us, 0.99)) / 1e3 for us in self.us.values() if us), default=0.0)
        p50, p99 = np.quantile(every, (0.5, 0.99))
        return [self.generations, self.tokens, len(every), float(p50), float(p99), worst]


@dataclass
class Result:
    phases: dict[str, Phase] = field(default_factory=lambda: {phase: Phase() for phase in PHASES})
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    compared: int = 0


def judged(spans: Spans, lines: Mapping[str, list[dict[str, Any]]]) -> Result:
    """lines: of each engine, what it wrote.  Calls while an engine was itself away or stopped are not counted."""
    result = Result()
    for name, written in lines.items():
        for line in written:
            if "calls" not in line:
                continue
            if "error" in line:
                result.errors[line["error"]] += 1
                continue
            result.compared += line["tokens"]
            if not line["equal"]:
                result.wrong.append(f"{name}: the generation at {line['began']:.1f} s")
            for phase, (begin_s, end_s) in spans.phases.items():
                found = result.phases[phase]
                if begin_s <= line["began"] < end_s:
                    found.generations += 1
                    found.tokens += line["tokens"]
                inside = [us for at, us in line["calls"] if begin_s <= at < end_s and not _still(spans, name, at, us)]
                found.us.setdefault(name, []).extend(inside)
    return result


def _still(spans: Spans, name: str, at_s: float, us: int) -> bool:
    return any(begin <= at_s + us / 1e6 and at_s <= end for begin, end in spans.still.get(name, ()))


def identities(folder: Path, names: list[str]) -> tuple[Path, dict[str, Path]]:
    """The server's file of callers, and each caller's file with its token."""
    tokens = {name: secrets.token_hex(16) for name in names}
    entries = [
        f'[callers.{name}]\ntokens = ["{token}"]\nrights = ["call", "describe"]\n' for name, token in tokens.items()
    ]
    (folder / "callers.toml").write_text("\n".join(entries))
    files = {name: folder / f"{name}.token" for name in names}
    for name, file in files.items():
        file.write_text(tokens[name])
        file.chmod(0o600)
    (folder / "callers.toml").chmod(0o600)
    return folder / "callers.toml", files


def servers(stack: ExitStack, folder: Path, count: int, callers: Path, max_tokens: int) -> list[Server]:
    """`count` that hold the model together, and another one, last."""
    common = ["--checkpoint", str(folder / "model"), "--compute-dtype", "float32", "--device", "cpu", "--threads", "1"]
    common += ["--callers", str(callers), "--max-tokens", str(max_tokens)]
    shards = [["--shard", f"{n}/{count}"] for n in range(count)] if count > 1 else [[]]
    started = []
    for n, shard in enumerate([*shards, []]):
        server = Server(f"server {n}", [*common, *shard], folder / f"server-{n}.log")
        stack.callback(server.process.kill)
        started.append(server)
    for server in started:
        server.wait(180)
    return started


def table(result: Result, spans: Spans, floods: Mapping[str, int]) -> str:
    head = ("phase", "s", "generations", "tokens", "calls", "p50 ms", "p99 ms", "worst engine's p99", "flood, requests")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for phase, (begin_s, end_s) in spans.phases.items():
        generations, tokens, calls, p50, p99, worst = result.phases[phase].row()
        cells = [f"{end_s - begin_s:.0f}", f"{generations:.0f}", f"{tokens:.0f}", f"{calls:.0f}"]
        cells += [f"{p50:.2f}", f"{p99:.2f}", f"{worst:.2f}", str(floods.get(phase, ""))]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--steps-per-s", type=float, default=2.0, help="at most, of each engine")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a request and of a batch, at the servers")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine_process", "transformers.models.qwen3_moe.modeling_qwen3_moe"])
    import engine_process
    from tiny_models import save, tiny_model

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertd-engines-")))
        save(tiny_model("qwen3_moe"), folder / "model")
        names = [f"engine-{n:02d}" for n in range(args.engines)]
        callers, files = identities(folder, [*names, "flood"])
        *near, far = servers(stack, folder, args.servers, callers, args.max_tokens)
        addresses = tuple(server.address for server in near)

        def engine(n: int, name: str) -> Any:
            kind, pause_s = MIX[n % len(MIX)], 1 / args.steps_per_s
            out = folder / f"{name}.jsonl"
            place = (addresses, files[name], folder / "model")
            return engine_process.Engine(name, kind, *place, seed=n, batch=1 + n % 3, pause_s=pause_s, out=out)

        crowd = Crowd(context, [engine(n, name) for n, name in enumerate(names)])
        stack.callback(crowd.end)
        spans, floods = play(crowd, engine(0, "flood"), near[0].address, far.address, args.seconds)
        bad = crowd.end()
        lines = {name: [json.loads(t) for t in e.out.read_text().splitlines()] for name, e in crowd.engines.items()}
        gone = [server.name for server in (*near, far) if server.process.poll() is not None]
    result = judged(spans, lines)
    return report(args, result, spans, floods, bad + gone)


def report(args: argparse.Namespace, result: Result, spans: Spans, floods: Mapping[str, int], bad: list[str]) -> int:
    found = {
        "engines": args.engines, "servers": args.servers, "events": dict(spans.events), "compared": result.compared,
        "wrong": len(result.wrong), "examples": result.wrong[:5], "errors": dict(result.errors), "bad": bad,
        "phases": {phase: found.row() for phase, found in result.phases.items()}, "floods": floods,
    }  # fmt: skip
    if args.json:
        print(json.dumps(found))
    else:
        print(table(result, spans, floods))
        print("\n".join(f"{key}: {value}" for key, value in found.items() if key != "phases"))
    return int(bool(result.wrong or result.errors or bad or not result.compared))


if __name__ == "__main__":
    raise SystemExit(main())
