"""From a decoded message to a request of the engine: every check that needs no look at the elements.

Raises the row of the error table that fits; the engine itself checks ids and weights, for a whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from expertd.codec import ForwardRequestView, Spelling, TensorView
from expertd.dtypes import (
    DTYPE_NAME,
    FLOAT_DTYPES,
    HIDDEN_DTYPES,
    INT_DTYPES,
    SCALED_COLUMNS,
    dtype_name,
    scales_of_row,
)
from expertd.errors import (
    BadByteCountError,
    BadDtypeError,
    BadShapeError,
    BadTensorSpellingError,
    MalformedMessageError,
    OutputDtypeUnsupportedError,
    OutputFormUnknownError,
    ScalesUnsupportedError,
    TooManyTokensError,
    UnsupportedCombinationError,
)
from expertd.grouped import experts_of_rows
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.convert import output_dtypes, round_floats
from expertd_server.engine.request import STORAGE, Array, Operand, Reply, Request
from expertd_server.engine.served import Holding, ServedLayer
from expertd_server.service.draw import Drawer

__all__ = ["Drawing", "Intake"]

_OUTPUT_FORMS = frozenset(pb.OutputForm.values())
_TO_DRAW = Operand("", np.empty(0))


class Drawing:
    """Tensors of a request that are still to be drawn.  elements: random numbers that the largest of them takes."""

    def __init__(self) -> None:
        self.elements = 0
        self._parts: list[tuple[str, Callable[[], Operand]]] = []

    def add(self, name: str, elements: int, draw: Callable[[], Operand]) -> None:
        """name: of the field of Request."""
        self.elements = max(self.elements, elements)
        self._parts.append((name, draw))

    def fill(self, r: Request) -> None:
        """Draw, and put the tensors where they belong."""
        for name, draw in self._parts:
            setattr(r, name, draw())


class Intake:
    """Checks requests against what is held.  holding: asked once a request; max_tokens: largest M, and a request has at
    most as many routes as so many tokens with the model's top_k."""

    def __init__(self, holding: Callable[[], Holding], max_tokens: int) -> None:
        self._holding = holding
        self._max_tokens = max_tokens
        self._drawer = Drawer()

    def request(self, v: ForwardRequestView, reply: Reply, **more: Any) -> tuple[Request, Drawing | None]:
        """The request, and what is to be drawn before it can be computed.  more: fields of Request that the message
        does not hold.  Raises LayerNotHeldError or an InvalidRequestError."""
        layer = self._holding().layer(v.layer)
        x = v.hidden_states
        if x is None:
            raise MalformedMessageError("hidden_states: absent, want a Tensor [M, H]")
        dtype = _dtype("hidden_states", x, HIDDEN_DTYPES)
        if len(x.shape) != 2 or x.shape[1] != layer.hidden_size:
            raise BadShapeError.about("hidden_states", got=list(x.shape), want=f"[M, {layer.hidden_size}]")
        M, H = x.shape
        if self._max_tokens < M:
            raise TooManyTokensError.about(
                "hidden_states", got=f"{M} tokens", want=f"at most {self._max_tokens}", remedy="split the batch"
            )
        output_dtype, digest = _output(v, dtype)
        ids, weights, top_k = _routes(v, layer, M, self._max_tokens)
        r = Request(
            layer=layer,
            tokens=M,
            top_k=top_k,
            hidden=_hidden(x, dtype, M, H),
            ids=ids,
            weights=weights,
            reply=reply,
            request_id=v.request_id,
            router_weight_on_input=v.router_weight_on_input,
            output_dtype=output_dtype,
            digest=digest,
            **more,
        )
        return r, self._drawing(v, r)

    def _drawing(self, v: ForwardRequestView, r: Request) -> Drawing | None:
        """What of a checked request is to be drawn; None = nothing."""
        if r.hidden is not _TO_DRAW and r.ids is not _TO_DRAW and r.weights is not _TO_DRAW:
            return None
        d, draw = Drawing(), self._drawer
        M, k, H, experts = r.tokens, r.top_k, r.layer.hidden_size, r.layer.num_experts
        if r.hidden is _TO_DRAW:
            x, x_dtype = _synthetic(v.hidden_states)
            d.add("hidden", M * H, lambda: draw.hidden(x.seed, M, H, x_dtype))
        if r.ids is _TO_DRAW:
            i, i_dtype = _synthetic(v.topk_ids)
            d.add("ids", M * experts, lambda: draw.ids(i.seed, M, k, experts, i.zipf_exponent, i_dtype))
        if r.weights is _TO_DRAW:
            w, w_dtype = _synthetic(v.topk_weights)
            d.add("weights", M * k, lambda: draw.weights(w.seed, M, k, w_dtype))
        return d


