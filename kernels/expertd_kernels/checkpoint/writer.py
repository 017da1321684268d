"""Writes a quantized copy of an unquantized checkpoint: expert tensors in a standard format, all others as they are.

One layer is in memory at a time, plus the quantized tensors of the shard that is being filled; tensors that stay are
copied from file to file.  config.json is written last: a folder that was left half-way is no checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.files import inside, read_json, shard_files
from expertd_kernels.checkpoint.recipe import LayerRecipe
from expertd_kernels.checkpoint.tensors import DTYPES, Counter, Shard, Stored
from expertd_kernels.checkpoint.units import Piece
from expertd_kernels.checkpoint.writer_formats import Target, projections, target_for
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.numerics import weight_errors
from expertd_kernels.weights.quantize import quantize
from expertd_kernels.weights.scheme import Scheme

__all__ = ["SHARD_BYTES", "Summary", "quantize_checkpoint"]

SHARD_BYTES = 4 << 30
_COPIED = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".md"})
_NOT_COPIED = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "PROVENANCE.md")
_EXPERTS_AT_A_TIME = 8
_COPY_BYTES = 16 << 20
_NAMES = {t: name for name, (_, t) in DTYPES.items() if t is not None and name != "F8_E8M0"}


@dataclass
class Summary:
    """What was done.  errors: by layer, the relative error of the weights of its first expert, (w13, w2)."""

    format: str
    scheme: str
    layers: int = 0
    experts: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    files: list[str] = field(default_factory=list)
    errors: dict[int, tuple[float, float]] = field(default_factory=dict)


def quantize_checkpoint(
    source: Checkpoint,
    destination: Path,
    scheme: Scheme,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Write `source` to the new folder `destination` with its experts in `scheme`.

    progress(done, total) counts experts.  ValueError (CheckpointError among them) where the source is quantized
    already, where no standard format holds the scheme, and where the folder is there and not empty.
    """
    recipes = {n: source.recipe(n) for n in source.layers}
    first = next(iter(recipes.values()))
    fused = [p for p in first.pieces[0].values() if p.unit.interleaved]
    target = target_for(scheme, bool(fused))
    _check(source, recipes, scheme, target)
    if destination.exists() and any(destination.iterdir()):
        raise ValueError(f"{destination}: is not empty; want a new folder")
    destination.mkdir(parents=True, exist_ok=True)
    summary = Summary(target.name, scheme.name, len(recipes))
    out = _Shards(destination, shard_bytes)
    replaced = {t.name.partition("[")[0] for recipe in recipes.values() for t in _tensors(recipe)}
    kept = [t for t in _all_tensors(source.root) if t.name not in replaced]
    for t in kept:
        out.add(t.name, t)
    total = sum(len(p.pieces) for p in recipes.values())
    for recipe in recipes.values():
        for name, tensor in _layer(source, recipe, scheme, target, summary):
            out.add(name, tensor)
        summary.experts += len(recipe.pieces)
        progress(summary.experts, total)
    summary.files = out.finish()
    summary.bytes_before = sum(p.stat().st_size for p in source.root.glob("*.safetensors"))
    summary.bytes_after = sum((destination / f).stat().st_size for f in summary.files)
    _other_files(source.root, destination)
    _config(source.root, destination, target.config(scheme, _modules(kept)))
    return summary


def _check(source: Checkpoint, recipes: dict[int, LayerRecipe], scheme: Scheme, target: Target) -> None:
    """Everything that can be refused before the first byte is written."""
    if source.quant:
        method = source.quant.get("quant_method") or "a quantization_config"
        raise CheckpointError(f"{source.root}: is quantized already ({method}); want bf16, f16 or f32 weights")
    for n, recipe in recipes.items():
        for name, matrix in (("w13", recipe.w13), ("w2", recipe.w2)):
            if matrix.scheme.element.quantized:
                raise CheckpointError(f"layer {n}: {name} is {matrix.scheme.name} already; want bf16, f16 or f32")
        for k in (recipe.hidden_size, recipe.intermediate_size):
            if target.multiple and scheme.cols and k % scheme.cols:
                raise ValueError(
                    f"layer {n}: {k} columns are no multiple of the group of {scheme.cols}, which other tools do not"
                    f" read as {target.name}; choose a group that divides {k}, or a channel scheme"
                )


