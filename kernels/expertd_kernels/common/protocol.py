"""What every backend module offers.  Three functions of values, so that caching, the self-check, the round-trip
test and reloading are written once for all of them:

    pack(weights, problem)    -> Packed    canonical -> this backend's layout.  builder.pack has asked the table's rules
                                           before: what they refuse is asserted here.  Refused for values that no rule
                                           can know
    unpack(packed)            -> Weights   the exact inverse, bit for bit
    experts(packed, problem)  -> Experts   ready to compute; packs nothing, so that a cached Packed can be mapped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from expertd_kernels.common.problem import Problem
from expertd_kernels.weights.canonical import Weights

__all__ = [
    "BackendModule",
    "Direct",
    "DirectExperts",
    "E4m3Experts",
    "Experts",
    "ExpertsLostError",
    "Packed",
    "takes_e4m3",
]


class ExpertsLostError(Exception):
    """Experts whose weights are no longer what was checked: they will not compute again in this process, and the batch
    has no answer.  The text says what happened to them."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A layer in a backend's layout.

    tensors  by name, contiguous, any device
    meta     JSON-able facts that unpack and experts need: logical sizes, schemes, activation, layout version
    """

    backend: str
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Experts(Protocol):
    """A layer's experts, ready to compute.  Calls may come from one thread at a time."""

    backend: str

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [M, H] bf16 (or f32 where the backend computes in f32); topk_ids [M, k] int32 slots, -1 = not
        here; topk_weights [M, k] f32.  Returns out [M, H] in hidden_states' dtype: every element written, rows
        without a route zero; other memory than hidden_states', unless the row of the table says `in_place`.  Rows
        already grouped by expert are the case k = 1 with weights 1.  Raises ExpertsLostError where the weights are
        gone."""
        ...


@runtime_checkable
class E4m3Experts(Protocol):
    """Experts that may be able to compute from hidden states that are e4m3 with a scale for 128 columns already.

    takes_e4m3  whether these can: they would round their inputs so themselves (ActivationQuant.E4M3_GROUP128)"""

    takes_e4m3: bool

    def of_e4m3(
        self,
        codes: Tensor,
        scales: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor,
    ) -> Tensor:
        """As Experts.__call__ of codes * scales, taken as they are: codes [M, H] e4m3, scales [M, H / 128] f32, both
        contiguous, their first elements at multiples of 16 bytes; out [M, H] bf16, other memory.  Of rows that were
        rounded by the backend's own rule (gather/rounding.py) the bits of Experts.__call__."""
        ...


def takes_e4m3(experts: Experts) -> bool:
    """Whether `experts` compute from e4m3 with a scale for 128 columns, by of_e4m3()."""
    return isinstance(experts, E4m3Experts) and experts.takes_e4m3


class Direct(NamedTuple):
    """Addresses of what a server calls without Python: function(context, experts, call), where call is expertd_call of
    native/csrc/abi.h; 0 = computed.  Valid as long as the experts are."""

    function: int
    context: int
    experts: int


@runtime_checkable
class DirectExperts(Protocol):
    """Experts that can also be called so, by the one thread that calls them, with sizes and slots that are checked."""

    def direct(self) -> Direct:
        """For hidden states and outputs of the problem's compute dtype, bf16 or f32."""
        ...


@runtime_checkable
class CompiledExperts(Protocol):
    """Experts whose kernels compile at the first call of each size, and can be compiled before, side by side."""

    def compile_ahead(self, sizes: Iterable[tuple[int, int]], threads: int, on_input: bool = False) -> None:
        """For calls of these (tokens, routes a token), in so many threads; what is on disk is only loaded.
        on_input: with the router weight on the input."""
        ...


class BackendModule(Protocol):
    """The shape of a module in backends/."""

    def pack(self, weights: Weights, problem: Problem) -> Packed: ...

    def unpack(self, packed: Packed) -> Weights: ...

    def experts(self, packed: Packed, problem: Problem) -> Experts: ...
