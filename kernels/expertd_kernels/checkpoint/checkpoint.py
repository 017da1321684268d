"""A checkpoint folder as an ExpertSource: which layers have experts, what they are, their canonical weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from expertd_kernels.checkpoint.assembly import assemble
from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.families import ModelConfig, find_family, unknown_family
from expertd_kernels.checkpoint.files import read_json, shard_files
from expertd_kernels.checkpoint.in_memory import load_on
from expertd_kernels.checkpoint.names import LayerTensors, Naming, family_naming, group_by_layer, template_naming
from expertd_kernels.checkpoint.quant_config import read_quant_config
from expertd_kernels.checkpoint.recipe import LayerRecipe, experts_recipe, layer_recipe
from expertd_kernels.checkpoint.tensors import Counter, Shard, Stored
from expertd_kernels.sources.source import LayerInfo
from expertd_kernels.weights.canonical import Weights

__all__ = ["Checkpoint", "open_checkpoint"]

_SAMPLE_BYTES = 64
"""Of two tensors of each layer, for the fingerprint: two fine-tunes of one model differ only in their weights."""


def open_checkpoint(path: str | Path, layer_template: str | None = None) -> Checkpoint:
    """Open a folder with config.json and safetensors files; reads headers only.

    layer_template: where the experts are, for a family that is not in the table, or to overrule it.
    CheckpointError says what is wrong with the folder.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"{root}: is no folder; want one with config.json and safetensors files")
    config = read_json(root / "config.json", root)
    model = find_family(config) or unknown_family(config, layer_template)
    quant = read_quant_config(root, config)
    counter = Counter()
    tensors = _open_shards(root, counter)
    naming = template_naming(layer_template, model.family) if layer_template else family_naming(model.family)
    layers = group_by_layer(tensors, naming)
    if not layers:
        raise CheckpointError(
            f"{root}: no experts among its {len(tensors)} tensors (as {next(iter(tensors), 'none')}); family"
            f" {model.family.name} has them at {naming.template}; say where they are with --layer-template"
        )
    return Checkpoint(root, model, quant, layers, counter, naming)


def _open_shards(root: Path, counter: Counter) -> dict[str, Stored]:
    """Every tensor of the checkpoint.  Each stands in exactly one file, and where the index says."""
    weight_map, files = shard_files(root)
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, t in Shard(root / file, root, counter).tensors.items():
            if name in tensors:
                raise CheckpointError(f"{name}: stands in {tensors[name].file} and in {file}; want it once")
            tensors[name] = t
    for name, file in (weight_map or {}).items():
        if name not in tensors or tensors[name].shard.path.name != Path(file).name:
            raise CheckpointError(f"{name}: the index says it is in {file}, but that file does not hold it")
    return tensors