def _synthetic(t: TensorView | None) -> tuple[pb.SyntheticValues, str]:
    """How a checked tensor is to be drawn, and in which dtype."""
    assert t is not None
    return t.synthetic, DTYPE_NAME[t.dtype]


def _routes(v: ForwardRequestView, layer: ServedLayer, M: int, max_tokens: int) -> tuple[Operand, Operand | None, int]:
    """(ids, weights, top_k)."""
    if v.grouped is not None:
        if v.topk_ids is not None or v.topk_weights is not None or v.router_weight_on_input:
            raise UnsupportedCombinationError(
                "grouped: given together with topk_ids, topk_weights or router_weight_on_input; want one way to"
                " route: rows grouped by expert have weight 1"
            )
        return Operand("i64", experts_of_rows(v.grouped, M)), None, 1
    if v.topk_ids is None or v.topk_weights is None:
        missing = "topk_ids" if v.topk_ids is None else "topk_weights"
        raise MalformedMessageError(f"{missing}: absent, want topk_ids and topk_weights [M, top_k], or grouped")
    id_dtype = _dtype("topk_ids", v.topk_ids, INT_DTYPES)
    weight_dtype = _dtype("topk_weights", v.topk_weights, FLOAT_DTYPES)
    shape = v.topk_ids.shape
    if len(shape) != 2 or shape[0] != M or not 1 <= shape[1] <= layer.num_experts:
        raise BadShapeError.about(
            "topk_ids", got=list(shape), want=f"[{M}, top_k] with top_k from 1 to {layer.num_experts}"
        )
    if v.topk_weights.shape != shape:
        raise BadShapeError.about(
            "topk_weights", got=list(v.topk_weights.shape), want=f"the shape of topk_ids, {list(shape)}"
        )
    k = shape[1]
    if v.router_weight_on_input and k != 1:
        raise UnsupportedCombinationError.about(
            "router_weight_on_input",
            got=f"top_k {k}",
            want="top_k 1",
            remedy="with more routes a token has no single input weight",
        )
    if M * k > max_tokens * layer.top_k:
        raise TooManyTokensError.about(
            "topk_ids",
            got=f"{M * k} routes, {k} for each of {M} tokens",
            want=f"at most {max_tokens * layer.top_k}, as {max_tokens} tokens with the model's {layer.top_k} have",
            remedy="split the batch",
        )
    ids = _operand("topk_ids", v.topk_ids, id_dtype, M * k)
    if ids is _TO_DRAW and not 0.0 <= v.topk_ids.synthetic.zipf_exponent <= 100.0:
        raise BadTensorSpellingError.about(
            "topk_ids.zipf_exponent", got=v.topk_ids.synthetic.zipf_exponent, want="0 to 100"
        )
    return ids, _operand("topk_weights", v.topk_weights, weight_dtype, M * k), k


def _hidden(x: TensorView, dtype: str, M: int, H: int) -> Operand:
    """hidden_states, with their scales where they are e4m3."""
    operand = _operand("hidden_states", x, dtype, M * H)
    if dtype != "e4m3":
        return operand
    if operand is _TO_DRAW:
        raise BadTensorSpellingError.about(
            "hidden_states: E4M3", got="synthetic", want="raw or floats", remedy="the server draws F32, F16 and BF16"
        )
    return operand._replace(scales=_scales(x, M, H))


