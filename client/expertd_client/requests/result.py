"""From an answer on the wire to what the caller gets."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from expertd.codec import ForwardResponseView, RawAnswer
from expertd.errors import BadResponseError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request
from expertd_client.requests.tensors import array_of, device_of, from_wire

__all__ = ["FIRST_VERSION", "ForwardResult", "require_version", "result_of"]

FIRST_VERSION = 1
"""Number of the weights that a server is started with, also of one that knows of no versions."""


class ForwardResult:
    """The answer to one forward; the caller's own: `answer.output += shared_experts(x)` is fine.

    output            [M, H] in the dtype that was asked for (e4m3: as E4m3), of the kind (numpy or torch, device) of
                      hidden_states: the sum over the routes that this server computed, times their weights; None where
                      a digest was asked for, and after release()
    digest            sum, sum of squares and CRC-32 of the output, where asked for
    routes_computed   over all servers these add up to M * top_k less the -1s
    timing            nanoseconds of the server's stages, and the batch that this request was part of
    load              the server's load when it answered
    placement_epoch   reserved: 0 from today's servers
    weights_version   number of the version of the weights that computed it; 0 = the server does not say

    Some transports lend the memory of `output`.  It goes back by itself when nothing refers to it any more; who keeps
    answers for long, or waits for the next one at once, gives it back earlier:

        with experts.forward(...) as answer:
            total += answer.output
    """

    __slots__ = (
        "_give_back",
        "_timing",
        "digest",
        "lazy_load",
        "output",
        "placement_epoch",
        "routes_computed",
        "weights_version",
    )
    output: Any

    def __init__(
        self,
        output: Any,
        digest: pb.Digest | None,
        routes_computed: int,
        timing: pb.Timing | Callable[[], pb.Timing],
        load: pb.Load | Callable[[], pb.Load],
        placement_epoch: int = 0,
        give_back: Callable[[], None] | None = None,
        weights_version: int = 0,
    ) -> None:
        """timing, load: they, or what makes them when somebody asks."""
        self.output, self.digest, self.routes_computed = output, digest, routes_computed
        self._timing, self.lazy_load, self.placement_epoch = timing, load, placement_epoch
        self._give_back, self.weights_version = give_back, weights_version

    @property
    def timing(self) -> pb.Timing:
        if not isinstance(self._timing, pb.Timing):
            self._timing = self._timing()
        return self._timing

    @property
    def load(self) -> pb.Load:
        if not isinstance(self.lazy_load, pb.Load):
            self.lazy_load = self.lazy_load()
        return self.lazy_load

    def __repr__(self) -> str:
        shape = None if self.output is None else tuple(self.output.shape)
        return f"ForwardResult(output {shape}, routes_computed {self.routes_computed})"

    def release(self) -> None:
        """Gives the memory of `output` back; arrays made from it must not be read any more.  Again: nothing happens."""
        self.output = None
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> ForwardResult:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def require_version(got: int, request: Request) -> None:
    """Raises BadResponseError where an answer is not of the version that the request asks for: a server that knows of
    no versions overlooks that."""
    if request.weights_version and (got or FIRST_VERSION) != request.weights_version:
        raise BadResponseError.about(
            "answer: weights_version",
            got=got or "none",
            want=f"{request.weights_version}, as the request asks for",
            remedy="the server may be too old to know of versions",
        )


def result_of(answer: ForwardResponseView | RawAnswer, request: Request) -> ForwardResult:
    """The answer for the caller.  Raises BadResponseError where it does not fit the request; what it was lent is then
    given back."""
    try:
        require_version(answer.weights_version, request)
    except BadResponseError:
        if isinstance(answer, ForwardResponseView) and answer.give_back is not None:
            answer.give_back()
        raise
    if isinstance(answer, RawAnswer):
        x, report = request.hidden_states, answer.report
        if (
            type(x) is np.ndarray
            and answer.shape == x.shape
            and answer.dtype == request.dtypes[0]
            and not request.digest
        ):
            output = array_of(answer.message, answer.begin, answer.end, answer.dtype, answer.shape)
            if output is not None:
                return ForwardResult(
                    output,
                    None,
                    answer.routes_computed,
                    report.timing,
                    report.load,
                    weights_version=answer.weights_version,
                )
        answer = answer.view()
    give_back = answer.give_back
    try:
        output = _output(answer, request)
    except BadResponseError:
        if give_back is not None:
            give_back()
        raise
    if give_back is not None and (output is None or _on_a_device(output)):
        give_back()  # nothing reads it any more
        give_back = None
    return ForwardResult(
        output,
        answer.digest,
        answer.routes_computed,
        answer.timing or pb.Timing(),
        answer.load or pb.Load(),
        answer.placement_epoch,
        give_back,
        answer.weights_version,
    )


def _output(answer: ForwardResponseView, request: Request) -> Any:
    output, digest = answer.output, request.digest
    if (answer.digest is not None) != digest or (output is None) != digest:
        got = f"output {output is not None}, digest {answer.digest is not None}"
        raise BadResponseError.about("answer", got=got, want="a digest" if digest else "an output tensor")
    if output is None:
        return None
    x = request.hidden_states
    return from_wire(output, tuple(x.shape), request.dtypes[0], device_of(x))


def _on_a_device(x: Any) -> bool:
    device = device_of(x)
    return device is not None and device.type != "cpu"
