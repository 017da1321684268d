"""Plants one fault at a time in a copy of the tree, runs the tests of its file, and says whether they failed.

    python tests/faults/plant.py [--group guard|known|own] [--sound] [--only TEXT] [--table FILE] [--results FILE]

The faults are in planted.toml: a piece of Python or C++, what replaces it, and the tests that should fail.  The working
tree is not touched.  C++ libraries are compiled anew, not optimized.  First the tests run on the unchanged copy, where
they have to pass.  A run that was ended goes on where it was: with --results, what was caught is not run again.  Exit
code 1 where less than 90 % of the faults were caught, or a fault could not be planted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401 - before the forks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from expertd import cxx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "kernels", "server", "client")
WANTED = 0.9
"""Share of the faults that have to be caught."""
LEAST_S = 120
MOST_S = 400
"""Of the time limit of a run: ten times what the unchanged code takes, but within these.  What hangs ends then."""
GROUPS = ("guard", "known", "own")
SOUND_S = 240
"""With --sound."""
CAUGHT = ("caught", "crashed", "hung")


@dataclass(frozen=True)
class Fault:
    """before: a text that stands in `file` once; after: what it becomes; tests: what should fail, as pytest takes it.

    group   "guard": takes away what answers one of the attacks of SECURITY.md; "known": survived when
            the tests were first looked at; "own": chosen afterwards, elsewhere
    """

    group: str
    file: str
    what: str
    before: str
    after: str
    tests: tuple[str, ...]


def faults_of(path: Path) -> list[Fault]:
    return [Fault(**{**f, "tests": tuple(f["tests"])}) for f in tomllib.loads(path.read_text())["fault"]]


@dataclass(frozen=True)
class Verdict:
    """outcome: one of CAUGHT, "survived", or "broken": it could not be planted, or nothing could be run."""

    fault: Fault
    outcome: str
    seconds: float = 0.0
    output: str = ""


def copied(to: Path, root: Path = ROOT) -> None:
    """A copy of the tracked files, of new ones, and of the compiled libraries, by links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, capture_output=True, check=True
    )
    names = [Path(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name]
    built = [p for package in PACKAGES for p in (root / package).rglob("csrc/*.so")]
    marks = [p.with_name(f".{p.name}.digest") for p in built]
    for name in [*names, *(p.relative_to(root) for p in (*built, *marks) if p.exists())]:
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def compiled(root: Path, more: Sequence[str] = ()) -> str:
    """Compiles, not optimized, what is made of other sources than those in `root`, file by file; what the compiler said
    where it failed.  more: flags."""
    flags = [*(f for f in cxx.FLAGS if f not in ("-O2", "-shared")), *more]
    for library in cxx.LIBRARIES:
        out = library.place(root) / library.name
        mark, digest = out.with_name(f".{out.name}.digest"), library.digest(root) + "".join(more)
        if out.exists() and mark.exists() and mark.read_text() == digest:
            continue
        includes = [f"-I{folder}" for folder in library.includes(root)]
        made = []
        for source in library.sources(root):
            key = hashlib.sha256(_included([*flags, *includes], source) + repr(flags).encode()).hexdigest()[:16]
            made.append(root / "build" / "planted" / f"{source.stem}-{key}.o")
            if not made[-1].exists():
                made[-1].parent.mkdir(parents=True, exist_ok=True)
                if why := _done([*flags, *includes, "-c", str(source), "-o", str(made[-1])]):
                    return why
        linked = out.with_name(f".{out.name}.new")
        if why := _done(["-shared", "-pthread", *more, *map(str, made), "-o", str(linked), "-ldl"]):
            return why
        os.replace(linked, out)
        mark.write_text(digest)
    return ""


def _included(flags: Sequence[str], source: Path) -> bytes:
    """What the compiler reads: the source and our headers, not the system's."""
    command = [*cxx.find_compiler(), *flags, "-MM", str(source)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = said.partition(":")[2].replace("\\\n", " ").split() or [str(source)]
    return b"".join(Path(name).read_bytes() for name in names)


def _done(command: Sequence[str]) -> str:
    """What the compiler says; "" = it is done."""
    done = subprocess.run([*cxx.find_compiler(), *command], capture_output=True, text=True, check=False)
    return done.stderr[-2000:] or "failed" if done.returncode else ""


def environment(root: Path) -> dict[str, str]:
    """Python finds the copy's packages before those that are installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / p) for p in PACKAGES), "OMP_NUM_THREADS": "1"}


def run(root: Path, tests: Sequence[str], limit_s: float) -> tuple[str, float, str]:
    """(outcome, seconds, output) of the tests in a copy: by a fork, which has torch already."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            _become_tests(root, tests, said.fileno())
        code = _ended(child, limit_s)
        said.seek(0)
        output = said.read()[-3000:]
    outcome = {0: "survived", 1: "caught", None: "hung"}.get(code, "crashed" if (code or 0) < 0 else "broken")
    return outcome, time.monotonic() - begun, output


def _become_tests(root: Path, tests: Sequence[str], out: int) -> None:
    """Does not return."""
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(root)
        os.environ.update(environment(root))
        sys.path[:] = [*(str(root / p) for p in PACKAGES), *sys.path]
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("expertd")]:
            del sys.modules[name]
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
        sys.stdout.flush()
        os._exit(code)
    except BaseException as e:
        os.write(2, repr(e).encode())
        os._exit(3)


def _ended(child: int, limit_s: float) -> int | None:
    """The exit code, negative: a signal's number; None: it did not end in time, and was killed."""
    until_s = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError):  # what it started
                os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def put(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def judge(fault: Fault, root: Path, limit_s: float) -> Verdict:
    """The verdict on one fault, whose file is put back."""
    path = root / fault.file
    sound = path.read_text() if path.exists() else ""
    if sound.count(fault.before) != 1:
        return Verdict(fault, "broken", output=f"{sound.count(fault.before)} places, want one: {fault.before!r}")
    put(path, sound.replace(fault.before, fault.after))
    try:
        why = compiled(root)  # of Python, too: the library may hold the fault before
        return Verdict(fault, "broken", output=why) if why else Verdict(fault, *run(root, fault.tests, limit_s))
    finally:
        put(path, sound)


class Limits:
    """Seconds that tests may take, by how long they take on the unchanged code: they are run there when they are first
    asked about.  Raises SystemExit where they fail there.  sound: they are known to pass, and get SOUND_S."""

    def __init__(self, root: Path, sound: bool) -> None:
        self._root, self._sound = root, sound
        self._found: dict[tuple[str, ...], float] = {}

    def of(self, tests: tuple[str, ...]) -> float:
        if self._sound:
            return SOUND_S
        if tests not in self._found:
            if why := compiled(self._root):
                raise SystemExit(why)
            outcome, seconds, output = run(self._root, tests, 1200)
            if outcome != "survived":
                raise SystemExit(f"{' '.join(tests)}: {outcome} without a fault\n{output}")
            self._found[tests] = min(MOST_S, max(LEAST_S, 10 * seconds))
        return self._found[tests]


class Results:
    """What was judged, in a file of JSON lines; without a file, in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, tuple[str, float]] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            entry = json.loads(line)
            self._known[entry["fault"]] = entry["outcome"], entry["seconds"]

    def caught(self, fault: Fault) -> Verdict | None:
        """The verdict on a fault that was caught before."""
        outcome, seconds = self._known.get(_key(fault), ("", 0.0))
        return Verdict(fault, outcome, seconds) if outcome in CAUGHT else None

    def add(self, v: Verdict) -> None:
        if self._path is not None:
            entry = {"fault": _key(v.fault), "what": v.fault.what, "outcome": v.outcome, "seconds": round(v.seconds, 1)}
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def _key(fault: Fault) -> str:
    return hashlib.sha256(repr((fault.file, fault.before, fault.after)).encode()).hexdigest()[:16]


def table(verdicts: Sequence[Verdict]) -> str:
    """In Markdown."""
    lines = ["| file | fault | tests | outcome |", "|---|---|---|---|"]
    for v in verdicts:
        tests = ", ".join(t.removeprefix("tests/") for t in v.fault.tests)
        lines.append(f"| `{v.fault.file}` | {v.fault.what} | `{tests}` | {v.outcome} |")
    return "\n".join(lines) + "\n"


def judged(faults: Sequence[Fault], results: Results, sound: bool) -> list[Verdict]:
    """One line of each is printed at once."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # a test reads it as nobody
        copied(root)
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)
        limits = Limits(root, sound)
        for fault in faults:
            before = results.caught(fault)
            v = before or judge(fault, root, limits.of(fault.tests))
            verdicts.append(v)
            if before is None:
                results.add(v)
            print(f"{v.outcome:9}{v.seconds:6.1f} s  {fault.file}: {fault.what}", flush=True)
            if v.outcome == "broken":
                print(v.output, flush=True)
    return verdicts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--group", choices=GROUPS, help="default: all")
    parser.add_argument("--python", action="store_true", help="only faults in Python, which need no compiler")
    parser.add_argument("--only", default="", help="a part of a fault's file or of its description")
    parser.add_argument("--sound", action="store_true", help="the unchanged tests are known to pass: do not run them")
    parser.add_argument("--results", type=Path, help="a file of JSON lines, one for each fault that was judged")
    parser.add_argument("--table", type=Path, help="a file for the table in Markdown")
    args = parser.parse_args(argv)
    found = faults_of(Path(__file__).with_name("planted.toml"))
    faults = [f for f in found if args.group in (None, f.group) and args.only in f"{f.file} {f.what}"]
    faults = [f for f in faults if f.file.endswith(".py") or not args.python]
    verdicts = judged(faults, Results(args.results), args.sound)
    counts = CAUGHT[:2] if args.sound else CAUGHT  # without a time to compare with, what hangs may be slow
    caught = sum(v.outcome in counts for v in verdicts)
    print(f"{caught} of {len(verdicts)} caught")
    if args.table is not None:
        args.table.write_text(table(verdicts))
    return int(caught < WANTED * len(verdicts) or any(v.outcome == "broken" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
