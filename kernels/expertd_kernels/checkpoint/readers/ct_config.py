"""The configuration of compressed-tensors: which config group a unit belongs to, and what it says of activations.

Groups are chosen by what lies in the file.  A group whose bits, strategy and sizes contradict the tensors is no
candidate; targets decide only between candidates that would read the tensors differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertd_kernels.checkpoint.readers.protocol import Unit
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant

__all__ = ["Group", "activation_of", "bare_group", "group_for", "refuse_transforms", "refuse_zero_points"]


@dataclass(frozen=True)
class Group:
    """One config group, as far as a reader needs it.

    bits, kind ("int", "float"), strategy ("tensor", "channel", "group", "tensor_group", "block"), group_size and block
    (rows, cols) of the weights; activations: the input_activations object or None
    """

    name: str
    bits: int
    kind: str
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    activations: Mapping[str, Any] | None
    targets: tuple[str, ...]

    @property
    def extent(self) -> tuple[int, int]:
        """(rows, cols) of weights that share a scale."""
        if self.strategy == "tensor":
            return WHOLE, WHOLE
        if self.strategy == "block" and self.block is not None:
            return self.block
        return 1, self.group_size or WHOLE

    def storage(self) -> tuple[object, ...]:
        """What decides how tensors are read; two groups that agree in it are interchangeable."""
        return self.bits, self.kind, self.strategy, self.group_size, self.block, _frozen(self.activations)


def _frozen(value: Any) -> object:
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), _frozen(v)) for k, v in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _integer(value: Any, default: int | None) -> int | None:
    """A number of the configuration; bits also stand there as [4] or "4"."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    return value if type(value) is int else default


def _group(name: str, raw: Mapping[str, Any]) -> Group | None:
    """A group that quantizes weights; None for one that does not."""
    w = raw.get("weights")
    if not isinstance(w, Mapping):
        return None
    size = _integer(w.get("group_size"), None)
    strategy = w.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    block = w.get("block_structure")
    if isinstance(block, str):
        block = [int(x) if x.isdigit() else 0 for x in block.split("x")]
    pair = None
    if isinstance(block, list) and len(block) == 2 and all(type(x) is int and x > 0 for x in block):
        pair = (block[0], block[1])
    act = raw.get("input_activations")
    targets = raw.get("targets")
    return Group(
        name,
        _integer(w.get("num_bits"), 8) or 8,
        str(w.get("type", "int")).lower(),
        str(strategy).lower(),
        size if size is not None and size > 0 else None,
        pair,
        bool(w.get("symmetric", True)),
        act if isinstance(act, Mapping) else None,
        tuple(t for t in targets if isinstance(t, str)) if isinstance(targets, list) else (),
    )


def _targets(group: Group, name: str) -> int:
    """How closely the group's targets name the module: 2 = by name or regex, 1 = by class, 0 = not at all."""
    best = 0
    for target in group.targets:
        if target.startswith("re:"):
            try:
                best = max(best, 2 if re.match(target[3:], name) else 0)
            except re.error:
                continue
        elif target == name:
            best = 2
        elif target == "Linear":
            best = max(best, 1)
    return best


def group_for(unit: Unit, fits: Callable[[Group], str | None]) -> Group | None:
    """The group that the unit's tensors belong to; None if the configuration has no groups at all.

    fits: why a group contradicts the tensors, or None.  CheckpointError where every group does, and where several fit
    that would read the tensors differently and the targets do not decide.
    """
    raw = unit.quant.get("config_groups")
    if not isinstance(raw, Mapping) or not raw:
        return None
    groups = [g for name, r in raw.items() if isinstance(r, Mapping) and (g := _group(str(name), r)) is not None]
    reasons = {g.name: fits(g) for g in groups}
    left = [g for g in groups if reasons[g.name] is None]
    if not left:
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no group quantizes weights"
        raise unit.error("fits no config group", said)
    if len({g.storage() for g in left}) > 1:
        closest = max(_targets(g, unit.name) for g in left)
        left = [g for g in left if _targets(g, unit.name) == closest]
    if len({g.storage() for g in left}) > 1:
        raise unit.error(
            f"config groups {' and '.join(g.name for g in left)} fit alike", "targets that name one of them"
        )
    return left[0]


def bare_group(unit: Unit) -> Group:
    """The group that a configuration without config_groups means: `bits` and `group_size` at its top (auto-round)."""
    size = _integer(unit.setting("group_size"), -1) or -1
    strategy = "group" if size > 0 else "channel"
    bits = _integer(unit.setting("bits"), 4) or 4
    return Group("", bits, "int", strategy, max(size, 0) or None, None, not unit.has("weight_zero_point"), None, ())


def activation_of(group: Group | None) -> tuple[ActivationQuant, tuple[str, ...]]:
    """(how the group wants activations rounded, notes).  A way that no kernel here knows is NONE and a note."""
    a = None if group is None else group.activations
    if a is None:
        return ActivationQuant.NONE, ()
    bits, kind = _integer(a.get("num_bits"), 8), str(a.get("type", "int")).lower()
    strategy, size = str(a.get("strategy")).lower(), _integer(a.get("group_size"), None)
    dynamic, symmetric = bool(a.get("dynamic")), bool(a.get("symmetric", True))
    known = {
        (8, "float", "token"): ActivationQuant.E4M3_TOKEN,
        (8, "int", "token"): ActivationQuant.INT8_TOKEN,
        (8, "int", "group"): ActivationQuant.INT8_GROUP,
    }
    found = known.get((bits or 0, kind, strategy)) if dynamic and symmetric else None
    if symmetric and kind == "float":
        if bits == 8 and strategy == "tensor" and not dynamic:
            found = ActivationQuant.E4M3_TENSOR
        if bits == 8 and strategy == "group" and dynamic and size in (32, 128):
            found = ActivationQuant.MXFP8 if size == 32 else ActivationQuant.E4M3_GROUP128
        if bits == 4 and strategy in ("group", "tensor_group") and size in (16, 32):
            found = ActivationQuant.NVFP4 if size == 16 else ActivationQuant.MXFP4
    if found is not None:
        return found, ()
    how = f"{'dynamic' if dynamic else 'static'} {'' if symmetric else 'asymmetric '}{kind}{bits} for each {strategy}"
    return ActivationQuant.NONE, (f"the checkpoint asks for {how} activations, which are not computed: not rounded",)


def refuse_transforms(unit: Unit) -> None:
    """Rotations of the hidden states (transform_config) would have to be computed before the experts."""
    transforms = unit.quant.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise unit.error("the checkpoint has a transform_config: rotations of activations are not computed", "none")


def refuse_zero_points(unit: Unit, idle: bool) -> None:
    """Older versions wrote zero points for symmetric schemes, too: they must do nothing."""
    if not idle:
        raise unit.error("zero points, but the config group is symmetric", "none, or zeros", "weight_zero_point")
