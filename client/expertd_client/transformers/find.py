"""Which modules of a transformers model are the routed experts of which layer.  Pure: looks, changes nothing.

transformers marks the classes of experts by what its decorator `use_experts_implementation` leaves on each module
(has_gate, is_transposed, ...), and hangs each of them under the name `experts`.
"""

from __future__ import annotations

import torch

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.served import Found
from expertd_client.engines.torch_experts import RemoteExperts

__all__ = ["find_experts"]

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


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
    if not found and any(isinstance(module, RemoteExperts) for module in model.modules()):
        raise UnsupportedCombinationError.about(
            type(model).__name__,
            got="experts that servers compute already",
            want="a model's own",
            remedy="detach(model) before it is attached to others",
        )
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
