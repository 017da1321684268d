"""Cycles that the CPU library's inner loops take for 64 bytes of codes: by llvm-mca for several cores, and measured.

    python kernels/bench/cpu_mca.py [OUT.md]

Predictions are for all levels, from the machine code of the built library; measured is, on this machine and in its
caches, what the levels take that run here, with the ends of groups and of blocks, which predictions leave out.
llvm-mca: apt-get install llvm-19 (12 knows no Zen 3, 16 is the first with Zen 4, 19 with Zen 5); the newest counts.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cpu_loops import Loop, inner_loops, missing_tools
from expertd_kernels.bench.cpu import machine
from expertd_kernels.native import library as native
from expertd_kernels.native.csrc import build

__all__ = ["CORES", "ROWS", "Kernel", "find_mca", "kernels", "loop_of", "loops_of", "main", "markdown", "predicted"]

HERE = Path(__file__).resolve().parent
CORES = ("znver3", "znver4", "znver5", "sapphirerapids", "graniterapids")
SCHEMES = ("int4_g128", "mxfp4", "int8_g128", "e4m3_block128")
ELEMENTS = {"int4_g128": 0, "int8_g128": 1, "e4m3_block128": 2, "mxfp4": 3}
"""EXPERTD_INT4, ... of csrc/abi.h."""
ROWS = (1, 4)
ITERATIONS = 100
_INT, _BYTES, _BF16, _F32 = "tile_(?:row_)?i16", "tile_bytes", "tile_bf16", "tile_f32"
PRODUCT = {_INT: "vpdpwssd|vpmaddwd", _BYTES: "vpdpbusd", _BF16: "vdpbf16ps", _F32: r"vfmadd\d+ps"}
LEVELS: Mapping[str, tuple[str, str, str, str]] = {
    "avx2": ("level_avx2", _INT, _INT, _F32),
    "avx512": ("level_avx512", _INT, _INT, _F32),
    "avx512_vnni": ("level_avx512_bf16", _INT, _INT, _F32),
    "avx512_bytes": ("level_avx512_bf16", _BYTES, _INT, _BF16),
    "avx512_bf16": ("level_avx512_bf16", _BF16, _INT, _BF16),
}
"""Level -> source, and the functions for 4-bit codes, int8 and e4m3.  avx512_amx has those of avx512_vnni for few rows,
int4 as bytes; its tiles have no loop of this kind."""


@dataclass(frozen=True)
class Kernel:
    """What one level multiplies a scheme with, for `rows` rows of activations at a time."""

    level: str
    scheme: str
    rows: int

    @property
    def function(self) -> str:
        _, four_bits, int8, e4m3 = LEVELS[self.level]
        return {"int8_g128": int8, "e4m3_block128": e4m3}.get(self.scheme, four_bits)

    def vectors(self, products: int) -> float:
        """Of 64 bytes of codes, in a loop with so many products."""
        codes = 128 if ELEMENTS[self.scheme] in (0, 3) else 64
        lanes = 8 if self.level == "avx2" else 16
        if self.function == _BYTES and self.scheme == "int4_g128":
            each = 3.0  # csrc/bytes.h
        else:
            each = codes / lanes / {_INT: 2, _BF16: 2, _F32: 1, _BYTES: 2}[self.function]
        return products / (each * self.rows)


def kernels() -> list[Kernel]:
    return [Kernel(level, scheme, rows) for level in LEVELS for scheme in SCHEMES for rows in ROWS]


def loop_of(kernel: Kernel, loops: Sequence[Loop]) -> tuple[Loop, float] | None:
    """The kernel's loop with the most products, of two blocks where there is one -> (loop, vectors of codes in it)."""
    source = LEVELS[kernel.level][0]
    unfetched = (kernel.function, kernel.scheme, kernel.rows) == (_BYTES, "int4_g128", 1)  # fetches() in csrc/level.h
    fetched = "false" if unfetched else "true"
    for blocks in (2, 1):
        rows = rf", {kernel.rows}" if kernel.function != _INT or kernel.rows > 1 else r"(?:, 1)?"
        want = re.compile(
            rf"{kernel.function}<\w+, {ELEMENTS[kernel.scheme]}, {blocks}{rows}(?:, -?\d+)?(?:, {fetched})?>"
        )
        found = []
        for loop in loops:
            if loop.source == source and want.fullmatch(loop.function):
                products = sum(bool(re.match(PRODUCT[kernel.function], i.text)) for i in loop.body)
                found.append((products, loop))
        products, best = max(found, key=lambda pair: pair[0], default=(0, None))
        if best is not None and products:
            return best, kernel.vectors(products)
    return None


