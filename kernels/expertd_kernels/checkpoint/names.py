"""From tensor names to layers, experts and projections.

A template says where experts are: "model.layers.{layer}.mlp.experts.{expert}.{proj}".  Families give theirs by the
table; a user may give one: `{proj}` stands for gate_proj, up_proj, down_proj (or w1, w3, w2, or gate, up, down), and
`{proj:fc1,fc3,fc2}` names gate, up and down; without `{expert}` the tensors are fused, [E, ...].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.families import Family
from expertd_kernels.checkpoint.tensors import Stored

__all__ = ["LayerTensors", "Naming", "Place", "family_naming", "group_by_layer", "place_of", "template_naming"]

_OTHER_PARTS = frozenset({"mtp", "nextn", "talker", "visual", "vision", "vision_tower", "vision_model", "draft"})
"""Parts of a name before `layers` that mean another network than the language model."""


@dataclass(frozen=True)
class Naming:
    """Two patterns with the groups layer, proj, suffix (and expert in the first), and what each proj stands for."""

    apart: re.Pattern[str] | None
    fused: re.Pattern[str] | None
    projections: Mapping[str, str]
    fused_projections: Mapping[str, str]
    template: str


@dataclass
class LayerTensors:
    """One layer's expert tensors.

    prefix  "model.layers.1.mlp.experts"
    apart   expert -> projection -> suffix -> tensor; names: (expert, projection) -> module name
    fused   projection -> suffix -> tensor [E, ...]; fused_names: projection -> its name below the prefix
    """

    layer: int
    prefix: str
    apart: dict[int, dict[str, dict[str, Stored]]] = field(default_factory=dict)
    names: dict[tuple[int, str], str] = field(default_factory=dict)
    fused: dict[str, dict[str, Stored]] = field(default_factory=dict)
    fused_names: dict[str, str] = field(default_factory=dict)


def _projections(names: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    out: dict[str, str] = {}
    for triple in names:
        for name, projection in zip(triple, ("gate", "up", "down"), strict=True):
            if name:
                out.setdefault(name, projection)
    return out


def _alternatives(names: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))


def family_naming(family: Family) -> Naming:
    """The patterns of a row of the family table, below any prefix that ends in "layers."."""
    projections = _projections(family.names)
    fused = {name: p for pair in family.fused for name, p in zip(pair, ("gate_up", "down"), strict=True)}
    if not any(gate for gate, _, _ in family.names):
        fused = {name: "up" if p == "gate_up" else p for name, p in fused.items()}
    blocks = _alternatives(family.blocks)
    head = rf"(?P<prefix>(?:[^.]+\.)*?layers\.(?P<layer>\d{{1,6}})\.(?:{blocks}))"
    template = f"...layers.{{layer}}.{' or '.join(family.blocks)}.{{expert}}.{{{','.join(projections)}}}"
    return Naming(
        re.compile(rf"{head}\.(?P<expert>\d{{1,6}})\.(?P<proj>{_alternatives(projections)})\.(?P<suffix>.+)"),
        re.compile(rf"{head}\.(?P<proj>{_alternatives(fused)})(?:[._](?P<suffix>.+))?"),
        projections,
        fused,
        template,
    )


def template_naming(template: str, family: Family) -> Naming:
    """The patterns of a user's template."""
    proj = re.search(r"\{proj(?::([^{}]*))?\}", template)
    if proj is None or template.count("{layer}") != 1 or template.count("{expert}") > 1:
        raise CheckpointError(
            f"layer template {template!r}: want one {{layer}}, at most one {{expert}} and {{proj}}, as"
            ' "model.layers.{layer}.mlp.experts.{expert}.{proj}"'
        )
    names = [n.strip() for n in proj[1].split(",")] if proj[1] else []
    apart = "{expert}" in template
    wanted = {2: ("up", "down"), 3: ("gate", "up", "down")} if apart else {2: ("gate_up", "down")}
    if names and len(names) not in wanted:
        raise CheckpointError(f"layer template {template!r}: {len(names)} names of projections, want {list(wanted)}")
    if names:
        projections = dict(zip(names, wanted[len(names)], strict=True))
    elif apart:
        projections = _projections(family.names)
    else:
        projections = {n: p for pair in family.fused for n, p in zip(pair, ("gate_up", "down"), strict=True)}
    pattern = re.escape(template)
    pattern = pattern.replace(r"\{layer\}", r"(?P<layer>\d{1,6})").replace(r"\{expert\}", r"(?P<expert>\d{1,6})")
    pattern = re.sub(r"\\\{proj.*?\\\}", lambda _: f"(?P<proj>{_alternatives(projections)})", pattern)
    head = pattern.partition("(?P<expert>" if apart else "(?P<proj>")[0]
    prefix = head.removesuffix(r"\.")
    pattern = f"(?P<prefix>{prefix})" + pattern[len(prefix) :]
    if apart:
        return Naming(re.compile(pattern + r"\.(?P<suffix>.+)"), None, projections, {}, template)
    return Naming(None, re.compile(pattern + r"(?:[._](?P<suffix>.+))?"), {}, projections, template)


@dataclass(frozen=True)
class Place:
    """What a tensor's name says.

    expert  None: a fused tensor, [E, ...]
    proj    what the name calls the projection; projection: "gate", "up", "down" or "gate_up"
    module  the name without the suffix; prefix: the name before the expert
    """

    layer: int
    expert: int | None
    projection: str
    suffix: str
    proj: str
    module: str
    prefix: str


def place_of(name: str, naming: Naming) -> Place | None:
    """None: it is no expert's tensor."""
    m = naming.apart.fullmatch(name) if naming.apart else None
    fused = None if m or naming.fused is None else naming.fused.fullmatch(name)
    hit = m or fused
    if hit is None or not _OTHER_PARTS.isdisjoint(hit["prefix"].split(".")):
        return None
    suffix, proj, layer = hit["suffix"] or "", hit["proj"], int(hit["layer"])
    if m is not None:
        module = name[: m.start("suffix") - 1]
        return Place(layer, int(m["expert"]), naming.projections[proj], suffix, proj, module, m["prefix"])
    module = f"{hit['prefix']}.{proj}"
    return Place(layer, None, naming.fused_projections[proj], suffix, proj, module, hit["prefix"])


def group_by_layer(tensors: Mapping[str, Stored], naming: Naming) -> dict[int, LayerTensors]:
    """Every expert tensor, by layer.  CheckpointError if two parts of the model, or two names, claim one place."""
    layers: dict[int, LayerTensors] = {}
    for name, t in tensors.items():
        at = place_of(name, naming)
        if at is None:
            continue
        layer = layers.setdefault(at.layer, LayerTensors(at.layer, at.prefix))
        if at.expert is not None:
            layer.names.setdefault((at.expert, at.projection), at.module)
            place = layer.apart.setdefault(at.expert, {}).setdefault(at.projection, {})
        else:
            layer.fused_names.setdefault(at.projection, at.proj)
            place = layer.fused.setdefault(at.projection, {})
        if at.suffix in place:
            raise CheckpointError(
                f"{name} and {place[at.suffix].name}: two tensors for one place; say with --layer-template which it is"
            )
        place[at.suffix] = t
    return layers
