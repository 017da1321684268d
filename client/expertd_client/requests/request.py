"""One forward, as its caller means it: a layer, a batch of M tokens with their routes, and what is wanted of them.

A Request is checked when it is made, and it is not bytes yet.  So a batch can be cut first, by tokens and by routes:

    mine = owner[request.topk_ids] == server                 # [M, top_k] bool
    part = request.routes(mine).rows(mine.any(axis=1))       # its routes, and the tokens that have any

and the transport decides how its tensors travel: as bytes of a message, through memory that both sides share, on the
device.  Whatever forwards takes Requests (see expertd_client.clients.forwarder); forward(layer, ...) makes one.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from typing import Any, TypedDict

import numpy as np

from expertd.codec import ForwardRequestView, RequestForm, encode_stream_request
from expertd.common.grouped import experts_of_rows
from expertd.errors import BadShapeError, LayerNotHeldError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.checks import Kind, checked, form_of, refuse_gradients
from expertd_client.requests.current_span import current_traceparent
from expertd_client.requests.e4m3 import E4m3, quantize
from expertd_client.requests.grouped import Grouped, grouped_message, grouped_rows
from expertd_client.requests.tensors import Synthetic, bytes_of, keep_or, take, to_wire

__all__ = ["Request", "RequestOptions"]

_LAYERS = 1 << 32
"""That the message's field can name."""


class RequestOptions(TypedDict, total=False):
    """What a Request may have beside its layer and tensors; Request says what each means."""

    grouped: Grouped | None
    output_dtype: Any
    router_weight_on_input: bool
    digest: bool
    traceparent: str
    weights_version: int


def _unknown(name: str) -> str:
    """What to say of an argument that does not exist; forward() and submit() hand theirs on."""
    known = ["timeout_s", *RequestOptions.__annotations__]
    near = get_close_matches(name, known, 1)
    want = near[0] if near else f"one of {', '.join(known)}"
    return f"forward(), submit() and Request: got the argument {name!r}, which they do not have; want {want}"


class _Fields:
    """Those of a Request, while it is being made."""

    __slots__ = (
        "digest",
        "dtypes",
        "grouped",
        "hidden_states",
        "kind",
        "layer",
        "output_dtype",
        "plain",
        "router_weight_on_input",
        "topk_ids",
        "topk_weights",
        "traceparent",
        "weights_version",
    )
    layer: int
    hidden_states: Any
    topk_ids: Any
    topk_weights: Any
    grouped: Grouped | None
    output_dtype: Any
    router_weight_on_input: bool
    digest: bool
    traceparent: str
    weights_version: int
    dtypes: tuple[int, ...]
    kind: Kind
    plain: bool


