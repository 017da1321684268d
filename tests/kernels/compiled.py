"""Kernels that tests compile, and a record of the cases whose kernels compiled as they demand.

Triton makes the same code of the same source: what it is asked for here has a digest (the kernel with all that it
calls, its constants and options, the target, Triton's version).  A case that passed is recorded with the digests of all
that it asked for and of the tests' own text (tests/kernels/compiled.txt); while neither changed, `make test` skips it,
and compiles it otherwise.  `make triton` (EXPERTD_COMPILED=record) compiles all and writes the record.

    kernels = [compile(source, target, options) for ...]    # all that the case will look at, before it looks at one
    kernels[0].asm["ptx"]                                   # compiles, or skips the case
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("compiled.txt")
HELPERS = ("dry_gpu.py", "ptxas.py")
"""What such tests share; the digest of a case has their text."""
RECORDING = os.environ.get("EXPERTD_COMPILED") == "record"
SKIPPED = "its kernels are as they were when `make triton` compiled them"
_case: list[Case] = []


class Kernel:
    """Triton's compiled kernel, compiled when something of it is asked for."""

    def __init__(self, source: Any, target: Any, options: Mapping[str, Any]) -> None:
        import triton

        asked = (triton.__version__, source.hash(), source.name, target, sorted(options.items()))
        self._what = source, target, dict(options)
        text = repr(asked).replace(str(Path(triton.__file__).parent), "")  # libraries of Triton are among the options
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = self.__dict__.get("_made")
        if made is None:
            for case in _case:
                case.skip_if_recorded()
            source, target, options = self._what
            made = self.__dict__["_made"] = _triton_compile()(source, target=target, options=options)
        return getattr(made, name)


@cache
def _triton_compile() -> Any:
    from triton.compiler import compiler

    return compiler.compile


def compile(source: Any, target: Any, options: Mapping[str, Any]) -> Kernel:  # as Triton calls it
    """What triton.compile makes of it, later."""
    return asked(Kernel(source, target, options))


def asked(kernel: Kernel) -> Kernel:
    """The kernel, which the case that runs looks at, too."""
    for case in _case:
        case.kernels.append(kernel.digest)
    return kernel


class Case:
    """A test that runs, and what it has asked for so far.  own: digest of the tests' text."""

    def __init__(self, nodeid: str, own: str, recorded: Mapping[str, str]) -> None:
        self.nodeid, self.own, self.recorded = nodeid, own, recorded
        self.kernels: list[str] = []

    def digest(self) -> str:
        return hashlib.sha256("\n".join([self.own, *self.kernels]).encode()).hexdigest()[:16]

    def skip_if_recorded(self) -> None:
        """A part of what it asks for has another digest than the whole: a case compiles until it has asked for all."""
        if self.recorded.get(self.nodeid) == self.digest():
            pytest.skip(SKIPPED)


@contextmanager
def case(nodeid: str, files: Sequence[Path], recording: bool = RECORDING) -> Iterator[Case]:
    """While it lasts, kernels are asked for by this test, whose text is in `files`; it is recorded if it passes."""
    from triton import __version__

    own = hashlib.sha256(b"\0".join(p.read_bytes() for p in files)).hexdigest()
    now = Case(nodeid, own, {} if recording else recorded(__version__))
    _case[:] = [now]
    try:
        yield now
    finally:
        _case.clear()
    if recording and now.kernels:
        record(__version__, nodeid, now.digest())


def read(path: Path) -> dict[tuple[str, str], str]:
    """{(Triton's version, test): digest}, of lines "version digest test"."""
    if not path.exists():
        return {}
    lines = (line.split(" ", 2) for line in path.read_text().splitlines())
    return {(version, nodeid): digest for version, digest, nodeid in lines}


@cache
def recorded(version: str) -> dict[str, str]:
    return {nodeid: digest for (of, nodeid), digest in read(RECORD).items() if of == version}


def record(version: str, nodeid: str, digest: str) -> None:
    """Cases that are no more leave the record here, too."""
    with RECORD.open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        root = RECORD.parents[2]
        found = read(RECORD) | {(version, nodeid): digest}
        kept = {key: value for key, value in found.items() if (root / key[1].partition("::")[0]).exists()}
        part = RECORD.with_suffix(".part")
        part.write_text("".join(f"{of} {value} {test}\n" for (of, test), value in sorted(kept.items())))
        part.replace(RECORD)