def _scales(x: TensorView, M: int, H: int) -> Array:
    """f32 [M * blocks], whatever they are: what they make of their elements is the caller's."""
    s, count = x.scales, M * scales_of_row(H)
    if s is None:
        if count == 0:
            return np.empty(0, np.float32)
        raise BadTensorSpellingError.about("hidden_states: E4M3", got="no scales", want=f"{count} of them")
    if s.block != SCALED_COLUMNS:
        raise BadShapeError.about("hidden_states.scales.block", got=s.block, want=SCALED_COLUMNS)
    raw = np.frombuffer(s.raw, np.uint8)
    if s.floats is not None:
        if raw.size:
            raise BadTensorSpellingError.about("hidden_states.scales", got="raw and floats", want="one of them")
        raw = np.array(s.floats.values, np.float32).view(np.uint8)
    want = 4 * count
    if raw.size != want:
        raise BadByteCountError.about(
            "hidden_states.scales",
            got=f"{raw.size} bytes",
            want=f"{want}: f32 {[M, scales_of_row(H)]}, one for {SCALED_COLUMNS} columns",
        )
    return raw.view(np.dtype("<f4"))


def _dtype(name: str, t: TensorView, allowed: tuple[str, ...]) -> str:
    if t.dtype == pb.DATA_TYPE_E4M3 and "e4m3" not in allowed:
        raise ScalesUnsupportedError(f"{name}: got E4M3, want one of {', '.join(allowed)}: hidden_states alone take it")
    if t.scales is not None and t.dtype != pb.DATA_TYPE_E4M3:
        raise ScalesUnsupportedError.about(
            name, got=f"block scales with {dtype_name(t.dtype).upper()} elements", want="them with E4M3 alone"
        )
    dtype = DTYPE_NAME.get(t.dtype)
    if dtype not in allowed:
        raise BadDtypeError.about(
            f"{name}.dtype", got=dtype_name(t.dtype).upper(), want=" or ".join(d.upper() for d in allowed)
        )
    return dtype


def _operand(name: str, t: TensorView, dtype: str, count: int) -> Operand:
    """The tensor's elements in whatever spelling, or _TO_DRAW."""
    storage = STORAGE[dtype]
    if t.spelling == Spelling.RAW:
        raw = t.raw
        size = raw.nbytes if isinstance(raw, memoryview) else len(raw)
        if size != count * storage.itemsize:
            raise BadByteCountError.about(
                f"{name}.raw",
                got=f"{size} bytes",
                want=f"{count * storage.itemsize} for {list(t.shape)} {dtype}",
            )
        return Operand(dtype, np.frombuffer(raw, storage))
    if t.spelling == Spelling.SYNTHETIC:
        return _TO_DRAW
    if t.spelling == Spelling.NONE:
        if count == 0:
            return Operand(dtype, np.empty(0, storage))
        raise BadTensorSpellingError(f"{name}: has no data, want raw, typed values or synthetic")
    integer = dtype in INT_DTYPES
    if (t.spelling == Spelling.INTS) != integer:
        want = "ints" if integer else "floats"
        raise BadTensorSpellingError.about(
            f"{name}: typed values of {dtype.upper()}",
            got="floats" if integer else "ints",
            want=f"{want}, raw or synthetic",
        )
    typed = t.ints if integer else t.floats
    if len(typed) != count:
        raise BadByteCountError.about(f"{name}: typed values", got=len(typed), want=f"{count} for {list(t.shape)}")
    values: Array = np.array(typed, np.int64 if integer else np.float32)
    # Ids stay wide: one beyond i32 is then refused as out of range, by the same check as in any other spelling.
    return Operand("i64", values) if integer else Operand(dtype, round_floats(values, dtype))


def _output(v: ForwardRequestView, hidden_dtype: str) -> tuple[str, bool]:
    """(dtype of the output, whether a digest is asked instead of it)."""
    dtype = "bf16" if hidden_dtype == "e4m3" else hidden_dtype
    if v.output_dtype:
        dtype = DTYPE_NAME.get(v.output_dtype, "")
    if dtype not in output_dtypes():
        want = ", ".join(d.upper() for d in output_dtypes())
        got = dtype_name(v.output_dtype).upper()
        raise OutputDtypeUnsupportedError.about("output_dtype", got=got, want=f"{want} or 0")
    if v.output_form not in _OUTPUT_FORMS:
        raise OutputFormUnknownError.about("output_form", got=v.output_form, want="TENSOR (1, or 0) or DIGEST (2)")
    digest = v.output_form == pb.OUTPUT_FORM_DIGEST
    if digest and dtype == "e4m3":
        raise UnsupportedCombinationError.about(
            "output_form", got="DIGEST of E4M3", want="TENSOR", remedy="digests are of F32, F16 and BF16"
        )
    return dtype, digest
