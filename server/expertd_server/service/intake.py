"""From a decoded message to a request of the engine.

The engine's core checks what the message says of itself (engine/csrc/check.h), as it does for every transport; here the
message is put into its terms, and its tensors into the engine's.  Ids and weights are looked at in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from expertd.codec import ForwardRequestView, ScalesView, Spelling, TensorView
from expertd.common.bounds import MAX_RANK
from expertd.common.dtypes import DTYPE_NAME, INT_DTYPES
from expertd.common.grouped import experts_of_rows
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.abi import RequestFacts, TensorFacts
from expertd_server.engine.convert import round_floats
from expertd_server.engine.request import STORAGE, Array, EngineRequest, Operand, Reply
from expertd_server.service.synthetic import SyntheticGenerator

if TYPE_CHECKING:
    from expertd_server.engine.engine import Engine

__all__ = ["SyntheticTensors", "Intake", "facts_of"]

_TO_DRAW = Operand("", np.empty(0))


class SyntheticTensors:
    """Tensors of a request that are still to be drawn.  elements: random numbers that the largest of them takes."""

    def __init__(self) -> None:
        self.elements = 0
        self._parts: list[tuple[str, Callable[[], Operand]]] = []

    def add(self, name: str, elements: int, draw: Callable[[], Operand]) -> None:
        """name: of the field of EngineRequest."""
        self.elements = max(self.elements, elements)
        self._parts.append((name, draw))

    def fill(self, r: EngineRequest) -> None:
        """Draw, and put the tensors where they belong."""
        for name, draw in self._parts:
            setattr(r, name, draw())


class Intake:
    """Makes an EngineRequest of a decoded protobuf message, checked by `engine`.  The transports whose messages the
    core reads by itself do not need it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._generator = SyntheticGenerator()

    def request(
        self, v: ForwardRequestView, reply: Reply, **more: Any
    ) -> tuple[EngineRequest, SyntheticTensors | None]:
        """The request, and what is to be drawn before it can be computed.  more: fields that the message does not hold.
        Raises LayerNotHeldError, WeightsVersionNotHeldError or another InvalidRequestError."""
        layer = self._engine.check(facts_of(v), v.weights_version)
        x = v.hidden_states
        assert x is not None  # checked, as is all below
        if v.grouped is not None:
            ids, weights, top_k = Operand("i64", experts_of_rows(v.grouped, x.shape[0])), None, 1
        else:
            assert v.topk_ids is not None
            assert v.topk_weights is not None
            ids, weights, top_k = _operand(v.topk_ids), _operand(v.topk_weights), v.topk_ids.shape[1]
        r = EngineRequest(
            layer=layer,
            tokens=x.shape[0],
            top_k=top_k,
            hidden=_hidden(x),
            ids=ids,
            weights=weights,
            reply=reply,
            request_id=v.request_id,
            router_weight_on_input=v.router_weight_on_input,
            output_dtype=_output_dtype(v, x),
            digest=v.output_form == pb.OUTPUT_FORM_DIGEST,
            weights_version=v.weights_version,
            **more,
        )
        return r, self._drawing(v, r)

    def _drawing(self, v: ForwardRequestView, r: EngineRequest) -> SyntheticTensors | None:
        """What of a checked request is to be drawn; None = nothing."""
        if r.hidden is not _TO_DRAW and r.ids is not _TO_DRAW and r.weights is not _TO_DRAW:
            return None
        d, draw = SyntheticTensors(), self._generator
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


def _output_dtype(v: ForwardRequestView, x: TensorView) -> str:
    if v.output_dtype:
        return DTYPE_NAME[v.output_dtype]
    return "bf16" if x.dtype == pb.DATA_TYPE_E4M3 else DTYPE_NAME[x.dtype]


def _hidden(x: TensorView) -> Operand:
    """hidden_states, with their scales where they are e4m3: f32, whatever they are."""
    operand = _operand(x)
    if x.dtype != pb.DATA_TYPE_E4M3:
        return operand
    return operand._replace(scales=_scale_bytes(x.scales or ScalesView()).view(np.dtype("<f4")))


def _scale_bytes(s: ScalesView) -> Array:
    if s.floats is not None:
        return np.array(s.floats.values, np.float32).view(np.uint8)
    return np.frombuffer(s.raw, np.uint8)


def _operand(t: TensorView) -> Operand:
    """A checked tensor's elements in whatever spelling, or _TO_DRAW."""
    dtype = DTYPE_NAME[t.dtype]
    storage = STORAGE[dtype]
    if t.spelling == Spelling.RAW:
        return Operand(dtype, np.frombuffer(t.raw, storage))
    if t.spelling == Spelling.SYNTHETIC:
        return _TO_DRAW
    if t.spelling == Spelling.NONE:
        return Operand(dtype, np.empty(0, storage))
    if dtype in INT_DTYPES:  # they stay wide: one beyond i32 is out of range, which is found where any spelling's is
        return Operand("i64", np.array(t.ints, np.int64))
    return Operand(dtype, round_floats(np.array(t.floats, np.float32), dtype))


# ---- for the check ---------------------------------------------------------------------------------------------------


def facts_of(v: ForwardRequestView) -> RequestFacts:
    """What the message says of itself."""
    facts = RequestFacts(
        layer=v.layer,
        output_dtype=v.output_dtype,
        output_form=v.output_form,
        weight_on_input=v.router_weight_on_input,
        hidden=_tensor_facts(v.hidden_states),
        ids=_tensor_facts(v.topk_ids),
        weights=_tensor_facts(v.topk_weights),
    )
    if v.grouped is not None:
        facts.grouped = True
        facts.grouped_ids, facts.grouped_counts = len(v.grouped.expert_ids), len(v.grouped.row_counts)
        facts.grouped_each, facts.grouped_most = v.grouped.rows_per_expert, max(v.grouped.row_counts, default=0)
        facts.grouped_rows = sum(v.grouped.row_counts)
    if v.topk_ids is not None and v.topk_ids.spelling == Spelling.SYNTHETIC:
        facts.zipf_exponent = v.topk_ids.synthetic.zipf_exponent
    return facts


def _tensor_facts(t: TensorView | None) -> TensorFacts:
    if t is None:
        return TensorFacts()
    facts = TensorFacts(present=True, dtype=t.dtype, spelling=t.spelling, rank=len(t.shape), amount=_amount(t))
    facts.shape[: min(len(t.shape), MAX_RANK)] = t.shape[:MAX_RANK]
    if t.scales is not None:
        raw, floats = memoryview(t.scales.raw).nbytes, t.scales.floats
        facts.scaled, facts.scale_block = True, t.scales.block
        facts.scale_bytes = raw if floats is None else 4 * len(floats.values)
        facts.scales_twice = bool(raw and floats is not None)
    return facts


def _amount(t: TensorView) -> int:
    if t.spelling == Spelling.RAW:
        return memoryview(t.raw).nbytes
    return len(t.data.values) if t.spelling in (Spelling.FLOATS, Spelling.INTS) else 0
