"""Experts of a transformers model, which holds them fused, as the tensors of a checkpoint that has them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from expertd.errors import UnsupportedCombinationError

__all__ = ["expert_tensors"]


def expert_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) for Update.put_all(): of each module `experts` with gate_up_proj [E, 2I, H] and down_proj
    [E, H, I], as transformers 5 makes them, its name and `.0.gate_proj.weight` [I, H], up_proj [I, H], down_proj
    [H, I], and so on.  Views: nothing is copied.

    Other tensors of the model are left out.  Raises UnsupportedCombinationError where there are no such modules, or
    one has another layout: with a bias, transposed, or gate and up rows in turns."""
    found = False
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and hasattr(module, "gate_up_proj"):
            found = True
            yield from _apart(name, module)
    if not found:
        raise UnsupportedCombinationError.about(
            type(model).__name__, got="no module `experts` with gate_up_proj", want="experts as transformers 5 has them"
        )


def _apart(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    gate_up, down = module.gate_up_proj, module.down_proj
    E, H, I = down.shape
    other = getattr(module, "has_bias", False) or getattr(module, "is_transposed", False)
    if other or not getattr(module, "is_concatenated", True) or tuple(gate_up.shape) != (E, 2 * I, H):
        raise UnsupportedCombinationError.about(
            name,
            got=f"gate_up_proj {list(gate_up.shape)} and down_proj {list(down.shape)} of another layout",
            want="[E, 2I, H] and [E, H, I], gate before up, without a bias",
            remedy="save_pretrained() and Updater.from_checkpoint()",
        )
    for e in range(E):
        yield f"{name}.{e}.gate_proj.weight", gate_up[e, :I]
        yield f"{name}.{e}.up_proj.weight", gate_up[e, I:]
        yield f"{name}.{e}.down_proj.weight", down[e]
