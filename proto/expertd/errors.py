"""Every error that crosses the wire, one class a row: status code, stable reason, retryable.

A row is what programs match (`except BadShapeError`, or `error.reason == "BAD_SHAPE"`); the text is for people and says
subject, got, want, remedy.  A row travels in two ways:

    on StreamForward    as a RequestError message: one bad request fails alone
    on any other call   as the gRPC status code, the text as its details, and trailing metadata
                        expertd-reason          "BAD_SHAPE"
                        expertd-retryable       "true" | "false"
                        expertd-retry-after-us  decimal, absent = no advice

Texts are cut and escaped when they are made (`printable`): whatever a caller sent stands in them, and a status must fit
into a header.

The metadata carries what a google.rpc.ErrorInfo carries.  It is not packed into `grpc-status-details-bin`, because that
needs googleapis-common-protos on both sides; three plain keys are read by every gRPC client and printed by grpcurl.

retryable: the same request may succeed later or at another replica.  Nothing here has side effects, so it is safe
to repeat.

Non-finite numbers: router weights with NaN or infinity are refused (NON_FINITE_WEIGHTS): they are few, and one of them
ruins a sum that other servers add to.  hidden_states may hold NaN or infinity: rows are independent, what comes out of
such a row is as undefined as what went in, and looking at every element costs a pass over the largest tensor.  A server
does that where it was started with --nonfinite: it refuses them (NON_FINITE_HIDDEN_STATES), or counts both as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import grpc

from expertd.v1 import expert_service_pb2 as pb

# Why it is so: decision 7 in DECISIONS.md.
__all__ = [
    "BackendFailedError",
    "BadByteCountError",
    "BadDtypeError",
    "BadResponseError",
    "BadShapeError",
    "BadTensorSpellingError",
    "ChangePendingError",
    "ChangeRefusedError",
    "ChangeUnknownError",
    "Code",
    "DeadlineExceededError",
    "DrainingError",
    "DuplicateRequestIdError",
    "ExpertIdOutOfRangeError",
    "ExpertdError",
    "InternalError",
    "InvalidRequestError",
    "LayerNotHeldError",
    "MalformedMessageError",
    "MessageTooLargeError",
    "MissingRequestIdError",
    "NonFiniteHiddenStatesError",
    "NonFiniteWeightsError",
    "NotReadyError",
    "OutputDtypeUnsupportedError",
    "OutputFormUnknownError",
    "OverloadedError",
    "PermissionDeniedError",
    "PlacementError",
    "QueueFullError",
    "RequestCancelledError",
    "ScalesUnsupportedError",
    "TABLE",
    "TooManyRequestsError",
    "TooManyTokensError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnrecognizedError",
    "UnsupportedCombinationError",
    "UpdateFailedError",
    "WeightsVersionNotHeldError",
    "from_request_error",
    "from_rpc_error",
    "from_status",
    "printable",
]

_E = TypeVar("_E", bound="ExpertdError")

REASON_KEY = "expertd-reason"
RETRYABLE_KEY = "expertd-retryable"
RETRY_AFTER_KEY = "expertd-retry-after-us"


class Code(IntEnum):
    """google.rpc.Code, which are also gRPC's status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @property
    def grpc(self) -> grpc.StatusCode:
        """The same code as grpcio spells it."""
        return getattr(grpc.StatusCode, self.name)


MAX_TEXT = 600
"""Characters of an error's text.  As the status of a call each may take 12 bytes of its headers, of which grpcio takes
8 KiB without a thought."""
_MAX_REASON = 64


def printable(text: str, most: int = MAX_TEXT) -> str:
    """`text` on one line, cut to about `most` characters, with whatever a terminal or a log would obey escaped."""
    cut = len(text) - most
    if cut > 0:
        text = f"{text[: most * 3 // 4]} [{cut} characters left out] {text[len(text) - most // 4 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


TABLE: dict[str, type[ExpertdError]] = {}
"""Every row by its reason, in the order of this file."""


