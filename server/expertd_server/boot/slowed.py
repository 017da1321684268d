"""Experts that take longer than they need: a slow machine for tests of what lies around it."""

from __future__ import annotations

import ctypes as C
import time

from torch import Tensor

from expertd_kernels.common.protocol import Direct, DirectExperts, Experts

__all__ = ["SlowedExperts", "slowed"]

_CALL = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_void_p, C.c_void_p)


class _Sizes(C.Structure):
    """The beginning of engine/csrc/core.h: Call."""

    _fields_ = [
        *((name, C.c_void_p) for name in ("x", "slots", "weights", "out")),
        *((name, C.c_int64) for name in ("m", "x_stride")),
        ("top_k", C.c_int32),
    ]


class SlowedExperts:
    """`experts`, and `route_s` more for each token of an expert."""

    def __init__(self, experts: Experts, route_s: float) -> None:
        self._experts, self._route_s = experts, route_s
        self.backend = experts.backend

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Experts.__call__."""
        y = self._experts(hidden_states, topk_ids, topk_weights, router_weight_on_input=router_weight_on_input, out=out)
        time.sleep(self._route_s * int((topk_ids >= 0).sum()))
        return y


class _Direct(SlowedExperts):
    """The same, called without Python's protocol, so that parts of a layer compute at the same time."""

    def __init__(self, experts: Experts, route_s: float) -> None:
        super().__init__(experts, route_s)
        assert isinstance(experts, DirectExperts)
        inner = experts.direct()
        compute = _CALL(inner.function)

        def call(context: int, of: int, address: int) -> int:
            error = compute(context, of, address)
            sizes = _Sizes.from_address(address)
            slots = (C.c_int32 * (sizes.m * sizes.top_k)).from_address(sizes.slots)
            time.sleep(route_s * sum(slot >= 0 for slot in slots))
            return int(error)

        self._call = _CALL(call)
        function = C.cast(self._call, C.c_void_p).value
        assert function is not None
        self._way = Direct(function, inner.context, inner.experts)

    def direct(self) -> Direct:
        """See protocol.DirectExperts."""
        return self._way


def slowed(experts: Experts, route_s: float, *, beside_others: bool = False) -> Experts:
    """`experts`, each token of an expert taking so much longer.  beside_others: they are a part of a layer, and compute
    while the other parts do."""
    direct = beside_others and isinstance(experts, DirectExperts)
    return (_Direct if direct else SlowedExperts)(experts, route_s)
