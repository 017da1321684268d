"""Which modules of a transformers model are the routed experts of which layer.  Pure: looks, changes nothing.

transformers marks the classes of experts by what its decorator `use_experts_implementation` leaves on each module
(has_gate, is_transposed, ...), and hangs each of them under the name `experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from expertd.errors import PlacementError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["Found", "find_experts", "misfits"]

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclass(frozen=True)
class Found:
    """name: of the module in the model; layer: its index; experts and sizes: as its weights say."""

    name: str
    layer: int
    experts: int
    hidden_size: int
    intermediate_size: int


def find_experts(model: torch.nn.Module) -> dict[int, Found]:
    """By layer.  Raises UnsupportedCombinationError where there are none, where two modules stand for one layer, and
    where a server would compute something else than the module does."""
    found: dict[int, Found] = {}
    for name, module in model.named_modules():
        if not (name == "experts" or name.endswith(".experts")) or not all(hasattr(module, m) for m in _MARKS):
            continue
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedCombinationError.about(
                name, got="experts with a norm behind them", want="experts that end with their second matrix"
            )
        one = _measured(name, module)
        if one.layer in found:
            raise UnsupportedCombinationError.about(
                f"layer {one.layer}",
                got=f"two modules: {found[one.layer].name} and {name}",
                want="one language model",
                remedy="attach the part of the model that the checkpoint's layers are of",
            )
        found[one.layer] = one
    if not found:
        raise UnsupportedCombinationError.about(
            type(model).__name__,
            got="no experts that transformers' experts interface knows",
            want="modules named `experts` whose class has the decorator use_experts_implementation",
        )
    return found


def _measured(name: str, module: torch.nn.Module) -> Found:
    layer = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)
    if layer is None:
        raise UnsupportedCombinationError.about(name, got="no number in its name", want="the index of its layer")
    experts, *sizes = module.get_parameter("down_proj").shape
    hidden, intermediate = sizes[::-1] if module.is_transposed else sizes
    return Found(name, layer, experts, hidden, intermediate)


def misfits(found: Iterable[Found], described: pb.DescribeResponse, target: str) -> None:
    """Raises PlacementError where a server cannot be the experts of this model: what it says against what they are."""
    served: Mapping[int, pb.Layer] = {layer.layer: layer for layer in described.layers}
    for one in found:
        layer = served.get(one.layer)
        if layer is None:
            got = f"a server of layers {', '.join(map(str, served)) or 'none'}"
            raise PlacementError.about(f"{target}: layer {one.layer}", got=got, want=f"the experts of {one.name}")
        held = sum(span.count for span in layer.held)
        theirs = (layer.num_experts, described.model.hidden_size, layer.intermediate_size)
        ours = (one.experts, one.hidden_size, one.intermediate_size)
        if theirs != ours or held != one.experts:
            raise PlacementError.about(
                f"{target}: layer {one.layer}",
                got="{} experts ({} held), hidden size {}, intermediate size {}".format(theirs[0], held, *theirs[1:]),
                want="{} experts, all held, hidden size {}, intermediate size {} as in {}".format(*ours, one.name),
                remedy="name the servers of this model, together all of its experts" if theirs == ours else "",
            )
