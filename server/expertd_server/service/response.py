"""How an outcome becomes values of the wire."""

from __future__ import annotations

import logging

from expertd.codec import ForwardResponseView, TensorView
from expertd.common.dtypes import DTYPE_NUMBER
from expertd.errors import ExpertdError, InternalError
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.report import RequestReport, stages_of
from expertd_server.engine.request import Answer, EngineRequest, Outcome

__all__ = ["error_of", "report_of", "response_view"]

log = logging.getLogger(__name__)


def response_view(r: EngineRequest, a: Answer, load: pb.Load) -> ForwardResponseView:
    """The answer as a message; its output is a view, valid as long as the answer's."""
    v = ForwardResponseView(
        r.request_id, routes_computed=a.routes_computed, load=load, weights_version=a.weights_version
    )
    v.timing = pb.Timing(
        decode_ns=r.queued_ns - r.arrival_ns,
        queue_ns=a.queue_ns,
        copy_in_ns=a.stages.copy_in_ns,
        kernel_ns=a.stages.kernel_ns,
        copy_out_ns=a.stages.copy_out_ns,
        encode_ns=a.encode_ns,
        batch_tokens=a.batch_tokens,
        batch_requests=a.batch_requests,
        backend=a.backend,
        arrival_ns=r.arrival_ns,
    )
    if a.digest is not None:
        v.digest = pb.Digest(sum=a.digest[0], sum_of_squares=a.digest[1], crc32=a.digest[2])
    else:
        v.output = TensorView.of_piece(DTYPE_NUMBER[r.output_dtype], (r.tokens, r.layer.hidden_size), a.output)
    return v


def report_of(r: EngineRequest, outcome: Outcome, answered_ns: int) -> RequestReport:
    """The way of a request that is answered."""
    head = (r.trace, r.transport, r.layer.layer, r.tokens, r.top_k)
    if isinstance(outcome, ExpertdError):
        return RequestReport(*head, outcome.reason, "", 0, 0, r.arrival_ns, answered_ns, ())
    s, taken = outcome.stages, r.queued_ns
    stages = stages_of(taken, outcome.queue_ns, s.copy_in_ns, s.kernel_ns, answered_ns)
    batch = (outcome.batch_tokens, outcome.batch_requests)
    counted = s if outcome.batch_requests else None  # a request of no tokens has no batch
    return RequestReport(*head, "", outcome.backend, *batch, r.arrival_ns, answered_ns, stages, counted)


def error_of(e: Exception, what: str) -> ExpertdError:
    """The row that answers `e`; a fault of our own is logged and becomes InternalError."""
    if isinstance(e, ExpertdError):
        return e
    log.error("%s failed", what, exc_info=e)
    return InternalError(f"{what}: {type(e).__name__}: {e}; the log of the server has the traceback")
