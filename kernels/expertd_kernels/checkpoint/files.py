"""The files of a checkpoint folder: which of them are read, and from where.

Links: a file may be a link, if what it points to lies in the checkpoint folder itself, or in the `blobs` folder of the
same repository in the hub's cache (`<repo>/snapshots/<revision>/<file> -> ../../blobs/<hash>`).  Any other link is
refused: a folder that somebody hands you must not make a server read files elsewhere.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from expertd_kernels.checkpoint.errors import CheckpointError

__all__ = ["inside", "read_json", "read_json_bytes", "shard_files"]

MAX_JSON_BYTES, MAX_CONFIG_BYTES = 256 << 20, 16 << 20
"""An index of a million tensors has about 100 MB; a configuration that lists each of 100,000 modules 10."""
_MOST_DIGITS = 20
"""Of an integer: 2^64 has as many.  Longer ones cost what their square costs wherever they are multiplied."""


def inside(path: Path, root: Path) -> Path:
    """The real path of a file of the checkpoint `root`; CheckpointError if it is missing or lies elsewhere."""
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    if not real.exists():
        raise CheckpointError(f"{path.name}: there is no such file in {root}; fetch it, or correct the index")
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if real.is_relative_to(home) or (blobs is not None and real.parent == Path(os.path.realpath(blobs))):
        return real
    raise CheckpointError(f"{path.name}: is a link out of the checkpoint folder (to {real}); copy the file into {root}")


def read_json(path: Path, root: Path, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; most: its bytes."""
    real = inside(path, root)
    try:
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is not waited for
    except OSError as e:
        raise CheckpointError(f"{path.name}: cannot be opened: {e.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise CheckpointError(f"{path.name}: is no regular file of at most {most >> 20} MiB")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(status.st_size)
    finally:
        os.close(fd)
    return read_json_bytes(data, path.name)


def read_json_bytes(data: bytes, subject: str) -> dict[str, Any]:
    """Parse a JSON object in which no key stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{subject}: {twice!r} stands there twice")
        return out

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_int=_integer)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{subject}: is no JSON: {e}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{subject}: holds a JSON {type(value).__name__}, want an object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, {digits[:12]}...; want at most {_MOST_DIGITS}")
    return int(digits)


def shard_files(root: Path) -> tuple[dict[str, str] | None, list[str]]:
    """(tensor -> file name by the index, or None without an index; names of the files that hold the weights).

    In this order: the one `*.safetensors.index.json`; `model.safetensors`; `model-*-of-*.safetensors`; the only
    `*.safetensors` there is.  Several candidates are an error that lists them.
    """
    indices = sorted(p.name for p in root.glob("*.safetensors.index.json"))
    if "model.safetensors.index.json" in indices:
        indices = ["model.safetensors.index.json"]
    if len(indices) > 1:
        raise CheckpointError(f"{root}: several indices ({', '.join(indices)}); keep one")
    if indices:
        weight_map = _weight_map(read_json(root / indices[0], root, MAX_JSON_BYTES), indices[0])
        return weight_map, sorted(set(weight_map.values()))
    if os.path.lexists(root / "model.safetensors"):
        return None, ["model.safetensors"]
    files = sorted(p.name for p in root.glob("model-*-of-*.safetensors"))
    files = files or sorted(p.name for p in root.glob("*.safetensors") if p.name != "expected.safetensors")
    if not files:
        raise CheckpointError(f"{root}: no *.safetensors file in it; want a folder with config.json and safetensors")
    if len(files) > 1 and not files[0].startswith("model-"):
        raise CheckpointError(f"{root}: {', '.join(files)} and no index that says what is where")
    return None, files


def _weight_map(index: dict[str, Any], name: str) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{name}: has no weight_map")
    for file in set(map(str, weight_map.values())):
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or "\\" in file or path.suffix != ".safetensors" or "\0" in file:
            tensor = next(t for t, f in weight_map.items() if str(f) == file)
            raise CheckpointError(
                f"{name}: puts {tensor} into {file!r}, want the name of a safetensors file in the same folder"
            )
    return {str(k): str(v) for k, v in weight_map.items()}