class Request(_Fields):
    """The routed experts of one layer for one batch of M tokens.  Immutable; its tensors are the caller's, and are read
    when it is sent.

    hidden_states   [M, H] f32, f16 or bf16: numpy, torch on any device, or Synthetic; or E4m3
    topk_ids        [M, top_k] i32 or i64, global expert ids, -1 = no expert
    topk_weights    [M, top_k] f32, f16 or bf16
    grouped         instead of topk_*: rows sorted by expert, answered row by row
    output_dtype    "f32", "f16", "bf16", or a numpy or torch dtype; None = that of hidden_states, bf16 for E4m3.
                    "e4m3": as E4m3, half the bytes of bf16, from a server whose Describe has it in output_dtypes
    digest          answer with sum, sum of squares and CRC-32 instead of the output
    traceparent     W3C trace context; "" = that of OpenTelemetry's span that the caller is in, if it records one
    weights_version   number of the version of the weights that must compute it (Describe lists those held); 0 = the one
                    that is served
    router_weight_on_input   weights multiply the experts' inputs; top_k must be 1

    dtypes          DataTypes of the answer, hidden_states, topk_ids, topk_weights (the last two unless grouped)
    plain           whether all three tensors are numpy arrays of few bytes and M > 0: they are copied, without a look
                    at where they lie
    kind            what requests of the same types, dtypes and shapes share

    unknown         none exists: TypeError, with the name of the argument that was meant

    Raises BadDtypeError, BadShapeError, UnsupportedCombinationError for tensors that require gradients (but under
    torch.no_grad() or inference_mode()) and, for a layer that is no number, LayerNotHeldError: what can be seen without
    the server.
    """

    __slots__ = ()

    def __new__(
        cls,
        layer: int,
        hidden_states: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        grouped: Grouped | None = None,
        output_dtype: Any = None,
        router_weight_on_input: bool = False,
        digest: bool = False,
        traceparent: str = "",
        weights_version: int = 0,
        **unknown: object,
    ) -> Request:
        if unknown:
            raise TypeError(_unknown(next(iter(unknown))))
        if not (
            (type(layer) is int or hasattr(layer, "__index__")) and 0 <= layer < _LAYERS
        ):  # None would travel as layer 0
            raise LayerNotHeldError.about("layer", got=repr(layer), want="a whole number from 0 to 2^32 - 1")
        made = _Fields()
        made.layer = layer
        made.hidden_states, made.topk_ids, made.topk_weights = hidden_states, topk_ids, topk_weights
        made.grouped, made.output_dtype = grouped, output_dtype
        made.router_weight_on_input, made.digest = router_weight_on_input, digest
        made.traceparent = traceparent or current_traceparent()
        made.weights_version = weights_version
        made.kind = kind = checked(hidden_states, topk_ids, topk_weights, grouped, output_dtype)
        made.dtypes, made.plain = kind.dtypes, kind.plain
        if not made.plain:
            refuse_gradients(layer, hidden_states, topk_weights)
        return _finished(made)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"Request: got an assignment to {name}, want another Request: it has been checked")

    @property
    def tokens(self) -> int:
        """M."""
        return int(self.hidden_states.shape[0])

    def __repr__(self) -> str:
        routes = "grouped" if self.grouped is not None else f"top_k {self.topk_ids.shape[1]}"
        return f"Request(layer {self.layer}, [{self.tokens}, {self.hidden_states.shape[1]}], {routes})"

    def rows(self, index: Any) -> Request:
        """The request for some of its tokens: a slice, or [m] numbers or [M] booleans in numpy or torch.

        A slice shares memory with this request, anything else is copied.  Rows grouped by expert must stay so: there
        the numbers are ascending; of [experts, T, H] they become rows with a route each, as by ungrouped().  Raises
        UnsupportedCombinationError where the server is to draw the values, which nobody here knows."""
        if any(isinstance(x, Synthetic) for x in (self.hidden_states, self.topk_ids, self.topk_weights)):
            raise UnsupportedCombinationError(
                f"{self!r}: got Synthetic tensors, want values: only the server knows the rows that it draws; send it"
                " whole"
            )
        if self.grouped is not None and self.grouped.rows_per_expert:
            return self.ungrouped().rows(index)
        return self._part(
            take(self.hidden_states, index),
            None if self.topk_ids is None else take(self.topk_ids, index),
            None if self.topk_weights is None else take(self.topk_weights, index),
            None if self.grouped is None else grouped_rows(self.grouped, index),
        )

    def routes(self, keep: Any) -> Request:
        """The request with the routes where `keep` [M, top_k] (booleans, numpy or torch) is true; the others become
        -1.  Its tokens stay, in their order: rows() leaves out those without a route."""
        if self.grouped is not None or isinstance(self.topk_ids, Synthetic):
            raise UnsupportedCombinationError(
                f"{self!r}: got {'grouped rows' if self.grouped is not None else 'Synthetic'}, want topk_ids with"
                " values; of grouped rows choose rows()"
            )
        if tuple(keep.shape) != tuple(self.topk_ids.shape):
            raise BadShapeError.about("keep", got=list(keep.shape), want=list(self.topk_ids.shape))
        return self._part(self.hidden_states, keep_or(self.topk_ids, keep, -1), self.topk_weights, None)

    def ungrouped(self) -> Request:
        """The same rows with one route each, of weight 1, instead of `grouped`; -1 for rows that are not valid.  Itself
        where nothing is grouped."""
        if self.grouped is None:
            return self
        ids = experts_of_rows(self.grouped, self.tokens)[:, None]
        dtypes = (*self.dtypes[:2], pb.DATA_TYPE_I64, pb.DATA_TYPE_F32)
        return self._part(self.hidden_states, ids, np.ones(ids.shape, np.float32), None, dtypes)

    def cut(self, max_tokens: int) -> list[Request]:
        """Parts of at most `max_tokens` tokens, in order; [self] where it fits."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens: got {max_tokens}, want >= 1")
        if self.tokens <= max_tokens:
            return [self]
        return [self.rows(slice(first, first + max_tokens)) for first in range(0, self.tokens, max_tokens)]

    def quantized(self) -> Request:
        """The same with its hidden states as E4m3, answered in the dtype that it asked for; itself where they are that
        already, or where the server draws them."""
        if isinstance(self.hidden_states, E4m3 | Synthetic):
            return self
        dtypes = (self.dtypes[0], pb.DATA_TYPE_E4M3, *self.dtypes[2:])
        return self._part(quantize(self.hidden_states), self.topk_ids, self.topk_weights, self.grouped, dtypes)

    def message(self, request_id: int, timeout_us: int, sent_us: int = 0) -> bytes:
        """view() as a StreamForwardRequest."""
        form = self.kind.form or _form_of(self)
        if form is None or self.digest or self.router_weight_on_input or self.traceparent:
            return encode_stream_request(self.view(request_id, timeout_us, sent_us))
        x, ids, w = self.hidden_states, self.topk_ids, self.topk_weights
        if self.plain:
            x, ids, w = x.tobytes(), ids.tobytes(), w.tobytes()
        else:
            x, ids, w = map(bytes_of, (x, ids, w), self.dtypes[1:])
        return form.message(request_id, self.layer, timeout_us, sent_us, x, ids, w, self.weights_version)

    def view(self, request_id: int, timeout_us: int, sent_us: int = 0) -> ForwardRequestView:
        """The request as a message: its tensors as bytes in host memory, not copied where they lie so already.

        sent_us: when it leaves, on a clock of this process; 0 = nobody asks.
        """
        grouped, dtypes = self.grouped, self.dtypes
        return ForwardRequestView(
            request_id,
            self.layer,
            to_wire(self.hidden_states, dtypes[1]),
            to_wire(self.topk_ids, dtypes[2]) if grouped is None else None,
            to_wire(self.topk_weights, dtypes[3]) if grouped is None else None,
            None if grouped is None else grouped_message(grouped),
            timeout_us,
            dtypes[0],
            pb.OUTPUT_FORM_DIGEST if self.digest else pb.OUTPUT_FORM_TENSOR,
            self.traceparent,
            self.router_weight_on_input,
            sent_us,
            self.weights_version,
        )

    def with_tensors(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, output: int | None = None) -> Request:
        """The same with other tensors of the same dtypes, which are not checked: whoever cuts a batch by himself made
        them from those of this request.  output: DataType of the answer, None = as it was."""
        dtypes = self.dtypes if output is None else (output, *self.dtypes[1:])
        return self._part(hidden_states, topk_ids, topk_weights, None, dtypes)

    def again(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Request:
        """The same with other tensors of the same kinds, shapes and dtypes, in the trace that the caller is in now.
        Nothing is checked: whoever has no gradients to refuse, and has seen that they are the same."""
        part = _Fields()
        part.hidden_states, part.topk_ids, part.topk_weights = hidden_states, topk_ids, topk_weights
        part.grouped, part.dtypes, part.kind, part.plain = None, self.dtypes, self.kind, self.plain
        part.traceparent = current_traceparent()
        return _part_of(self, part)

    def pinned(self, weights_version: int) -> Request:
        """The same, to be computed by that version of the weights; 0 = by the one that is served."""
        if weights_version == self.weights_version:
            return self
        part = self._part(self.hidden_states, self.topk_ids, self.topk_weights, self.grouped)
        object.__setattr__(part, "weights_version", weights_version)
        return part

    def _part(
        self,
        hidden_states: Any,
        topk_ids: Any,
        topk_weights: Any,
        grouped: Grouped | None,
        dtypes: tuple[int, ...] | None = None,
    ) -> Request:
        """With other tensors, which need no check: they are parts of checked ones.  dtypes: None = as here."""
        part = _Fields()
        part.hidden_states, part.topk_ids, part.topk_weights = hidden_states, topk_ids, topk_weights
        part.grouped, part.dtypes, part.plain = grouped, dtypes or self.dtypes, False
        part.kind, part.traceparent = Kind(part.dtypes), self.traceparent
        return _part_of(self, part)


def _part_of(whole: Request, part: Any) -> Request:
    """`part` with what it has in common with `whole`, whatever its tensors are.  Not to be changed from here on."""
    part.layer, part.output_dtype, part.weights_version = whole.layer, whole.output_dtype, whole.weights_version
    part.router_weight_on_input, part.digest = whole.router_weight_on_input, whole.digest
    part.__class__ = Request
    request: Request = part
    return request


def _finished(made: Any) -> Request:
    """Not to be changed from here on.  (object.__setattr__ of eleven slots costs ten times what assignments do.)"""
    made.__class__ = Request
    request: Request = made
    return request


def _form_of(request: Request) -> RequestForm | None:
    if request.grouped is not None:
        return None
    return form_of(request.dtypes, request.hidden_states, request.topk_ids, request.topk_weights)