def loops_of(loops: Sequence[Loop]) -> dict[Kernel, tuple[Loop, float]]:
    """loop_of() of each kernel that has one."""
    return {kernel: found for kernel in kernels() if (found := loop_of(kernel, loops))}


def find_mca() -> str:
    """The newest llvm-mca on the path.  FileNotFoundError says what to install."""
    numbered = [f"llvm-mca-{n}" for n in range(30, 11, -1)]
    for name in (*numbered, "llvm-mca"):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError("no llvm-mca: apt-get install llvm-19 (or llvm, which knows fewer cores)")


def _assembly(loop: Loop) -> str:
    """The loop as an assembler takes it: its jumps go nowhere else."""
    lines = [re.sub(r"^(j\w+)\s.*", r"\1 .Lhead", i.text) for i in loop.body]
    return "\n".join([".Lhead:", *lines, ""])


def predicted(mca: str, loop: Loop, core: str) -> float | None:
    """Cycles of one turn of the loop; None: the core has not its instructions, or this llvm-mca does not know it."""
    command = [mca, "-mtriple=x86_64-linux-gnu", f"-mcpu={core}", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input=_assembly(loop), capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"^Total Cycles:\s+(\d+)", done.stdout, re.M)
    known = "is not a recognized processor" not in done.stderr
    return int(found[1]) / ITERATIONS if found and known and not done.returncode else None


def measured() -> dict[Kernel, float]:
    """Cycles for 64 bytes on this machine, of the levels that run here."""
    with tempfile.TemporaryDirectory() as folder:
        program = build.build(Path(folder) / "cycles", program=HERE / "cpu_cycles.cpp")
        here = [level for level in native.levels() if level in LEVELS]
        lines = subprocess.run([program, *here], capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for line in lines:
        level, scheme, rows, _, cycles = line.split()
        found[Kernel(level, scheme, int(rows))] = float(cycles)
    return found


def markdown(
    found: Mapping[Kernel, tuple[Loop, float]],
    prediction: Mapping[tuple[Kernel, str], float],
    timed: Mapping[Kernel, float],
) -> str:
    """A line for each kernel.  found: its loop, and the vectors of codes in it."""
    out = [
        f"| level | scheme | rows | instructions | {' | '.join(CORES)} | measured |",
        "|---" * (len(CORES) + 5) + "|",
    ]
    for kernel, (loop, vectors) in found.items():
        cells = [f"{prediction[kernel, core]:.1f}" if (kernel, core) in prediction else "" for core in CORES]
        cells.append(f"{timed[kernel]:.1f}" if kernel in timed else "")
        out.append(
            f"| `{kernel.level}` | {kernel.scheme} | {kernel.rows} | {len(loop.body) / vectors:.1f} |"
            f" {' | '.join(cells)} |"
        )
    return "\n".join(out) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a tool is missing, or the library has no loop that is known."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("out", type=Path, nargs="?", metavar="OUT.md", help="write the table here (default: print it)")
    args = p.parse_args(argv)
    try:
        mca = find_mca()
        if missing := missing_tools():
            raise FileNotFoundError(missing)
    except FileNotFoundError as e:
        print(e, file=sys.stderr)
        return 1
    found = loops_of(inner_loops(build.HERE / build.LIBRARY, sorted({source for source, *_ in LEVELS.values()})))
    if not found:
        print(f"{build.LIBRARY}: no loop that is known in it; a stripped one has no names", file=sys.stderr)
        return 1

    def predict(one: tuple[Kernel, str]) -> float | None:
        loop, vectors = found[one[0]]
        cycles = predicted(mca, loop, one[1])
        return None if cycles is None else cycles / vectors

    asked = [(kernel, core) for kernel in found for core in CORES]
    with ThreadPoolExecutor(2) as pool:
        prediction = {one: c for one, c in zip(asked, pool.map(predict, asked), strict=True) if c is not None}
    version = subprocess.run([mca, "--version"], capture_output=True, text=True, check=True).stdout
    compiler = subprocess.run([*build.find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    facts = machine()
    text = (
        f"{' '.join(version.split()[:4])}; {compiler.splitlines()[0]}; measured: {facts['cpu']}, level {facts['level']}"
        f", commit {facts['commit']}\n\n{markdown(found, prediction, measured())}"
    )
    if args.out:
        args.out.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
