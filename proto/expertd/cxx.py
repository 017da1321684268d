"""Compiles small C++ libraries of the project: `python -m expertd.cxx`.  Standard library only, so that the package
build can run it before anything is installed.

    LIBRARIES    folder of the sources -> the library's name, and the folders of headers it includes

What cannot be compiled is left out: expertd then says so, and does without shared memory, or more slowly.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LIBRARIES", "BuildError", "Library", "build", "find_compiler", "stale"]

FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-shared"]
EXPORTS = "{ global: expertd_*; local: *; };\n"
"""Only our own functions are seen from outside: not those of the C++ library that is linked in."""
SHM = "proto/expertd/shm/csrc"
E4M3 = "proto/expertd/e4m3/csrc"
CODEC = "proto/expertd/codec/csrc"
TCP = "proto/expertd/tcp/csrc"
ENGINE = "server/expertd_server/engine/csrc"
CLUSTER = "client/expertd_client/cluster/csrc"
GLIBC = "2.28"
"""The oldest glibc that a library made for others runs on."""


class BuildError(Exception):
    """There is no compiler, or it failed; the text says which and what it said."""


class Library:
    """folder, headers: from the repository's root, or from where the packages are installed."""

    def __init__(self, name: str, folder: str, headers: Sequence[str] = ()) -> None:
        self.name, self.folder, self.headers = name, folder, tuple(headers)

    def place(self, root: Path) -> Path:
        """Where its sources lie and it is put."""
        return _below(root, self.folder)

    def sources(self, root: Path) -> list[Path]:
        return sorted(self.place(root).glob("*.cpp"))

    def includes(self, root: Path) -> list[Path]:
        return [_below(root, folder) for folder in self.headers]

    def digest(self, root: Path) -> str:
        """Of its sources and of what they include."""
        found = hashlib.sha256()
        for folder in (self.place(root), *self.includes(root)):
            for path in sorted([*folder.glob("*.h"), *folder.glob("*.cpp")]):
                found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return found.hexdigest()


def _below(root: Path, folder: str) -> Path:
    """`folder` of the repository at `root`, or of the packages installed there, which stand one folder higher."""
    return root / folder if (root / folder).is_dir() else root / Path(*Path(folder).parts[1:])


LIBRARIES = (
    Library("libexpertd_shm.so", SHM),
    Library("libexpertd_e4m3.so", E4M3),
    Library("libexpertd_codec.so", CODEC),
    Library("libexpertd_tcp.so", TCP, [SHM, E4M3, CODEC]),
    Library("libexpertd_engine.so", ENGINE, [SHM, E4M3, CODEC, TCP]),
    Library("libexpertd_cluster.so", CLUSTER, [SHM]),
)


def _root() -> Path:
    """Of the repository, or of the folder where the packages are installed."""
    packages = Path(__file__).resolve().parents[1]
    return packages.parent if (packages.parent / SHM).is_dir() else packages


def stale(name: str) -> str:
    """Why the library `name`, as it lies beside its sources, must not be loaded; "" = it may."""
    root = _root()
    library = next(x for x in LIBRARIES if x.name == name)
    place = library.place(root)
    mark = place / f".{name}.digest"
    if not mark.exists() or not library.sources(root) or mark.read_text().startswith(library.digest(root)):
        return ""
    return f"{name} was made of other sources than those that lie there: python -m expertd.cxx makes it anew"


def find_compiler(machine: str = "") -> list[str]:
    """The command of the C++ compiler; machine: ziglang's for that one (x86_64, aarch64), with an old glibc.  Raises
    BuildError."""
    if not machine:
        for words in (shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]):
            if words and (path := shutil.which(words[0])):
                return [path, *words[1:]]
    if importlib.util.find_spec("ziglang"):
        target = f"{machine or platform.machine()}-linux-gnu.{GLIBC}"
        return [sys.executable, "-m", "ziglang", "c++", "-target", target, "-g0"]
    raise BuildError("no C++17 compiler: want one of $CXX, c++, g++, clang++ on the path, or pip install ziglang")


def build(library: Library, root: Path, out: Path | None = None, *, machine: str = "") -> Path:
    """The library, compiled where it is not there or made of other sources.  out: default beside its sources.  Raises
    BuildError."""
    out = out or library.place(root) / library.name
    mark = out.with_name(f".{out.name}.digest")
    digest = library.digest(root) + machine
    if out.exists() and mark.exists() and mark.read_text() == digest:
        return out
    compiler = find_compiler(machine)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / out.name
        includes = [f"-I{headers}" for headers in library.includes(root)]
        exports = Path(folder) / "exports.map"
        exports.write_text(EXPORTS)
        flags = [*FLAGS, f"-Wl,--version-script={exports}", *(["-s"] if machine else [])]
        command = [*compiler, *flags, *includes, *map(str, library.sources(root)), "-o", str(made), "-ldl"]
        for more in (["-static-libgcc", "-static-libstdc++"], []):  # without the compiler's own libraries, if it can be
            done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            raise BuildError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.strip()[-4000:]}")
        staged = out.with_name(f".{out.name}.{os.getpid()}")
        shutil.copy2(made, staged)
        os.replace(staged, out)  # whole, so that no process loads half of one
    mark.write_text(digest)
    return out


def main() -> int:
    root = _root()
    for library in LIBRARIES:
        try:
            print(build(library, root))
        except BuildError as e:
            print(f"{library.name}: {e}", file=sys.stderr)
            return 1
    if said := _cpu_library(root):
        print(said, file=sys.stderr)
    return 0


def _cpu_library(root: Path) -> str:
    """Whether that of the CPU's kernels, which takes minutes and has a command of its own, is stale.  Asked as a
    process: the contract imports no kernels."""
    script = _below(root, "kernels/expertd_kernels/native/csrc") / "build.py"
    if not script.exists():
        return ""
    return subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())