class ExpertdError(Exception):
    """Base of all rows; never raised itself.

    code, reason, retryable   the row; an error that a newer server sent keeps what came over the wire
    request_id                the request of a stream that failed; 0 = not known or not on a stream
    retry_after_us            advice in microseconds; 0 = none
    """

    code: Code = Code.UNKNOWN
    reason: str = ""
    retryable: bool = False

    def __init_subclass__(cls, code: Code | None = None, reason: str = "", retryable: bool = False) -> None:
        if code is None:  # a group of rows, not a row
            return
        if reason in TABLE:
            raise ValueError(f"error table: {reason} stands there twice")
        cls.code, cls.reason, cls.retryable = code, reason, retryable
        TABLE[reason] = cls

    def __init__(self, message: str, *, request_id: int = 0, retry_after_us: int = 0) -> None:
        super().__init__(printable(message))
        self.request_id = request_id
        self.retry_after_us = retry_after_us

    @classmethod
    def about(
        cls: type[_E],
        subject: str,
        *,
        got: object,
        want: object,
        remedy: str = "",
        request_id: int = 0,
        retry_after_us: int = 0,
    ) -> _E:
        """The row with the text "subject: got ..., want ...; remedy"."""
        text = f"{subject}: got {got}, want {want}" + (f"; {remedy}" if remedy else "")
        return cls(text, request_id=request_id, retry_after_us=retry_after_us)

    @property
    def message(self) -> str:
        return str(self.args[0])

    def copy(self) -> ExpertdError:
        """The same row as another object: each of several waiters raises its own, with its own traceback."""
        other = type(self)(self.message, retry_after_us=self.retry_after_us)
        other.code, other.reason, other.retryable = self.code, self.reason, self.retryable
        other.__cause__ = self.__cause__
        return other

    def to_request_error(self, request_id: int | None = None) -> pb.RequestError:
        """As a message on a stream; request_id overrides the error's own."""
        return pb.RequestError(
            request_id=self.request_id if request_id is None else request_id,
            code=self.code,
            reason=self.reason,
            message=self.message,
            retryable=self.retryable,
            retry_after_us=self.retry_after_us,
        )

    def to_trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """As trailing metadata of a call that ends with `self.code.grpc` and the details `self.message`."""
        pairs = [(REASON_KEY, self.reason), (RETRYABLE_KEY, "true" if self.retryable else "false")]
        if self.retry_after_us:
            pairs.append((RETRY_AFTER_KEY, str(self.retry_after_us)))
        return tuple(pairs)


class InvalidRequestError(ExpertdError, ValueError):
    """Group: the request itself is wrong, and will be wrong at every replica."""


# ---- the table -------------------------------------------------------------------------------------------------------


class MalformedMessageError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="MALFORMED_MESSAGE"):
    """The bytes are no protobuf message of this type, a part that must be there is absent, or one is longer than
    expertd.common.bounds allows."""


class BadDtypeError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="BAD_DTYPE"):
    """A tensor's dtype is unspecified, unknown, or not one that this argument takes."""


class BadShapeError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="BAD_SHAPE"):
    """A tensor's rank or extents do not fit the layer, or do not fit the other tensors."""


class BadByteCountError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="BAD_BYTE_COUNT"):
    """The bytes (or typed values) of a tensor are more or fewer than its shape and dtype say."""


class BadTensorSpellingError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="BAD_TENSOR_SPELLING"):
    """A tensor has no data, or data in a spelling that its dtype or argument does not take."""


class NonFiniteWeightsError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="NON_FINITE_WEIGHTS"):
    """Router weights hold NaN or infinity; a server with --nonfinite zero counts them as 0 instead."""


class NonFiniteHiddenStatesError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="NON_FINITE_HIDDEN_STATES"):
    """Hidden states hold NaN or infinity, in the dtype that the experts compute in, and the server refuses that."""


class ExpertIdOutOfRangeError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="EXPERT_ID_OUT_OF_RANGE"):
    """An expert id is < -1 or >= the model's number of experts.  (An expert that lives elsewhere is no error.)"""


class LayerNotHeldError(InvalidRequestError, code=Code.NOT_FOUND, reason="LAYER_NOT_HELD"):
    """This server holds no expert of that layer; Describe lists those it holds."""


class WeightsVersionNotHeldError(
    ExpertdError, code=Code.UNAVAILABLE, reason="WEIGHTS_VERSION_NOT_HELD", retryable=True
):
    """A version of the weights that this server does not hold, or not any more; another replica may hold it. A version
    that was dropped does not come back."""


