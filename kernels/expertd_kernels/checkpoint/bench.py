"""How fast a checkpoint loads, and how much of it is read.

python -m expertd_kernels.checkpoint.bench --checkpoint DIR [--layers 0-3] [--experts 0-63] [--json]
python -m expertd_kernels.checkpoint.bench --synthetic gptq:1.0 [--json]     a random checkpoint of 1 GiB, removed after

Per layer three things are timed in turns, on files that were read once before (page cache warm: this measures the code,
not the disk), with the same number of threads: `load` into canonical weights; the safetensors library alone reading the
same tensors, both into fresh memory, as at boot, that is kept until the layer is done; and the library reading them
once more into that memory, which then costs no page faults: no loader at boot can be as fast.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from expertd_kernels.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.synthetic_files import KINDS, write_synthetic
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.native.library import kernel_error

__all__ = ["Figures", "main", "measure"]


@dataclass(frozen=True)
class Figures:
    """Sums over the layers; times are the best of the repeats.

    bytes_on_disk     what the shard's tensors take in the files; bytes_read: what planning and load() read
    read_overhead     bytes_read / bytes_on_disk - 1
    safetensors_again_s  safetensors into memory that is in use already
    ratio             our speed over that of safetensors alone, both into fresh memory
    largest_layer_bytes  canonical weights of the largest layer
    repacking         what moves packed integers: "C++ library", or "torch" and why, which takes several times as long
    peak_extra_bytes  most resident memory while loading one layer, above what was resident before (0: not known)
    """

    layers: int
    bytes_on_disk: int
    bytes_read: int
    read_overhead: float
    open_s: float
    load_s: float
    load_gb_per_s: float
    safetensors_s: float
    safetensors_gb_per_s: float
    safetensors_again_s: float
    ratio: float
    largest_layer_bytes: int
    peak_extra_bytes: int
    repacking: str
    machine: str
    torch: str
    threads: int


def measure(
    path: Path, layers: Sequence[int] | None = None, experts: Sequence[int] | None = None, repeats: int = 5
) -> Figures:
    """The figures for these layers and experts (None = all)."""
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    open_s = time.perf_counter() - start
    load_s = alone_s = again_s = 0.0
    on_disk = read = largest = peak = 0
    chosen = checkpoint.layers if layers is None else tuple(layers)
    for layer in chosen:
        on_disk += checkpoint.expert_bytes(layer, experts)
        before = checkpoint.bytes_read
        checkpoint.recipe(layer)
        resident = _reset_peak()
        largest = max(largest, checkpoint.load(layer, experts).nbytes)  # also warms the page cache
        peak, read = max(peak, _status_bytes("VmHWM") - resident), read + checkpoint.bytes_read - before
        files, times = _by_file(checkpoint, layer, experts), []
        for _ in range(repeats):  # in turns, so that whatever else the machine does hits all
            times.append((_seconds(partial(checkpoint.load, layer, experts)), *_read_alone(files)))
        ours, alone, again = map(min, zip(*times, strict=True))
        load_s, alone_s, again_s = load_s + ours, alone_s + alone, again_s + again
    return Figures(
        len(chosen),
        on_disk,
        read,
        read / on_disk - 1.0,
        open_s,
        load_s,
        on_disk / load_s / 1e9,
        alone_s,
        on_disk / alone_s / 1e9,
        again_s,
        alone_s / load_s,
        largest,
        peak,
        f"torch ({kernel_error()})" if kernel_error() else "C++ library",
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        torch.__version__,
        torch.get_num_threads(),
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _by_file(checkpoint: Checkpoint, layer: int, experts: Sequence[int] | None) -> dict[Path, list[Stored]]:
    """The tensors that load() reads, by file."""
    files: dict[Path, list[Stored]] = {}
    for t in checkpoint.needed(layer, experts):
        files.setdefault(t.shard.path, []).append(t)
    return files


def _read_alone(files: dict[Path, list[Stored]]) -> tuple[float, float]:
    """Seconds that the safetensors library takes to read them into fresh memory, and once more into the same memory.

    It maps the file, so a tensor that it gives is not read before somebody looks at it: each is copied once.
    """
    if _trim is not None:
        _trim(0)  # malloc gives back what it has kept of the last time: it would not be fresh
    kept: list[Tensor] = []
    fresh = _seconds(lambda: kept.extend(view.clone() for view in _views(files)))
    return fresh, _seconds(lambda: [out.copy_(view) for out, view in zip(kept, _views(files), strict=True)])


def _views(files: dict[Path, list[Stored]]) -> Iterator[Tensor]:
    for path, tensors in files.items():
        with safe_open(path, framework="pt") as f:
            for t in tensors:
                yield f.get_tensor(t.name) if t.index is None else f.get_slice(t.whole)[t.index]


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def _status_bytes(key: str) -> int:
    """A field of /proc/self/status in bytes; 0 on systems without it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def _reset_peak() -> int:
    """Let the peak of resident memory begin anew; what is resident now."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return _status_bytes("VmRSS")


def _table(f: Figures) -> str:
    rows = (
        ("layers", f"{f.layers}"),
        ("bytes on disk of the shard", f"{f.bytes_on_disk:,}"),
        ("bytes read", f"{f.bytes_read:,} ({100 * f.read_overhead:+.2f} %)"),
        ("open (headers only)", f"{f.open_s:.2f} s"),
        ("load into canonical weights", f"{f.load_s:.3f} s, {f.load_gb_per_s:.2f} GB/s"),
        ("safetensors alone", f"{f.safetensors_s:.3f} s, {f.safetensors_gb_per_s:.2f} GB/s"),
        ("ratio of speeds", f"{f.ratio:.2f}"),
        ("safetensors into memory in use already", f"{f.safetensors_again_s:.3f} s"),
        ("canonical weights of the largest layer", f"{f.largest_layer_bytes:,} bytes"),
        ("peak of extra resident memory", f"{f.peak_extra_bytes:,} bytes"),
        ("repacking", f.repacking),
        ("machine", f"{f.machine}; torch {f.torch}, {f.threads} threads"),
    )
    return "\n".join(f"{name:40} {value}" for name, value in rows)


def _numbers(text: str) -> list[int]:
    """ "0-3,7" -> [0, 1, 2, 3, 7]"""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 if the checkpoint cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m expertd_kernels.checkpoint.bench", description=__doc__, allow_abbrev=False
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--checkpoint", type=Path, metavar="DIR")
    where.add_argument("--synthetic", metavar="KIND:GIB", help=f"a random one; kinds: {', '.join(KINDS)}")
    parser.add_argument("--layers", type=_numbers, metavar="0-3,7")
    parser.add_argument("--experts", type=_numbers, metavar="0-63")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = args.checkpoint or write_synthetic(Path(folder), args.synthetic)
            figures = measure(path, args.layers, args.experts, args.repeats)
        except (CheckpointError, KeyError) as e:
            print(f"bench: {e}", file=sys.stderr)
            return 2
    print(json.dumps(asdict(figures)) if args.json else _table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
