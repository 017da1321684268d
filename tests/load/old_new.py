"""Two trees of expertd in one run: python tests/load/old_new.py OLD [--new TREE]

    [--rounds 5] [--seconds 340] [--only import,calls,start,path,cluster,count] [--json]

OLD and TREE are folders that hold a checkout with its C++ libraries; TREE is this one where it is not given.  In a
round each measurement is made with both trees, and the next round begins with the other one, so that what else the
machine does hits both.  A ratio is the median over the rounds of new / old.

    git worktree add /tmp/old COMMIT
    PYTHONPATH=/tmp/old/proto python -m expertd.cxx
    PYTHONPATH=/tmp/old/kernels:/tmp/old/proto python -m expertd_kernels.native.csrc.build
    python tests/load/old_new.py /tmp/old

    import    `import expertd_client`, and its ExpertClient with it: modules of ours, seconds
    calls     Python function calls of one ExpertClient.forward on the caller's thread, by transport
    start     `expertd serve` of a synthetic model until it serves, seconds
    path      `expertctl bench path`: median of a request of one token, microseconds, by transport
    cluster   `expertctl bench cluster`: medians of calls and of the client's own part, microseconds
    count     lines and files by package; protobuf's generated files are left out

The trees run with this interpreter: what is installed must suit both.  Exit code 1 = a measurement failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PACKAGES = ("client", "kernels", "proto", "server")
MODEL = ("--synthetic", "tiny:int4_g128", "--device", "cpu")
STARTS_S, RUNS_S = 60.0, 120.0
"""Until a server serves, and another process has ended."""

IMPORT = """
import sys, time
found = {}
begin = time.perf_counter()
for line in "import expertd_client", "from expertd_client import ExpertClient":
    exec(line)
    what = line.split()[-1]
    found[what + ", seconds"] = time.perf_counter() - begin
    found[what + ", modules"] = sum(name.split(".")[0].startswith("expert") for name in sys.modules)
print(found)
"""

CALLS = """
import sys, time
import numpy as np
from expertd_client import ExpertClient
address, layer, hidden, top_k = sys.argv[1], *map(int, sys.argv[2:5])
x = np.zeros((1, hidden), np.float32)
ids = np.arange(top_k, dtype=np.int32)[None]
weights = np.ones((1, top_k), np.float32)
calls = 0
def count(frame, event, _):
    global calls
    calls += event == "call"
with ExpertClient(address) as client:
    for n in range(200):
        client.forward(layer, x, ids, weights)
    sys.setprofile(count)
    client.forward(layer, x, ids, weights)
    sys.setprofile(None)
    print({client.session().transport or "inline": calls})
