"""What the caller of a cluster asks for: from his tensors to numpy arrays that can be split, and from their sum to the
array or tensor that he gets."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from expertd.common.dtypes import dtype_name
from expertd.errors import BadDtypeError, BadShapeError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.policy import OnMissing
from expertd_client.requests.request import Request
from expertd_client.requests.tensors import Synthetic, checked_dtype, device_of, from_host, numpy_dtype, on_host
from expertd_client.tracing import recorder

__all__ = ["Call"]


class Call:
    """One forward of a cluster.

    request      the caller's
    out          where he wants the answer; None = in new memory
    on_missing   what he wants where experts cannot be had
    f32_sums     partial sums travel in float32 whatever the answer's dtype

    traced       what is recorded of it; None = nothing is
    layer        of the request
    own_version  of the weights, that the caller asks for; 0 = he names none
    host         the same request with numpy arrays, once bring() was called
    """

    host: Request

    def __init__(self, request: Request, out: Any, on_missing: OnMissing, f32_sums: bool) -> None:
        tensors = (request.hidden_states, request.topk_ids, request.topk_weights)
        if request.digest or any(isinstance(x, Synthetic) for x in tensors):
            what = "a digest" if request.digest else "Synthetic"
            raise UnsupportedCombinationError(
                f"cluster: got {what}, want topk_ids with values and an output tensor; call its servers one by one"
            )
        request = request.ungrouped()  # rows are split by the servers of their experts, as tokens are
        if request.dtypes[0] == pb.DATA_TYPE_E4M3:
            raise UnsupportedCombinationError(
                "cluster: got output_dtype e4m3, want bf16, f16 or f32: partial sums would be rounded before they are"
                " added, and their sum again; a server answers in e4m3 when it is asked itself"
            )
        self.traced = (now := recorder.active) and now.call(request)
        self._dtype = numpy_dtype(request.dtypes[0])
        self._device = device_of(request.hidden_states)
        self._out = out
        self.on_missing = on_missing
        self.layer, self.own_version = request.layer, request.weights_version
        self._request, self._f32_sums = request, f32_sums
        if out is not None:
            _check_out(out, request)

    def bring(self, e4m3: bool, version: int = 0) -> None:
        """To the host; e4m3: the hidden states quantized before, where they are; version: of the weights, where the
        caller names none."""
        request = self._request.quantized() if e4m3 else self._request
        request = request.pinned(self._request.weights_version or version)
        tensors = (request.hidden_states, request.topk_ids, request.topk_weights)
        if self._f32_sums or not all(isinstance(x, np.ndarray) for x in tensors):
            sums = pb.DATA_TYPE_F32 if self._f32_sums else None
            request = request.with_tensors(on_host(tensors[0]), on_host(tensors[1]), on_host(tensors[2]), sums)
        self.host = request

    def lends(self, sums: np.dtype[Any]) -> bool:
        """Whether the caller may get the memory of the only partial sum, of that dtype."""
        return self._out is None and sums == self._dtype

    def lent(self, values: NDArray[Any]) -> tuple[Any, bool]:
        """His array or tensor over it, and whether it is that memory still, not a copy on a device."""
        return from_host(values, self._device), self._device is None or self._device.type == "cpu"

    def target(self) -> NDArray[Any]:
        """[M, H]: where the sum is to be written; then delivered()."""
        if self._direct:
            return cast("NDArray[Any]", on_host(self._out))
        return np.empty(self.host.hidden_states.shape, self._dtype)

    def delivered(self, target: NDArray[Any]) -> Any:
        """What the caller gets."""
        if self._direct:
            return self._out
        output = from_host(target, self._device)
        if self._out is not None:
            self._out.copy_(output)
            output = self._out
        return output

    @property
    def _direct(self) -> bool:
        """Whether the caller's `out` can be written to from here."""
        return self._out is not None and (device_of(self._out) is None or self._out.device.type == "cpu")


def _check_out(out: Any, request: Request) -> None:
    shape = tuple(request.hidden_states.shape)
    number = checked_dtype(out, "out", [dtype_name(request.dtypes[0])])
    if tuple(out.shape) != shape:
        raise BadShapeError.about("out", got=list(out.shape), want=f"that of hidden_states, {list(shape)}")
    if (device_of(out) is None) != (device_of(request.hidden_states) is None):
        raise BadDtypeError.about(
            "out",
            got=type(out).__name__,
            want=f"{dtype_name(number)} as {type(request.hidden_states).__name__}, as hidden_states are",
        )