def _tensors(recipe: LayerRecipe) -> Iterator[Stored]:
    """Every tensor of a layer's experts."""
    for pieces in recipe.pieces:
        for piece in pieces.values():
            yield from piece.unit.tensors.values()


def _all_tensors(root: Path) -> list[Stored]:
    """Every tensor of the checkpoint, file by file."""
    counter = Counter()
    return [t for file in shard_files(root)[1] for t in Shard(root / file, root, counter).tensors.values()]


def _modules(kept: list[Stored]) -> list[str]:
    """Modules whose matrices stay unquantized: what `ignore` lists name."""
    return [
        t.name.removesuffix(".weight")
        for t in kept
        if t.name.endswith(".weight") and len(t.shape) == 2 and "embed" not in t.name
    ]


def _layer(
    source: Checkpoint, recipe: LayerRecipe, scheme: Scheme, target: Target, summary: Summary
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one layer's experts, by name."""
    if target.encode is None:
        weights = _quantized(source, recipe, list(range(len(recipe.pieces))), scheme, summary)
        yield from _gptoss(weights, recipe)
        return
    for first in range(0, len(recipe.pieces), _EXPERTS_AT_A_TIME):
        ids = list(range(first, min(first + _EXPERTS_AT_A_TIME, len(recipe.pieces))))
        weights = _quantized(source, recipe, ids, scheme, summary)
        for slot, e in enumerate(ids):
            names = _projection_names(recipe.pieces[e], e, recipe.activation.segments)
            for matrix, own in ((weights.w13, names[:-1]), (weights.w2, names[-1:])):
                biases = None if matrix.bias is None else matrix.bias[slot].chunk(matrix.segments)
                for i, (name, part) in enumerate(zip(own, projections(matrix, slot), strict=True)):
                    for suffix, t in target.encode(part, scheme).items():
                        yield f"{name}.{suffix}", t
                    if biases is not None:
                        yield f"{name}.bias", biases[i].to(_bias_dtype(recipe.pieces[e]))


def _quantized(source: Checkpoint, recipe: LayerRecipe, ids: list[int], scheme: Scheme, summary: Summary) -> Weights:
    """Some experts of a layer, quantized; of the layer's first expert the error is kept."""
    weights = source.load(recipe.layer, ids)
    try:
        out = quantize(weights, scheme)
    except ValueError as e:
        raise ValueError(f"layer {recipe.layer}, experts {ids[0]} to {ids[-1]}: {e}") from e
    if ids[0] == 0:
        first = slice(0, 1)
        summary.errors[recipe.layer] = weight_errors(out.experts(first), weights.experts(first))
    return out


def _projection_names(pieces: Any, expert: int, segments: int) -> list[str]:
    """Module names of gate, up and down (up and down without mul) of one expert: its own where it has them, else what
    one expert's projections are called below the fused tensor's prefix."""
    wanted = ("gate", "up", "down") if segments == 2 else ("up", "down")
    if all(p in pieces for p in wanted):
        return [pieces[p].unit.name.partition("[")[0] for p in wanted if not pieces[p].unit.fused] or [
            f"{_prefix(pieces[p])}.{expert}.{p}_proj" for p in wanted
        ]
    return [f"{_prefix(pieces['down'])}.{expert}.{p}_proj" for p in wanted]


def _prefix(piece: Piece) -> str:
    """ "model.layers.0.mlp.experts" of a fused tensor's name."""
    return piece.unit.name.partition("[")[0].rpartition(".")[0]


def _bias_dtype(pieces: Any) -> torch.dtype:
    dtype: torch.dtype = pieces["down"].unit.tensors["bias"].torch_dtype
    return dtype


def _gptoss(weights: Weights, recipe: LayerRecipe) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss: all experts in one tensor, rows of gate and up alternating."""
    prefix = _prefix(recipe.pieces[0]["down"])
    for name, q in (("gate_up_proj", weights.w13), ("down_proj", weights.w2)):
        E, N, K = q.shape
        assert q.scales is not None, "mxfp4 has scales"

        def alternate(t: Tensor, E: int = E, segments: int = q.segments) -> Tensor:
            rows = t.shape[1] // segments
            return t.reshape(E, segments, rows, *t.shape[2:]).transpose(1, 2).flatten(1, 2).contiguous()

        yield f"{prefix}.{name}_blocks", alternate(q.codes).view(E, N, K // 32, 16)
        yield f"{prefix}.{name}_scales", alternate(q.scales)
        if q.bias is not None:
            yield f"{prefix}.{name}_bias", alternate(q.bias).to(_bias_dtype(recipe.pieces[0]))


class _Shards:
    """Files of at most `limit` bytes of tensors each (one tensor may be larger), and their index."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._tensors: dict[str, Tensor | Stored] = {}
        self._size = self._total = 0
        self._written: list[list[str]] = []

    def add(self, name: str, tensor: Tensor | Stored) -> None:
        size = _size(tensor)
        if self._tensors and self._size + size > self._limit:
            self._flush()
        self._tensors[name] = tensor.contiguous() if isinstance(tensor, Tensor) else tensor
        self._size += size

    def _flush(self) -> None:
        write_file(self._folder / f"part-{len(self._written)}.tmp", self._tensors)
        self._written.append(list(self._tensors))
        self._total += self._size
        self._tensors, self._size = {}, 0

    def finish(self) -> list[str]:
        """Give the files their names and write the index; returns the names."""
        self._flush()
        count = len(self._written)
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            files = ["model.safetensors"]
        for i, name in enumerate(files):
            (self._folder / f"part-{i}.tmp").rename(self._folder / name)
        if count > 1:
            where = {t: files[i] for i, names in enumerate(self._written) for t in names}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
            _write_json(self._folder / "model.safetensors.index.json", index)
        return files


def _size(t: Tensor | Stored) -> int:
    return t.nbytes if isinstance(t, Stored) else t.numel() * t.element_size()


def write_file(path: Path, tensors: dict[str, Tensor | Stored]) -> None:
    """One safetensors file; tensors in the order given, the header padded so that the data begins at 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, t in tensors.items():
        dtype = t.dtype if isinstance(t, Stored) else _NAMES[t.dtype]
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [at, at + _size(t)]}
        at += _size(t)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        for t in tensors.values():
            if isinstance(t, Stored):
                _copy(t, f)
            elif t.numel():
                f.write(memoryview(t.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _copy(t: Stored, f: BinaryIO) -> None:
    """A stored tensor's bytes, a piece at a time."""
    for begin in range(0, t.nbytes, _COPY_BYTES):
        piece = torch.empty(min(_COPY_BYTES, t.nbytes - begin), dtype=torch.uint8)
        t.shard.fill(piece.numpy(), t.offset + begin, t.name)
        f.write(memoryview(piece.numpy()))  # type: ignore[arg-type]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _other_files(root: Path, destination: Path) -> None:
    """Tokenizer, generation settings, model code: whatever is small text beside the weights."""
    for path in sorted(root.iterdir()):
        name = path.name
        if path.suffix in _COPIED and name not in _NOT_COPIED and not name.endswith(".index.json") and path.is_file():
            shutil.copyfile(inside(path, root), destination / name)


def _config(root: Path, destination: Path, quantization: dict[str, Any]) -> None:
    config = read_json(root / "config.json", root)
    _write_json(destination / "config.json", {**config, "quantization_config": quantization})
