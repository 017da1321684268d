"""Compiles the CPU kernel: `python -m expertd_kernels.native.csrc.build`.  Standard library only, so that the
package build can run it before anything is installed.

Needs a C++17 compiler: $CXX, else c++, g++ or clang++ on the path, else the one in PyPI's package ziglang.  Each
instruction-set level is a source file of its own with its own flags; the level is chosen when the library is loaded, so
one shared object serves every machine of an architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LIBRARY", "BuildError", "build", "find_compiler", "is_current", "remedy", "sources_hash", "stale"]

HERE = Path(__file__).resolve().parent
LIBRARY = "libexpertd_cpu.so"
CACHE = ".objects"
"""Folder of compiled sources, so that a change of one file compiles one file.  May be deleted at any time."""
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"]
SANITIZE = ["-std=c++17", "-O0", "-g1", "-fPIC", "-pthread", "-Wno-psabi", "-fno-omit-frame-pointer"]
"""Not optimized: with a sanitizer, that would take the compiler minutes."""
_LEFT_OUT = {
    "": ("level_avx512", "-DEXPERTD_NO_AVX512"),
    "thread": ("level_avx", "-DEXPERTD_ONLY_PORTABLE"),
}
"""With a sanitizer: sources that are left out, by the beginning of their names, and how context.cpp is told.  The
levels are the same templates."""
EXPORTS = "{ global: expertd_*; local: *; };\n"
"""Only our own functions are seen from outside: not those of the C++ library that is linked in."""
GLIBC = "2.28"
"""The oldest glibc that a library made by ziglang runs on."""
_EXACT = ["-ffp-contract=off"]
"""A product and a sum are rounded each."""
COMMON = ["level_portable", "layout", "pool", "pack", "layer", "context", "processor", "repack", "guard"]
_AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx2",
    "-mfma",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
X86 = {
    "level_avx512_bf16": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
    "level_avx512": _AVX512,
    "level_avx2": ["-mavx2", "-mfma"],
    "level_avx2_quantize": ["-mavx2", *_EXACT],
}
"""Longest to compile first: so the cores are busy to the end."""

Units = Mapping[str, tuple[Path, Sequence[str]]]
"""Name of a source -> its file, and what the compiler is told beyond the common flags."""


class BuildError(Exception):
    """There is no compiler, or it failed; the text says which and what it said."""


def sources_hash(folder: Path = HERE) -> str:
    """16 hex digits of the C++ sources: the library carries them, so that a stale one is noticed."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.h"), *folder.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler(machine: str = "") -> list[str]:
    """The command of the C++ compiler.  machine: "" = the one for this machine; else ziglang's for that one (x86_64,
    aarch64) with a glibc of GLIBC or newer.  BuildError where there is none."""
    if not machine:
        for words in (shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]):
            if words and (path := shutil.which(words[0])):
                return [path, *words[1:]]
    if importlib.util.find_spec("ziglang"):
        target = f"{machine or platform.machine()}-linux-gnu.{GLIBC}"
        return [sys.executable, "-m", "ziglang", "c++", "-target", target, "-g0"]
    if machine:
        raise BuildError(f"code for {machine} with an old glibc needs the package ziglang: pip install ziglang")
    raise BuildError(
        "no C++17 compiler: want one of $CXX, c++, g++, clang++ on the path (apt-get install g++, dnf install gcc-c++),"
        " or without root: pip install ziglang"
    )


def remedy() -> str:
    """The shell command that makes the library, with a compiler first where there is none."""
    command = "python -m expertd_kernels.native.csrc.build"
    try:
        find_compiler()
    except BuildError:
        return f"pip install ziglang && {command}"
    return command


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.strip()[-4000:]}")


def _units(machine: str) -> dict[str, tuple[Path, Sequence[str]]]:
    """The sources of the library, for an architecture."""
    x86 = X86 if machine in ("x86_64", "AMD64") else {}
    flags: Mapping[str, Sequence[str]] = {**x86, **{name: [] for name in COMMON}, "quantize": _EXACT}
    return {name: (HERE / f"{name}.cpp", extra) for name, extra in flags.items()}


def is_current(library: Path) -> bool:
    """Whether the library exists and was built from the sources as they are."""
    return library.exists() and sources_hash().encode() in library.read_bytes()


def stale(library: Path = HERE / LIBRARY) -> str:
    """Why a library that lies there is not used; "" = it is, or there is none."""
    if not library.exists() or is_current(library):
        return ""
    return f"{library.name} was made of other sources than those that lie there: {remedy()} makes it anew"


