"""`python kernels/bench/suite.py --out FOLDER`: all that needs a GPU, one step after the other, in a given time.

    tests      all tests marked gpu, in --jobs processes on the one GPU; they compile the kernels of what follows
    alone      those of them that are marked alone: other processes, faults of the device
    numerics   every row and scheme against the float32 reference
    ours       our rows at all points of the bench
    rounded    rows that round activations to e4m3, on e4m3 blocks
    peers      every row that is not refused, ours too, on int4, mxfp4 and bf16
    flashinfer the rows of FlashInfer alone, which compiles for many minutes at its first use

Each step is a process with its own log and has at most its share of the time that is left: what the steps after it do
not want.  Then it is stopped with all that it started, by SIGINT and, GRACE_S later, by SIGKILL.  The folder holds
suite.md, and of each step a log, a table and the figures; of the tests JUnit's files and rows.md, a table by row.
Wheels of packages that are not installed (humming-kernels, sgl-deep-gemm, flashinfer-python, pytest, ...) are taken
from --wheels FOLDER, without their dependencies.  The tests need pytest with the plugins asyncio, timeout and xdist.
All steps share what was compiled; --cache FOLDER says where that is, to carry it from one machine to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite_rows import gpu_files, summary_by_row

__all__ = ["STEPS", "Done", "Step", "main", "run_steps"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GRACE_S = 20.0
"""Between SIGINT and SIGKILL: pytest ends its processes and writes what it has."""
PLUGINS = ("asyncio", "timeout", "xdist")
"""Of pytest, by the names of their entry points; others that a machine may have are not loaded."""
CACHES = {"TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer", "DG_JIT_CACHE_DIR": "deepgemm"}
"""Where Triton, FlashInfer and DeepGEMM keep what they compiled, below --cache."""
OURS = "gluon_sm90,triton"
QUICK = "all,-flashinfer_cutlass,-flashinfer_trtllm"
"""Rows that are ready within seconds."""
PEERS = ("--shape", "qwen3-30b-a3b,mixtral-8x7b,gpt-oss-120b", "--scheme", "int4_g128,mxfp4,bf16")


@dataclass(frozen=True)
class Step:
    """command(out, seconds, jobs) -> arguments of this Python.  share: of the time, in relation to the shares of the
    steps that are run after it."""

    name: str
    share: float
    command: Callable[[Path, float, int], list[str]]


@dataclass(frozen=True)
class Done:
    """What a step came to.  code: exit code, None if it was stopped."""

    step: str
    code: int | None
    seconds: float
    last: str


def _bench(name: str, *more: str) -> Callable[[Path, float, int], list[str]]:
    def command(out: Path, seconds: float, processes: int) -> list[str]:
        files = ["--csv", str(out / f"{name}.csv")]
        budget = ["--budget", f"{0.85 * seconds:.0f}"]  # the layer that is being timed then may still end
        beside = ["--jobs", str(max(1, processes // 3))]  # large layers: as many processes fit into one GPU
        return ["-m", "expertd_kernels.bench", "--device", "cuda", *more, *budget, *beside, *files]

    return command


def _tests(name: str, marks: str, *more: str) -> Callable[[Path, float, int], list[str]]:
    """The last tests begin while there is time to end: then pytest's report is whole."""

    def command(out: Path, seconds: float, processes: int) -> list[str]:
        files = [str(path) for path in gpu_files(ROOT)]
        plugins = [word for name in PLUGINS for word in ("-p", name)]
        settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-m", marks]
        reports = [f"--junitxml={out / name}.xml", "--durations=40", "-v"]
        limit = f"--session-timeout={0.9 * seconds:.0f}"
        beside = [word.format(processes=processes) for word in more]
        return ["-m", "pytest", *plugins, *files, *settings, *reports, limit, *beside]

    return command


def _numerics(out: Path, seconds: float, processes: int) -> list[str]:
    files = ["--out", str(out / "numerics.md"), "--csv", str(out / "numerics.csv")]
    budget = ["--budget", f"{0.95 * seconds:.0f}", "--limit", f"{seconds / 3:.0f}"]
    more = ["--jobs", str(processes), "--backend", QUICK]
    return [str(HERE / "numerics.py"), "--device", "cuda", *more, *budget, *files]


def _flashinfer(out: Path, seconds: float, processes: int) -> list[str]:
    files = ["--out", str(out / "flashinfer.md"), "--csv", str(out / "flashinfer.csv")]
    limit = ["--budget", f"{0.95 * seconds:.0f}", "--limit", f"{0.95 * seconds:.0f}", "--jobs", "1"]
    rows = ["--backend", "flashinfer_cutlass,flashinfer_trtllm"]
    return [str(HERE / "numerics.py"), "--device", "cuda", *rows, *limit, *files]


