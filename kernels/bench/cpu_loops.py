"""The inner loops of the compiled CPU library that hold its products, read from its machine code by GNU binutils.

A loop is what lies between a jump backwards and its target, with no other such pair inside.  What the compiler could
not keep in registers is seen there as vectors that go to the stack and come back.
"""

from __future__ import annotations

import bisect
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Instruction", "Loop", "inner_loops", "missing_tools", "spills"]

DOTS = re.compile(r"(\{\w+\} )?(vpdpbusd|vpdpwssd|vdpbf16ps|vpmaddwd|vpmaddubsw|tdp\w+)")
PRODUCTS = re.compile(rf"{DOTS.pattern}|vfmadd\d+ps")
SOURCE = re.compile(r"\bdf \*ABS\*\s+\w+\s+(\S*)$")
FUNCTION = re.compile(r"^(\w+) .{6}F \.text\S*\s+\w+\s+(.+)$")
CODE = re.compile(r"^\s+(\w+):\s+(\S.*)$")
JUMP = re.compile(r"^(?:notrack )?j\w+\s+([0-9a-f]+)")


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str
    """AT&T syntax, as an assembler takes it."""


@dataclass(frozen=True)
class Loop:
    """source: of the function, without its ending; function: its name without namespaces and arguments, as
    "tile_bytes<Avx512, 0, 2, 1, 3>"; frame: whether %rbp holds the stack's frame there."""

    source: str
    function: str
    frame: bool
    body: tuple[Instruction, ...]

    @property
    def products(self) -> int:
        return sum(bool(PRODUCTS.match(i.text)) for i in self.body)

    @property
    def dots(self) -> int:
        """Products that add up more than one pair; those of ends of groups, which scale, are none."""
        return sum(bool(DOTS.match(i.text)) for i in self.body)


def missing_tools() -> str:
    """What to install; "" = all is there."""
    return "" if shutil.which("objdump") else "no objdump: apt-get install binutils"


def _said(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _short(name: str) -> str:
    """A demangled name without namespaces, result and arguments."""
    name = name.replace("expertd::", "").replace("(anonymous namespace)::", "")
    name = re.sub(r"\((\w+)\)(\d+)", r"\2", name).removeprefix(".hidden ")
    depth = 0
    for at, c in enumerate(name):  # the first parenthesis that is not inside <>
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            name = name[:at]
            break
    return re.sub(r"^[\w:]+(?:<[^<>]*>)? (?=\w)", "", name)


def _functions(library: Path) -> dict[int, tuple[str, str]]:
    """Address -> (source without its ending, short name).  Nothing of a library that was stripped."""
    source, found = "", {}
    for line in _said("objdump", "-t", "-C", str(library)):
        if m := SOURCE.search(line):
            source = m[1].rpartition(".")[0]
        elif m := FUNCTION.match(line):
            found[int(m[1], 16)] = source, _short(m[2])
    return found


def _bodies(library: Path) -> Iterator[tuple[int, list[Instruction]]]:
    """(address, instructions) of each function."""
    body: list[Instruction] = []
    for line in _said("objdump", "-d", "-w", "--no-show-raw-insn", str(library)):
        if line.endswith(">:"):
            body = []
        elif m := CODE.match(line):
            if not body:
                yield int(m[1], 16), body
            body.append(Instruction(int(m[1], 16), m[2].partition("#")[0].strip()))


def _loops(body: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """Innermost ones."""
    addresses = [i.address for i in body]
    spans = set()
    for at, i in enumerate(body):
        if m := JUMP.match(i.text):
            target = int(m[1], 16)
            if addresses[0] <= target <= i.address:
                spans.add((bisect.bisect_left(addresses, target), at))
    for first, last in sorted(spans):
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in spans):
            yield tuple(body[first : last + 1])


def inner_loops(library: Path, sources: Sequence[str]) -> list[Loop]:
    """Those with products, of functions of the named sources."""
    functions = _functions(library)
    found = []
    for address, body in [*_bodies(library)]:
        source, name = functions.get(address, ("", ""))
        if source not in sources:
            continue
        frame = any(re.match(r"mov\s+%rsp,%rbp", i.text) for i in body)
        loops = (Loop(source, name, frame, loop) for loop in _loops(body))
        found += [loop for loop in loops if loop.products]
    return found


def spills(loop: Loop) -> list[str]:
    """Instructions that move a vector to or from the stack."""
    base = r"\(%rsp\b|\(%rbp\b" if loop.frame else r"\(%rsp\b"
    return [i.text for i in loop.body if re.search(base, i.text) and re.search(r"%[xyz]mm\d", i.text)]
