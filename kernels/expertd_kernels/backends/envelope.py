"""What the packed layers of backends have in common: two matrices packed alike, and the facts beside them.

tensors   "w13.NAME", "w2.NAME" for whatever packing a matrix gave; "input_scales" where the checkpoint has them
meta      layout_version, activation, checkpoint_activation, "w13" and "w2" (each matrix's own), and what is given
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from expertd_kernels.common.protocol import Packed
from expertd_kernels.common.refused import Refused
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.serial import (
    activation_from_json,
    matrix_tensors,
    weights_from_tensors,
    weights_to_tensors,
)

__all__ = ["activation_of", "fields", "pack_layer", "require_version", "unpack_layer"]


def pack_layer(
    backend: str,
    version: int,
    weights: Weights,
    pack_matrix: Callable[[str, QuantTensor], tuple[Mapping[str, Tensor], Mapping[str, Any]]],
    **facts: Any,
) -> Packed:
    """Pack w13, then w2.  pack_matrix("w13" or "w2", canonical) -> (tensors by name, JSON-able facts)."""
    tensors, meta = weights_to_tensors(weights, pack_matrix)
    return Packed(backend, tensors, {"layout_version": version, **facts, **meta})


def fields(packed: Packed, name: str) -> dict[str, Tensor]:
    """The tensors of one matrix, by the names that pack_matrix gave."""
    return matrix_tensors(packed.tensors, name)


def unpack_layer(packed: Packed, unpack_matrix: Callable[[dict[str, Tensor], Any], QuantTensor]) -> Weights:
    """The inverse of pack_layer.  unpack_matrix(tensors by name, the matrix's facts) -> canonical."""
    return weights_from_tensors(packed.tensors, packed.meta, unpack_matrix)


def activation_of(packed: Packed) -> Activation:
    return activation_from_json(packed.meta["activation"])


def require_version(packed: Packed, version: int) -> None:
    """Raises Refused where `packed` has another layout."""
    got = packed.meta["layout_version"]
    if got != version:
        raise Refused(f"packed weights have layout version {got}, want {version}: pack them again")
