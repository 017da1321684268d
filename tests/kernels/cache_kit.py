"""The file of a packed layer, and who writes into it."""

from __future__ import annotations

from pathlib import Path

from expertd_kernels import Device, problem_of
from expertd_kernels.backends import reference as backend
from expertd_kernels.packed.file import read_entry, write_packed
from expertd_kernels.packed.watched import WatchedExperts
from expertd_kernels.sources.synthetic import random_inputs, random_weights

CPU = Device("cpu", "x86_64")
NAME = "layer.packed"


class Layer:
    """A packed layer and its file, and what its experts give."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.weights = random_weights("int4_g32_zp", 3, 64, 32, seed=seed)
        self.problem = problem_of(self.weights, CPU, top_k=2)
        self.packed = backend.pack(self.weights, self.problem)
        self.path = folder / NAME
        write_packed(self.path, self.packed, {"seed": seed})
        self.inputs = random_inputs(5, 64, 3, 2)
        self.right = backend.experts(self.packed, self.problem)(*self.inputs)

    def experts(self) -> WatchedExperts:
        """On the mapped entry, as a server has them."""
        entry = read_entry(self.path)
        assert entry.file is not None
        return WatchedExperts(backend.experts(entry.packed, self.problem), entry.file)


def scribble(path: Path, at: int, data: bytes) -> None:
    """Write into a file in place, as `dd conv=notrunc`, `rsync --inplace` and a restored disk do."""
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.seek(at)
        f.write(data)


def turn(path: Path, at: int) -> None:
    scribble(path, at, bytes([path.read_bytes()[at] ^ 0x40]))
