"""What a call of a cluster gives back: the sum of what its sub-requests brought, and who did what."""

from __future__ import annotations

import numpy as np

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.call import Call
from expertd_client.cluster.flight import Flight
from expertd_client.cluster.join import Sum, join, renormalized
from expertd_client.cluster.policy import OnMissing
from expertd_client.cluster.result import ClusterResult
from expertd_client.cluster.sub_request import in_order, report

__all__ = ["answer_of"]


def answer_of(flight: Flight, call: Call, epoch: int) -> ClusterResult:
    """Of a call whose flight has landed; raises the flight's error."""
    if flight.error is not None:
        raise flight.error
    if call.traced is not None:
        call.traced.answers_are_there()
    sub_requests = in_order(flight.sub_requests)
    missing, scale = np.empty((0, 2), np.int64), None
    if flight.unserved.parts:
        gone, ids = flight.unserved.missing(), call.host.topk_ids
        missing = np.stack([np.nonzero(gone)[0], ids[gone].astype(np.int64)], axis=1)
        if call.on_missing is OnMissing.RENORMALIZE:
            scale = renormalized(ids, call.host.topk_weights, gone)
    sums = [
        Sum(sub.part.rows, sub.result.output)
        for sub in sub_requests
        if sub.result is not None and sub.result.output is not None
    ]
    lent = False
    if len(sums) == 1 and sums[0].rows is None and scale is None and call.lends(sums[0].values.dtype):
        output, lent = call.lent(sums[0].values)
    else:
        target = call.target()
        join(sums, target, scale)
        output = call.delivered(target)
    last = max(sub_requests, key=lambda sub: sub.seconds).result if sub_requests else None
    result = ClusterResult(
        output,
        None,
        sum(sub.part.routes for sub in sub_requests),
        pb.Timing() if last is None else last.timing,
        pb.Load() if last is None else last.load,
        epoch,
        sub_requests[0].result.release if lent and sub_requests[0].result is not None else None,
        0 if last is None else last.weights_version,
        parts=report(sub_requests, call.layer),
        missing=missing,
    )
    if not lent:
        for sub in sub_requests:
            if sub.result is not None:
                sub.result.release()
    flight.forget()
    if call.traced is not None:
        call.traced.end()
    return result
