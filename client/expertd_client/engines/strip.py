"""A checkpoint without its experts, for frontends: which tensors are experts, and the copy that leaves them out.

Only names and sizes of tensors are looked at; bytes are copied from file to file.  No torch.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Stripped", "is_expert", "is_quantized", "strip", "tensor_names", "without_quantization"]

_EXPERT = re.compile(
    r"(?:^|\.)experts\.(?:\d+\.|(?:gate_up|gate|up|down)_proj|w13|w[123]\b|(?:in|out)put_linear)"
    r"|\.block_sparse_moe\.(?:in|out)put_linear\b"
)
_QUANTIZED = re.compile(
    r"\.(?:qweight|qzeros|scales|g_idx|weight_(?:packed|scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx))$"
    r"|_(?:blocks|scales)$"
)
_OF_QUANTIZATION = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
_COPIED = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".md"})
_CHUNK_BYTES = 16 << 20
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stripped:
    """What strip() did.  plain: nothing that is left is quantized, so config.json says nothing of quantization."""

    tensors: int
    tensor_bytes: int
    left_out: int
    left_out_bytes: int
    files: tuple[str, ...]
    plain: bool


def is_expert(name: str) -> bool:
    """Whether a checkpoint's tensor of this name belongs to routed experts: one expert's, or all of a layer's fused.
    Routers and shared experts do not."""
    return _EXPERT.search(name) is not None


def is_quantized(names: Iterable[str]) -> bool:
    """Whether some of these tensors are parts of a quantized matrix, by what formats call them."""
    return any(_QUANTIZED.search(name) for name in names)


def tensor_names(root: Path) -> list[str]:
    """All tensors of the checkpoint in a folder.  Raises ValueError for a folder that is none."""
    return [name for file in _weight_files(root) for name in _Shard(root / file).tensors]


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with nothing said of quantization, nested configurations included."""
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }


def strip(source: Path, destination: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Stripped:
    """Writes `source` to the new folder `destination` without its experts; progress(bytes done, of all).

    Raises ValueError for a source that is no checkpoint or has no experts, and for a destination that is not empty.
    config.json is written last: a folder that was left half-way is no checkpoint."""
    if destination.exists() and any(destination.iterdir()):
        raise ValueError(f"{destination}: is not empty; want a new folder")
    shards = [_Shard(source / file) for file in _weight_files(source)]
    kept = {shard.path.name: [name for name in shard.tensors if not is_expert(name)] for shard in shards}
    left_out = [shard.size(name) for shard in shards for name in shard.tensors if is_expert(name)]
    if not left_out:
        raise ValueError(f"{source}: got no tensor of experts, want a checkpoint of a Mixture-of-Experts model")
    total = sum(shard.size(name) for shard in shards for name in kept[shard.path.name])
    destination.mkdir(parents=True, exist_ok=True)
    done, written = 0, []
    for shard in shards:
        names = kept[shard.path.name]
        if names:
            written.append(shard.path.name)
            for size in shard.copy(names, destination / shard.path.name):
                done += size
                progress(done, total)
    if written != ["model.safetensors"]:
        _write_index(destination, {name: file for file in written for name in kept[file]}, total)
    plain = not is_quantized(name for names in kept.values() for name in names)
    _other_files(source, destination, plain)
    tensors = sum(map(len, kept.values()))
    return Stripped(tensors, total, len(left_out), sum(left_out), tuple(written), plain)


def _weight_files(root: Path) -> list[str]:
    """Names of the safetensors files that the folder's weights are in."""
    index = next(iter(sorted(root.glob("*.safetensors.index.json"))), None)
    if index is not None:
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or any("/" in str(file) for file in weight_map.values()):
            raise ValueError(f"{index}: got no weight_map with names of files beside it")
        return sorted(set(map(str, weight_map.values())))
    files = sorted(path.name for path in root.glob("model*.safetensors"))
    if not files or not (root / "config.json").exists():
        raise ValueError(f"{root}: got no config.json with model*.safetensors, want a folder with a checkpoint")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got a JSON {type(found).__name__}, want an object")
    return found


class _Shard:
    """One safetensors file: 8 bytes of length, a JSON header with the place of each tensor, then their bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                header: dict[str, Any] = json.loads(file.read(min(length, size)))
            self._metadata = header.pop("__metadata__", None)
            self.tensors: dict[str, dict[str, Any]] = dict(sorted(header.items(), key=lambda t: t[1]["data_offsets"]))
            ends = [end for tensor in self.tensors.values() for end in tensor["data_offsets"]]
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: cannot be read as a .safetensors file: {error}") from None
        self._begin = 8 + length
        if ends and (min(ends) < 0 or self._begin + max(ends) > size):
            raise ValueError(f"{path}: got tensors beyond its {size} bytes, want a whole file")

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        begin, end = self.tensors[name]["data_offsets"]
        return int(end - begin)

    def copy(self, names: list[str], destination: Path) -> Iterator[int]:
        """A file with these tensors; yields the bytes of each when they are written."""
        header: dict[str, Any] = {} if self._metadata is None else {"__metadata__": self._metadata}
        at = 0
        for name in names:
            header[name] = {**self.tensors[name], "data_offsets": [at, at + self.size(name)]}
            at += self.size(name)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self.path.open("rb") as source, destination.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                source.seek(self._begin + self.tensors[name]["data_offsets"][0])
                _copy(source, out, self.size(name))
                yield self.size(name)


def _copy(source: BinaryIO, out: BinaryIO, count: int) -> None:
    while count:
        chunk = source.read(min(count, _CHUNK_BYTES))
        if not chunk:
            raise ValueError(f"{source.name}: ended {count} bytes early; it was cut meanwhile")
        out.write(chunk)
        count -= len(chunk)


def _write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _other_files(source: Path, destination: Path, plain: bool) -> None:
    """Tokenizer, generation config and what else lies there; config.json last."""
    for path in sorted(source.iterdir()):
        index = path.name.endswith(".safetensors.index.json") or path.name == "config.json"
        if path.suffix in _COPIED and path.is_file() and not index and not (plain and path.name in _OF_QUANTIZATION):
            shutil.copyfile(path, destination / path.name)
    config = _read_json(source / "config.json")
    config = without_quantization(config) if plain else config
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