class UpdateFailedError(ExpertdError, code=Code.FAILED_PRECONDITION, reason="UPDATE_FAILED"):
    """An update of the weights that some servers did not take; raised by `expertd_client.weights.Updater`.

    errors: by server; switched: servers that serve the new version all the same, for they could not be rolled back."""

    errors: Mapping[str, ExpertdError] = {}
    switched: Sequence[str] = ()


class TooManyTokensError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="TOO_MANY_TOKENS"):
    """M is above the server's limit, which Describe shows, or the routes are more than so many tokens have."""


class MessageTooLargeError(InvalidRequestError, code=Code.RESOURCE_EXHAUSTED, reason="MESSAGE_TOO_LARGE"):
    """A message is larger than a side takes.  The code is the one that gRPC itself uses for this."""


class MissingRequestIdError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="MISSING_REQUEST_ID"):
    """request_id 0 on a stream, where it could not be answered."""


class DuplicateRequestIdError(InvalidRequestError, code=Code.ALREADY_EXISTS, reason="DUPLICATE_REQUEST_ID"):
    """A request with this request_id is in flight on the same stream."""


class OutputDtypeUnsupportedError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="OUTPUT_DTYPE_UNSUPPORTED"):
    """output_dtype is none of those that Describe lists."""


class OutputFormUnknownError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="OUTPUT_FORM_UNKNOWN"):
    """output_form is neither tensor nor digest."""


class ScalesUnsupportedError(InvalidRequestError, code=Code.UNIMPLEMENTED, reason="SCALES_UNSUPPORTED"):
    """The tensor carries block scales, or the dtype that needs them, and does not take them: topk_weights never do, nor
    hidden_states of a server whose Describe does not list E4M3."""


class UnsupportedCombinationError(InvalidRequestError, code=Code.INVALID_ARGUMENT, reason="UNSUPPORTED_COMBINATION"):
    """Each part is fine, but not together: grouped rows with topk_*, router_weight_on_input with top_k > 1."""


class TooManyRequestsError(
    ExpertdError, code=Code.RESOURCE_EXHAUSTED, reason="TOO_MANY_REQUESTS_IN_FLIGHT", retryable=True
):
    """The stream has as many requests in flight as the server allows, or the caller as many unary calls open (1024,
    fewer beside other callers); wait for an answer first."""


class QueueFullError(ExpertdError, code=Code.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retryable=True):
    """The queue has no room for this caller, or no memory for the answer; retry_after_us estimates when it will."""


class OverloadedError(ExpertdError, code=Code.RESOURCE_EXHAUSTED, reason="OVERLOADED", retryable=True):
    """The answer would come after the request's deadline, as far as the server knows, so it is not computed.
    retry_after_us estimates when it would be in time; 0: this server is too slow for the deadline, waiting or not.
    Another replica may be sooner."""


