"""What Triton and its tools make of the kernels, kept in build/compiled as long as the kernels' sources are the same.

Triton's own key of a kernel has its code and the values of its constants, but not the code of their methods.  So the
folder is that of all sources of expertd_kernels: after a change of one, everything is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "compiled"


def digest(kernels: Path = ROOT / "kernels/expertd_kernels") -> str:
    """16 hex digits of the names and the text of its Python files."""
    found = hashlib.sha256()
    for path in sorted(kernels.rglob("*.py")):
        found.update(f"{path.relative_to(kernels)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


@cache
def folder() -> Path:
    """That of this Triton and these sources; those of other sources are deleted."""
    own = KEPT / f"{triton.__version__}-{digest()}"
    for other in KEPT.glob(f"{triton.__version__}-*"):
        if other != own:
            shutil.rmtree(other, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    return own


def put(path: Path, text: str) -> str:
    """Written whole: another worker may read it."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
    return text


def output(tool: Path, options: Sequence[str], binary: bytes, scratch: Path) -> str:
    """What a tool of Triton's says of a cubin.  The key has the tool's name, its options and the cubin."""
    key = hashlib.sha256("\0".join([tool.name, *options, ""]).encode() + binary).hexdigest()
    kept = folder() / f"{key}.said"
    if kept.exists():
        return kept.read_text()
    file = scratch / f"{key[:16]}.cubin"
    file.write_bytes(binary)
    done = subprocess.run([tool, *options, file], capture_output=True, text=True, check=True)
    return put(kept, done.stdout + done.stderr)


def _log_of(ptx: str) -> Path:
    return folder() / f"{hashlib.sha256(ptx.encode()).hexdigest()}.ptxas"


def ptxas_log(ptx: str) -> str:
    """What ptxas said when Triton, under keep_logs(), had it assemble this."""
    return _log_of(ptx).read_text()


@contextlib.contextmanager
def keep_logs() -> Iterator[None]:
    """Triton throws away what ptxas says; while this lasts it is kept."""
    make: Callable[..., bytes] = CUDABackend.make_cubin

    def make_and_keep(self: Any, src: str, *more: Any) -> bytes:
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr(knobs.nvidia, "dump_ptxas_log", True)
            cubin = make(self, src, *more)
        put(_log_of(src), said.getvalue())
        return cubin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_cubin", make_and_keep)
        yield