STEPS: Mapping[str, Step] = {
    s.name: s
    for s in (
        Step("tests", 30, _tests("tests", "gpu and not alone", "-n", "{processes}", "--dist", "worksteal")),
        Step("alone", 8, _tests("alone", "gpu and alone")),
        Step("numerics", 28, _numerics),
        Step("ours", 20, _bench("ours", "--backend", OURS)),
        Step(
            "rounded",
            7,
            _bench(
                "rounded", "--scheme", "e4m3_block128", "--shape", "qwen3-30b-a3b,mixtral-8x7b,deepseek-v3/64",
                "--activations", "e4m3_group128", "--backend", QUICK,
            ),
        ),
        Step("peers", 12, _bench("peers", *PEERS, "--backend", QUICK)),
        Step("flashinfer", 2, _flashinfer),
    )
}  # fmt: skip


def run_steps(
    steps: Sequence[Step], out: Path, seconds: float, jobs: int, environment: Mapping[str, str]
) -> list[Done]:
    """Run the steps one after the other; a step that begins with less than ten seconds left is not run."""
    end = time.monotonic() + seconds
    done: list[Done] = []
    for n, step in enumerate(steps):
        left = end - time.monotonic()
        if left < 10.0:
            done.append(Done(step.name, None, 0.0, "not run: no time was left"))
            continue
        share = left * step.share / sum(s.share for s in steps[n:])
        done.append(_run(step.name, [sys.executable, *step.command(out, share, jobs)], out, share, environment))
        print(f"{step.name}: {_verdict(done[-1])} after {done[-1].seconds:.0f} s; {done[-1].last}", flush=True)
        (out / "suite.md").write_text(summary(done))
    (out / "suite.md").write_text(summary(done))
    return done


def _run(name: str, command: list[str], out: Path, seconds: float, environment: Mapping[str, str]) -> Done:
    begin = time.monotonic()
    log = out / f"{name}.log"
    code: int | None = None
    with log.open("w") as f:
        process = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            _stop(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Done(name, code, time.monotonic() - begin, lines[-1][:200] if lines else "it said nothing")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The process, which leads a session of its own, and all that it started."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _verdict(d: Done) -> str:
    return "stopped" if d.code is None else "right" if d.code == 0 else f"exit code {d.code}"


def summary(done: Sequence[Done]) -> str:
    """suite.md."""
    rows = "\n".join(f"| {d.step} | {_verdict(d)} | {d.seconds:.0f} | {d.last.replace('|', ' ')} |" for d in done)
    return f"| step | result | seconds | last line |\n| --- | --- | --- | --- |\n{rows}\n"


def _install(wheels: Path, target: str) -> None:
    """All together, or one by one where that fails: a wheel for another Python must not cost the others."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise ValueError(f"--wheels {wheels}: there are no wheels")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", target]
    if subprocess.run([*pip, *files], capture_output=True, check=False).returncode == 0:
        return
    for file in files:
        done = subprocess.run([*pip, "--upgrade", file], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a step failed, was stopped or was not run."""
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    p.add_argument("--seconds", type=float, default=570.0, help="for all steps together (default 570)")
    p.add_argument("--steps", default=",".join(STEPS), metavar="LIST", help=f"of {','.join(STEPS)} (default: all)")
    p.add_argument("--wheels", type=Path, metavar="FOLDER")
    p.add_argument("--cache", type=Path, metavar="FOLDER", help="for compiled kernels (default: each package's own)")
    p.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes at a time")
    args = p.parse_args(argv)
    unknown = [s for s in args.steps.split(",") if s not in STEPS]
    if unknown:
        print(f"steps {', '.join(unknown)}: known are {', '.join(STEPS)}", file=sys.stderr)
        return 1
    begin = time.monotonic()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # see backends/humming.py
    if args.cache:
        environment |= {name: str(args.cache.resolve() / folder) for name, folder in CACHES.items()}
    with tempfile.TemporaryDirectory() as target:
        if args.wheels:
            try:
                _install(args.wheels, target)
            except ValueError as e:
                print(e, file=sys.stderr)
                return 1
            sys.path.append(target)
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (target, environment.get("PYTHONPATH"))))
        left = args.seconds - (time.monotonic() - begin)
        done = run_steps([STEPS[s] for s in args.steps.split(",")], args.out, left, args.jobs, environment)
    if reports := [args.out / f"{d.step}.xml" for d in done if (args.out / f"{d.step}.xml").is_file()]:
        text = summary_by_row(reports)
        (args.out / "rows.md").write_text(text)
        print(text)
    return 0 if all(d.code == 0 for d in done) else 1


if __name__ == "__main__":
    sys.exit(main())
