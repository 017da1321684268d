"""The configuration of compressed-tensors: which config group a unit belongs to, and what it says of activations.

Groups are chosen by what lies in the file.  A group whose bits, strategy and sizes contradict the tensors is no
candidate; targets decide only between candidates that would read the tensors differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertd_kernels.checkpoint.patterns import matches
from expertd_kernels.checkpoint.readers.protocol import Unit
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant

__all__ = ["Group", "activation_of", "group_for", "refuse_transforms", "refuse_zero_points"]


@dataclass(frozen=True)
class Group:
    """One config group, as far as a reader needs it.

    bits, kind ("int", "float"), strategy ("tensor", "channel", "group", "tensor_group", "block"), group_size and block
    (rows, cols) of the weights; activations: the input_activations object or None; ordered: columns are permuted
    (actorder), so that `weight_g_idx` must be there
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
    ordered: bool = False

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


_KNOWN: Mapping[str, tuple[object, ...]] = {
    "type": ("int", "float", None),
    "strategy": ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head", None),
    "symmetric": (True, False),
    "dynamic": (True, False, "local"),
    "actorder": ("group", "dynamic", "weight", "static", True, False, None),
}
"""Values of compressed-tensors' keys."""


def _arguments(unit: Unit, group: str, what: str, raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """ "weights" or "input_activations" of a group; None where it has none.  Values that nobody defined are an error:
    what they meant is not known."""
    found = raw.get(what)
    where = f"quantization_config.config_groups.{group}.{what}"
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise unit.error(f"{where} is {found!r:.80}", "an object, or null")
    for key, known in _KNOWN.items():
        value = found.get(key, known[0])
        value = value.lower() if isinstance(value, str) else value
        if not any(value is k or (isinstance(k, str) and value == k) for k in known):
            raise unit.error(f"{where}.{key} is {value!r:.80}", f"one of {', '.join(map(str, known))}")
    for key, least in (("num_bits", 1), ("group_size", -1)):
        value = found.get(key)
        if value is not None and ((number := _integer(value, None)) is None or number < least or number == 0):
            raise unit.error(f"{where}.{key} is {value!r:.80}", "a number of at least 1" + " or -1" * (least < 0))
    return found


def _group(unit: Unit, name: str, raw: Mapping[str, Any]) -> Group | None:
    """A group that quantizes weights; None for one that does not."""
    w = _arguments(unit, name, "weights", raw)
    if w is None:
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
    targets = raw.get("targets")
    return Group(
        name,
        _integer(w.get("num_bits"), 8) or 8,
        str(w.get("type", "int")).lower(),
        str(strategy).lower(),
        size if size is not None and size > 0 else None,
        pair,
        bool(w.get("symmetric", True)),
        _arguments(unit, name, "input_activations", raw),
        tuple(t for t in targets if isinstance(t, str)) if isinstance(targets, list) else (),
        w.get("actorder") in ("group", "dynamic", True),
    )


def _targets(group: Group, name: str) -> int:
    """How closely the group's targets name the module: 2 = by name or regex, 1 = by class, 0 = not at all."""
    best = 0
    for target in group.targets:
        if target.startswith("re:"):
            best = max(best, 2 if matches(target[3:], name, f"quantization_config.config_groups.{group.name}") else 0)
        elif target == name:
            best = 2
        elif target == "Linear":
            best = max(best, 1)
    return best


def group_for(unit: Unit, fits: Callable[[Group], str | None]) -> Group:
    """The group that the unit's tensors belong to.

    fits: why a group contradicts the tensors, or None.  CheckpointError where every group does, and where several fit
    that would read the tensors differently and the targets do not decide.
    """
    raw = unit.quant.get("config_groups")
    if unit.quant.get("quant_method") == "auto-round" and raw is None:
        groups = [_autoround_group(unit)]
    elif isinstance(raw, Mapping) and raw:
        groups = [g for name, r in raw.items() if isinstance(r, Mapping) and (g := _group(unit, str(name), r))]
    else:
        raise unit.error(f"config_groups of the quantization config is {raw!r:.80}", "an object with one group or more")
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


def _autoround_group(unit: Unit) -> Group:
    """The group that auto-round's keys mean: bits, group_size, data_type and sym, and the same of act_."""
    size, bits = _autoround_number(unit, "group_size", -1), _autoround_number(unit, "bits", 4)
    strategy = "group" if size > 0 else "channel"
    kind, symmetric = _autoround_kind(unit, ""), not unit.has("weight_zero_point")
    return Group(
        "auto-round", bits, kind, strategy, max(size, 0) or None, None, symmetric, _autoround_activations(unit), ()
    )


def _autoround_kind(unit: Unit, prefix: str) -> str:
    """ "float" for mx_fp, nv_fp and fp8, "int" for int."""
    key = f"{prefix}data_type"
    kind = unit.setting(key, "int")
    if not isinstance(kind, str) or not ("fp" in kind or "int" in kind or kind == "float"):
        raise unit.error(f"{key} is {kind!r:.80} in the quantization config", "one of int, fp8, mx_fp, nv_fp")
    return "int" if "int" in kind else "float"


def _autoround_number(unit: Unit, key: str, default: int) -> int:
    value = unit.setting(key, default)
    number = _integer(value, None)
    if number is None or (number < 1 and number != -1):
        raise unit.error(f"{key} is {value!r:.80} in the quantization config", "a number of at least 1, or -1")
    return number


def _autoround_activations(unit: Unit) -> Mapping[str, Any] | None:
    """act_bits and so on as compressed-tensors' input_activations; None where activations are not rounded."""
    bits = _autoround_number(unit, "act_bits", 16)
    if bits >= 16:
        return None
    size = unit.setting("act_group_size", -1)
    size = size if size == 0 else _autoround_number(unit, "act_group_size", -1)  # 0: the whole tensor
    return {
        "num_bits": bits,
        "type": _autoround_kind(unit, "act_"),
        "strategy": "group" if size > 0 else "token" if size < 0 else "tensor",
        "group_size": size,
        "dynamic": unit.flag("act_dynamic", True),
        "symmetric": unit.flag("act_sym", True),
    }


def activation_of(group: Group) -> tuple[ActivationQuant, tuple[str, ...]]:
    """(how the group wants activations rounded, notes).  A way that no kernel here knows is NONE and a note."""
    a = group.activations
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