class Checkpoint:
    """See source.ExpertSource.  Safe to use from many threads: what changes after opening is replaced at once."""

    def __init__(
        self,
        root: Path,
        model: ModelConfig,
        quant: Mapping[str, Any],
        tensors: Mapping[int, LayerTensors],
        counter: Counter,
        naming: Naming,
    ) -> None:
        self.root = root
        self.quant = quant
        self.counter = counter
        self.naming = naming
        self._model = model
        self._facts: dict[int, LayerRecipe] = {}
        self._last: LayerRecipe | None = None
        depth = model.num_layers()
        self._tensors = {n: tensors[n] for n in sorted(tensors) if not depth or n < depth}
        beyond = sorted(set(tensors) - set(self._tensors))
        if not self._tensors:
            raise CheckpointError(f"{root}: experts in layers {beyond}, but config.json: num_hidden_layers is {depth}")
        self._notes = tuple(self._general_notes(beyond))

    @property
    def family(self) -> str:
        return self._model.family.name

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._tensors)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from disk so far, headers not counted."""
        return self.counter.bytes

    def tensors(self, layer: int) -> LayerTensors:
        """Where the tensors of a layer's experts are; not to be changed.  KeyError: it has no experts."""
        return self._tensors[layer]

    def with_layer(self, layer: LayerTensors) -> Checkpoint:
        """The same model with these tensors of one layer, and no other layer."""
        return Checkpoint(self.root, self._model, self.quant, {layer.layer: layer}, Counter(), self.naming)

    def with_layers(self, layers: Mapping[int, LayerTensors], root: Path) -> Checkpoint:
        """The same model with these tensors alone, which lie in `root`."""
        return Checkpoint(root, self._model, self.quant, layers, Counter(), self.naming)

    def recipe(self, layer: int) -> LayerRecipe:
        """How the layer will be read: formats, schemes, shapes of every projection of every expert."""
        if layer not in self._tensors:
            raise KeyError(f"layer {layer}: this checkpoint has experts in layers {_ranges(self.layers)}")
        recipe = layer_recipe(self._model, self.quant, self._tensors[layer])
        self._facts[layer] = replace(recipe, experts=(), pieces=())  # the pieces of all layers would be much memory
        self._last = recipe
        return recipe

    def info(self, layer: int) -> LayerInfo:
        return self._describe(self._facts.get(layer) or self.recipe(layer))

    def load(self, layer: int, experts: Sequence[int] | None = None) -> Weights:
        return assemble(self._recipe_of(layer, experts))

    def load_on(self, device: torch.device, layer: int, experts: Sequence[int] | None = None) -> Weights:
        """load() for `device`.  Of tensors in memory the copies may be under way on the current stream, and whether
        they are finite was not looked at."""
        whole = self._last
        if whole is None or whole.layer != layer:
            whole = self.recipe(layer)
        at = {e: i for i, e in enumerate(whole.experts)}
        held = whole.experts if experts is None else tuple(experts)
        recipe = replace(whole, experts=held, pieces=tuple(whole.pieces[at[e]] for e in held))
        return load_on(recipe, device) or assemble(recipe).to(device)

    def _recipe_of(self, layer: int, experts: Sequence[int] | None) -> LayerRecipe:
        """The recipe of these experts.  What holds for the whole layer is found once."""
        facts = self._facts.get(layer)
        if facts is None:
            recipe = self.recipe(layer)
            if experts is None:
                return recipe
            facts = self._facts[layer]
        held = range(facts.num_experts) if experts is None else experts
        for e in held:
            if not 0 <= e < facts.num_experts:
                raise KeyError(f"expert {e} of layer {layer}: it has experts 0 to {facts.num_experts - 1}")
        return experts_recipe(facts, self._model, self.quant, self._tensors[layer], held)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the configuration, of names, dtypes and shapes of the expert tensors, and of the first bytes of
        two large tensors of each layer.  Not of file names: the same model in other shards is the same model."""
        digest = hashlib.sha256()
        config = {k: v for k, v in self._model.raw.items() if k not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        for layer in self._tensors.values():
            found = sorted(_all_tensors(layer), key=lambda t: t.name)
            for t in found:
                digest.update(f"{t.name} {t.dtype} {t.shape}\n".encode())
            largest = max(t.nbytes for t in found)
            big = [t for t in found if t.nbytes == largest]
            digest.update(big[0].head(_SAMPLE_BYTES) + big[-1].head(_SAMPLE_BYTES))
        return digest.hexdigest()

    def expert_bytes(self, layer: int, experts: Sequence[int] | None = None) -> int:
        """Bytes on disk of what load(layer, experts) has to read."""
        return sum(t.nbytes for t in self.needed(layer, experts))

    def needed(self, layer: int, experts: Sequence[int] | None = None) -> list[Stored]:
        """The tensors, or cuts of tensors, that load(layer, experts) has to read."""
        pieces = self._recipe_of(layer, experts).pieces
        found = {(t.file, t.offset): t for one in pieces for p in one.values() for t in p.unit.needed()}
        return list(found.values())

    def _describe(self, recipe: LayerRecipe) -> LayerInfo:
        return LayerInfo(
            recipe.layer,
            recipe.num_experts,
            recipe.top_k,
            recipe.hidden_size,
            recipe.intermediate_size,
            recipe.w13.scheme,
            recipe.w2.scheme,
            recipe.activation,
            bias=recipe.w13.bias or recipe.w2.bias,
            act_order=recipe.w13.columns or recipe.w2.columns,
            checkpoint_activation=recipe.checkpoint_activation,
            static_scales=recipe.input_scale,
            notes=(*recipe.notes, *self._notes),
        )

    def _general_notes(self, beyond: list[int]) -> list[str]:
        notes = [f"left alone: attention, norms, {self._model.family.left_alone}"]
        if beyond:
            notes.append(f"left alone: experts of layers {_ranges(beyond)}, beyond the model's own (token prediction)")
        expected = self._model.sparse_layers()
        missing = sorted(set(expected or ()) - set(self._tensors))
        if missing:
            notes.append(f"config.json says that layers {_ranges(missing)} have experts too: they are not in the files")
        return notes


def _all_tensors(layer: LayerTensors) -> list[Stored]:
    apart = [t for expert in layer.apart.values() for found in expert.values() for t in found.values()]
    return apart + [t for found in layer.fused.values() for t in found.values()]


def _ranges(numbers: Sequence[int]) -> str:
    """ "3-60" or "1, 3, 5-7".  Here and not expertd.common.ranges: the kernels do not import the contract."""
    out: list[list[int]] = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