class DeadlineExceededError(ExpertdError, TimeoutError, code=Code.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    """The request's time was over before its answer was ready.  Another try needs another deadline."""


class RequestCancelledError(ExpertdError, code=Code.CANCELLED, reason="CANCELLED"):
    """The client cancelled the request."""


class NotReadyError(ExpertdError, code=Code.UNAVAILABLE, reason="NOT_READY", retryable=True):
    """The server is loading weights or checking itself."""


class DrainingError(ExpertdError, code=Code.UNAVAILABLE, reason="DRAINING", retryable=True):
    """The server finishes what is under way and takes nothing new; ask another replica."""


class BackendFailedError(ExpertdError, code=Code.INTERNAL, reason="BACKEND_FAILED"):
    """The kernel backend raised; the text names the backend and the layer.  Not retryable: the same server would
    probably fail again.  ExpertCluster asks another replica."""


class InternalError(ExpertdError, code=Code.INTERNAL, reason="INTERNAL"):
    """A fault of the server's own code."""


class ChangeRefusedError(ExpertdError, code=Code.FAILED_PRECONDITION, reason="CHANGE_REFUSED"):
    """A server cannot hold what it is asked to: no room, no such layer or expert, no backend, another model."""


class ChangePendingError(ExpertdError, code=Code.ABORTED, reason="CHANGE_PENDING"):
    """Another change of what a server holds is under way, or not committed yet."""


class ChangeUnknownError(ExpertdError, code=Code.NOT_FOUND, reason="CHANGE_UNKNOWN"):
    """No change of that name is ready: it was never prepared, was aborted, or has expired."""


class UnavailableError(ExpertdError, ConnectionError, code=Code.UNAVAILABLE, reason="UNAVAILABLE", retryable=True):
    """Raised by the client: no connection, or it broke before the answer came. A server says it of a stream that it
    closed because nothing came for long, and of a call whose message did not come whole in time."""


class UnimplementedError(ExpertdError, code=Code.UNIMPLEMENTED, reason="UNIMPLEMENTED"):
    """Raised by the client: what answers at that address is not an expertd.v1.ExpertService."""


class BadResponseError(ExpertdError, code=Code.INTERNAL, reason="BAD_RESPONSE"):
    """Raised by the client: the answer cannot be decoded or does not fit the request."""


class UnauthenticatedError(ExpertdError, PermissionError, code=Code.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """The server needs a token or certificate, and got none that it knows."""


class PermissionDeniedError(ExpertdError, PermissionError, code=Code.PERMISSION_DENIED, reason="PERMISSION_DENIED"):
    """The server knows the client, who has no right to do this."""


class PlacementError(ExpertdError, ValueError, code=Code.FAILED_PRECONDITION, reason="BAD_PLACEMENT"):
    """A placement is not valid, or leaves an expert without a server."""


class UnrecognizedError(ExpertdError, code=Code.UNKNOWN, reason="UNRECOGNIZED"):
    """A failure without a reason of this table: from a proxy, from gRPC itself, or from a newer server."""


# ---- from the wire ---------------------------------------------------------------------------------------------------

_BARE = {
    Code.UNAVAILABLE: UnavailableError,
    Code.DEADLINE_EXCEEDED: DeadlineExceededError,
    Code.CANCELLED: RequestCancelledError,
    Code.UNIMPLEMENTED: UnimplementedError,
}
"""Rows for statuses that gRPC makes itself, without a reason."""


def from_request_error(error: pb.RequestError) -> ExpertdError:
    """The row that a server sent on a stream.  A reason that this version does not know becomes UnrecognizedError with
    the server's code, reason and retryable."""
    return _build(error.reason, error.code, error.message, error.retryable, error.request_id, int(error.retry_after_us))


def from_status(
    code: int | grpc.StatusCode, details: str | None, metadata: Iterable[tuple[str, str | bytes]] | None
) -> ExpertdError:
    """The row behind the end of a call: its status code, details and trailing metadata."""
    number = code if isinstance(code, int) else code.value[0]
    found: Mapping[str, str | bytes] = dict(metadata or ())
    reason = _text(found.get(REASON_KEY))
    retryable = _text(found.get(RETRYABLE_KEY)) == "true"
    after = _text(found.get(RETRY_AFTER_KEY))
    return _build(
        reason,
        number,
        details or "",
        retryable,
        0,
        int(after) if len(after) < 20 and after.isascii() and after.isdigit() else 0,
    )


def from_rpc_error(error: grpc.RpcError) -> ExpertdError:
    """The row behind what grpcio raised (synchronous or asyncio); chain it: `raise from_rpc_error(e) from e`."""
    call: Any = error
    return from_status(call.code(), call.details(), call.trailing_metadata())


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _build(reason: str, code: int, message: str, retryable: bool, request_id: int, after_us: int) -> ExpertdError:
    known = Code(code) if code in Code._value2member_map_ else Code.UNKNOWN
    row = TABLE.get(reason)
    if row is not None:
        return row(message, request_id=request_id, retry_after_us=after_us)
    if not reason:
        row = _BARE.get(known)
        if known is Code.RESOURCE_EXHAUSTED and "message larger than max" in message:
            row = MessageTooLargeError  # gRPC's own limit: it gives no reason, so this one time the text is read
        if row is not None:
            return row(message, request_id=request_id, retry_after_us=after_us)
    error = UnrecognizedError(message, request_id=request_id, retry_after_us=after_us)
    error.code, error.retryable = known, retryable
    error.reason = printable(reason, _MAX_REASON) or error.reason
    return error
