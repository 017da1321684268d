"""What the engine is asked and what it answers.  It sees requests, never transports: where bytes came from and where
the answer goes is known to `EngineRequest.reply` alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from expertd.common.dtypes import DTYPE_NUMBER, tensor_bytes

if TYPE_CHECKING:
    from expertd.errors import ExpertdError
    from expertd_server.engine.served import ServedLayer

# Why it is so: decision 83 in DECISIONS.md.
__all__ = ["Answer", "Array", "Operand", "Outcome", "Reply", "EngineRequest", "STORAGE", "Stages"]

Array = NDArray[Any]

STORAGE: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),  # numpy has no bfloat16: its bits
    "e4m3": np.dtype("u1"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
}
"""How the elements of each dtype on the wire are stored in a numpy array."""


class Operand(NamedTuple):
    """One tensor of a request: its dtype ("bf16", ...) and its elements, flat, in STORAGE[dtype]; often a view of the
    message it came in, so maybe unaligned and always read-only.  scales: of e4m3, f32 [M * scales_of_row(H)]."""

    dtype: str
    values: Array
    scales: Array | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


class Stages(NamedTuple):
    """Nanoseconds that a batch spent in each stage."""

    copy_in_ns: int
    kernel_ns: int
    copy_out_ns: int


class Answer(NamedTuple):
    """A computed request.

    output           [M, H] flat, STORAGE[output_dtype], e4m3 with its scales behind it (tensor_bytes): memory that is
                     valid only while `reply` runs (it is reused)
    digest           (sum, sum of squares, zlib CRC-32 of the output's bytes), when the request asked for one
    routes_computed  routes of this request that experts held here served
    weights_version  that computed it; 0 = its layer has none
    queue_ns         from its taking to the cut of its batch; encode_ns: for the output's conversion and digest
    """

    output: Array
    digest: tuple[float, float, int] | None
    routes_computed: int
    queue_ns: int
    encode_ns: int
    stages: Stages
    batch_tokens: int
    batch_requests: int
    backend: str
    weights_version: int = 0


Outcome = Union[Answer, "ExpertdError"]
Reply = Callable[["EngineRequest", Outcome], None]


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One layer, one batch of M tokens.

    layer        as it is held when the engine takes the request; it stays this one whatever is held later
    hidden       [M, H] float, or e4m3 with scales
    ids          [M, top_k] int, global expert ids, -1 = nobody's
    weights      [M, top_k] float; None = all ones (rows grouped by expert)
    reply        called exactly once for every request that the engine took: with an Answer on the engine's thread,
                 with an error on any.  It must not block; if it raises on an answer it is called with the error.  From
                 then on the engine does not read the operands: their memory may be used again.
    caller       who asks: a peer's address, or a name
    request_id   the caller's name for it, given back; 0 = none
    arrival_ns   time.monotonic_ns() when its message came; queued_ns: the same when the engine took it
    deadline_ns  on the same clock; 0 = none
    trace, transport  of expertd.common.trace_context, b"" = not traced; how it came, as RequestReport has it: the
                 engine does not look at them
    ready        of a message that the core answers: called instead of reply where it is computed, with the whole answer
    cancelled    set by whoever wants no answer any more: not computed unless its batch is cut already, and replied to
                 with RequestCancelledError once its memory is free
    weights_version  that must compute it; 0 = whichever is served
    on_cancel, handle, foreseen_ns  the engine's: how it learns of that, its name for the request, and when it expected
                 to have computed it (0 = not known)
    """

    layer: ServedLayer
    tokens: int
    top_k: int
    hidden: Operand
    ids: Operand
    weights: Operand | None
    reply: Reply
    caller: str = ""
    request_id: int = 0
    arrival_ns: int = 0
    queued_ns: int = 0
    deadline_ns: int = 0
    router_weight_on_input: bool = False
    output_dtype: str = "bf16"
    digest: bool = False
    trace: bytes = b""
    transport: str = ""
    ready: Callable[[EngineRequest, bytes], None] | None = None
    on_cancel: Callable[[EngineRequest], None] | None = None
    handle: int = 0
    foreseen_ns: int = 0
    weights_version: int = 0
    _cancelled: bool = False

    @property
    def routes(self) -> int:
        """What it costs to compute, at most."""
        return self.tokens * self.top_k

    @property
    def nbytes(self) -> int:
        """Memory that it holds until it is answered: its operands, and its output."""
        weights = 0 if self.weights is None else self.weights.nbytes
        return int(self.hidden.nbytes + self.ids.nbytes + weights + self.output_bytes)

    @property
    def answer_bytes(self) -> int:
        """Memory that its answer takes until the caller has read it."""
        return 0 if self.digest else self.output_bytes

    @property
    def output_bytes(self) -> int:
        return tensor_bytes(DTYPE_NUMBER[self.output_dtype], self.tokens, self.layer.hidden_size)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @cancelled.setter
    def cancelled(self, yes: bool) -> None:
        self._cancelled = yes
        if yes and self.on_cancel is not None:
            self.on_cancel(self)

    def expired(self, now_ns: int) -> bool:
        return self.deadline_ns != 0 and now_ns >= self.deadline_ns