"""


@dataclass(frozen=True)
class Tree:
    """A checkout.  name: "old" or "new"."""

    name: str
    root: Path

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join(str(self.root / package) for package in PACKAGES)
        return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | more

    def has(self, place: str) -> bool:
        return (self.root / place).exists()

    @property
    def server(self) -> str:
        """The module of the command `expertd`."""
        return (
            "expertd_server.commands.cli" if self.has("server/expertd_server/commands/cli.py") else "expertd_server.cli"
        )

    @property
    def tools(self) -> str:
        """The module of the command `expertctl`."""
        return "expertctl.cli" if self.has("client/expertctl") else "expertd_client.cli"

    def python(self, code: str, *arguments: str) -> str:
        """What the code prints.  RuntimeError where it fails."""
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=RUNS_S, check=False, cwd="/"
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(arguments)}: {done.stderr[-800:]}")
        return done.stdout

    def tool(self, *arguments: str) -> dict:
        """What `expertctl ... --json` prints."""
        code = f"import sys; from {self.tools} import main; sys.exit(main())"
        return json.loads(self.python(code, *arguments, "--json").splitlines()[-1])


class Server:
    """`expertd serve` of a tree, as a context; address, and seconds until it served."""

    def __init__(self, tree: Tree, *options: str) -> None:
        begin = time.monotonic()
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - it is closed with the server
        command = [sys.executable, "-m", tree.server, "serve", "--listen", "127.0.0.1:0", *MODEL, *options]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=tree.environment(), cwd="/"
        )
        self.address = ""
        while not self.address:
            text = Path(self._log.name).read_text()
            found = re.search(r"serving on (\S+)", text)
            self.address, self.seconds = found[1] if found else "", time.monotonic() - begin
            if self._process.poll() is not None or self.seconds > STARTS_S:
                self.__exit__()
                raise RuntimeError(f"{tree.name}: no server after {self.seconds:.0f} s: {text[-800:]}")
            time.sleep(0.005)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def imports(tree: Tree) -> Mapping[str, float]:
    return eval(tree.python(IMPORT))


def calls(tree: Tree) -> Mapping[str, float]:
    """By transport: without shared memory the client takes TCP where the server has it, else the stream."""
    found = {}
    shapes = ("0", "256", "2")
    for options in ((), ("--shm", "off", "--tcp-listen", "127.0.0.1:0"), ("--shm", "off")):
        with Server(tree, *options) as server:
            found |= eval(tree.python(CALLS, server.address, *shapes))
    return found


def start(tree: Tree) -> Mapping[str, float]:
    with Server(tree) as server:
        return {"seconds": server.seconds}


def path(tree: Tree) -> Mapping[str, float]:
    plan = ("--transport", "inline,shm,tcp", "--client", "threads,asyncio", "--tokens", "1", "--callers", "1")
    rows = tree.tool("bench", "path", *plan, "--seconds", "1")["rows"]
    return {f"{row['transport']}, {row['client']}": row["p50_us"] for row in rows}


def cluster(tree: Tree) -> Mapping[str, float]:
    said = tree.tool("bench", "cluster", "--rounds", "10", "--servers", "4")
    found = {f"split + join of {r['tokens']} x {r['hidden_size']}": r["split_us"] + r["join_us"] for r in said["rows"]}
    found |= {f"one server, {r['tokens']} tokens": r["cluster_us"] for r in said["one"]}
    return found | {f"own part, {r['tokens']} tokens": r["before_us"] + r["after_us"] for r in said["own"]}


def count(tree: Tree) -> Mapping[str, float]:
    """Lines and files of what git holds."""
    listed = subprocess.run(["git", "ls-files"], cwd=tree.root, capture_output=True, text=True, check=True)
    found: dict[str, float] = defaultdict(float)
    for name in listed.stdout.split("\n"):
        kind = {".py": "Python", ".cpp": "C++", ".h": "C++", ".cu": "C++"}.get(Path(name).suffix)
        if kind is None or "_pb2" in name:
            continue
        parts = Path(name).parts
        package = f"{kind}, {'tests' if parts[0] == 'tests' else '/'.join(parts[:2])}"
        try:
            lines = len((tree.root / name).read_bytes().splitlines())
        except FileNotFoundError:
            continue
        if parts[0] in (*PACKAGES, "tests"):
            found[f"{package}: files"] += 1
            found[f"{package}: lines"] += lines
            found[f"{kind}, {'tests' if parts[0] == 'tests' else 'all packages'}: lines in sum"] += lines
    return found


MEASUREMENTS: dict[str, Callable[[Tree], Mapping[str, float]]] = {
    "import": imports,
    "calls": calls,
    "start": start,
    "path": path,
    "cluster": cluster,
    "count": count,
}
ONCE = ("calls", "count")
"""They are the same each time."""

Samples = dict[str, dict[str, list[float]]]
"""By measurement and tree, a number of each round."""


def measured(trees: Sequence[Tree], names: Sequence[str], rounds: int, end_s: float) -> tuple[Samples, list[str]]:
    """(what was found; what failed).  No round begins after end_s."""
    found: Samples = defaultdict(lambda: defaultdict(list))
    failed: list[str] = []
    for turn in range(rounds):
        for name in names:
            if time.monotonic() > end_s or (turn and name in ONCE):
                continue
            for tree in trees if turn % 2 else trees[::-1]:
                try:
                    for what, value in MEASUREMENTS[name](tree).items():
                        found[f"{name}: {what}"][tree.name].append(value)
                except Exception as e:
                    failed.append(f"{name}, {tree.name}: {type(e).__name__}: {e}")
            print(f"[{end_s - time.monotonic():4.0f} s are left] round {turn + 1}: {name}", file=sys.stderr, flush=True)
    return found, failed


def table(found: Samples) -> str:
    """In Markdown: medians and the median of the ratios of each round."""
    lines = ["| measurement | old | new | new / old | rounds |", "|---|--:|--:|--:|--:|"]
    for name, by_tree in found.items():
        old, new = by_tree.get("old", []), by_tree.get("new", [])
        pairs = [b / a for a, b in zip(old, new, strict=False) if a]
        ratio = f"{statistics.median(pairs):.3f}" if pairs else ""
        lines.append(f"| {name} | {shown(old)} | {shown(new)} | {ratio} | {min(len(old), len(new))} |")
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    """Their median."""
    if not values:
        return ""
    middle = statistics.median(values)
    return f"{middle:,.0f}" if middle >= 1000 else f"{middle:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares two trees of expertd.", allow_abbrev=False)
    parser.add_argument("old", type=Path)
    parser.add_argument("--new", type=Path, default=HERE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=340, help="no measurement begins after that (340)")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="measurements, of " + ", ".join(MEASUREMENTS))
    parser.add_argument("--json", action="store_true", help="print the numbers of each round instead of the table")
    args = parser.parse_args()
    trees = [Tree("old", args.old.resolve()), Tree("new", args.new.resolve())]
    names = args.only.split(",")
    if unknown := set(names) - set(MEASUREMENTS):
        parser.error(f"--only: got {', '.join(sorted(unknown))}, want some of {', '.join(MEASUREMENTS)}")
    found, failed = measured(trees, names, args.rounds, time.monotonic() + args.seconds)
    print(json.dumps(found) if args.json else table(found))
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