def build(
    out: Path | None = None,
    *,
    sanitize: str = "",
    program: Path | None = None,
    only_if_stale: bool = False,
    stand_ins: Units | None = None,
    machine: str = "",
) -> Path:
    """Compiles and links; returns the library's path (default: beside the sources).

    sanitize: "" or what -fsanitize= takes ("address,undefined", "thread").  program: a source with main(), which is
    linked with the library's sources into a program instead of the library.  only_if_stale: nothing is done where the
    result is current.  stand_ins: other files to be compiled in place of sources of the same name.  machine: as in
    find_compiler.  The result is moved into place whole, so that a process never loads half of one.
    """
    out = out or HERE / LIBRARY
    if only_if_stale and is_current(out):
        return out
    compiler = find_compiler(machine)
    units = {
        **_units(machine or platform.machine()),
        **({"program": (program, [])} if program else {}),
        **(stand_ins or {}),
    }
    flags = list(FLAGS)
    if sanitize:
        left_out, macro = _LEFT_OUT["thread" if "thread" in sanitize else ""]
        units = {name: unit for name, unit in units.items() if not name.startswith(left_out)}
        flags = [*SANITIZE, macro, f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        made = Path(folder) / out.name
        objects = pool.map(lambda unit: _compile(compiler, unit[0], unit[1], flags, Path(folder)), units.items())
        exports = Path(folder) / "exports.map"
        exports.write_text(EXPORTS)
        own = [] if sanitize else [f"-Wl,--version-script={exports}", *(["-s"] if machine else [])]
        shared = [] if program else ["-shared", *own]
        link = [*compiler, *flags, *shared, *map(str, objects), "-o", str(made)]
        try:  # without the compiler's own libraries, the result also runs where they are older
            _run(link if sanitize else [*link, "-static-libgcc", "-static-libstdc++"])
        except BuildError:
            _run(link)
        out.parent.mkdir(parents=True, exist_ok=True)
        _move(made, out)
    return out


def _compile(
    compiler: Sequence[str], name: str, unit: tuple[Path, Sequence[str]], common: Sequence[str], folder: Path
) -> Path:
    """The object of one source: from the cache where its source, the headers and the flags are as they were."""
    source, extra = unit
    flags = [*common, *extra] if source.parent == HERE else [*common, f"-I{HERE}", *extra]
    if name == "context":  # it tells what the library was built from
        flags = [*flags, f'-DEXPERTD_SOURCES="{sources_hash()}"']
    digest = hashlib.sha256("\0".join([*compiler, *flags]).encode() + source.read_bytes())
    for header in sorted({*HERE.glob("*.h"), *source.parent.glob("*.h")}):
        digest.update(header.read_bytes())
    made, kept = folder / f"{name}.o", HERE / CACHE / f"{name}-{digest.hexdigest()[:16]}.o"
    if kept.exists():
        return kept
    _run([*compiler, *flags, "-c", str(source), "-o", str(made)])
    try:
        kept.parent.mkdir(exist_ok=True)
        _move(made, kept)
    except OSError:  # sources that we may not write to: no cache
        return made
    return kept


def _move(made: Path, place: Path) -> None:
    """Puts a finished file in its place in one step, also across file systems."""
    staged = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.copyfile(made, staged)
    shutil.copymode(made, staged)
    os.replace(staged, place)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="expertd_kernels.native.csrc.build", description="Compile the CPU kernel.", allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="where to put the result (default: beside the sources)")
    parser.add_argument("--sanitize", default="", metavar="LIST", help="e.g. address,undefined")
    parser.add_argument("--only-if-stale", action="store_true", help="do nothing where the result is current")
    parser.add_argument("--check", action="store_true", help="say whether the library is stale, and build nothing")
    parser.add_argument("--machine", default="", metavar="NAME", help="x86_64 or aarch64, for an old glibc, by ziglang")
    parser.add_argument("--program", type=Path, metavar="FILE", help="link FILE, which has main(), into a program")
    args = parser.parse_args(argv)
    if args.check:
        print(stale(args.out or HERE / LIBRARY), end="")
        return 0
    try:
        print(
            build(
                args.out,
                sanitize=args.sanitize,
                program=args.program,
                only_if_stale=args.only_if_stale,
                machine=args.machine,
            )
        )
    except BuildError as e:
        print(f"cpu kernel: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
