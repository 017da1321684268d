"""How requests end: what each is answered with, and the call that tells."""

from __future__ import annotations

import logging
import time

from expertd.errors import DeadlineExceededError, ExpertdError, InternalError, OverloadedError, RequestCancelledError
from expertd_server.engine.request import EngineRequest, Outcome

__all__ = ["dead_outcome", "hand_over", "reply"]

log = logging.getLogger(__name__)


def reply(r: EngineRequest, outcome: Outcome) -> None:
    """Tell.  A transport's fault must not end the engine, nor leave its caller waiting."""
    try:
        r.reply(r, outcome)
    except Exception as e:
        log.exception("layer %d: an outcome could not be handed over", r.layer.layer)
        if not isinstance(outcome, ExpertdError):
            reply(r, InternalError(f"answer of layer {r.layer.layer}: {type(e).__name__}: {e}"))


def hand_over(r: EngineRequest, message: bytes) -> None:
    """Tell, of a request whose answer is written."""
    assert r.ready is not None
    try:
        r.ready(r, message)
    except Exception as e:
        log.exception("layer %d: an answer could not be handed over", r.layer.layer)
        reply(r, InternalError(f"answer of layer {r.layer.layer}: {type(e).__name__}: {e}"))


def dead_outcome(r: EngineRequest) -> ExpertdError:
    """Of a request that left the queue without a batch."""
    if r.cancelled:
        return RequestCancelledError("request: cancelled by its caller")
    now_ns = time.monotonic_ns()
    if r.deadline_ns and not r.expired(now_ns):
        return OverloadedError.about(
            "request",
            got=f"{(r.deadline_ns - now_ns) // 1000} us left of its time",
            want="more: what was before it took longer than expected",
            remedy="try another replica",
            retry_after_us=1,
        )
    waited_ms = (now_ns - r.queued_ns) / 1e6
    return DeadlineExceededError(
        f"request of {r.tokens} tokens for layer {r.layer.layer}: its deadline passed while it waited"
        f" {waited_ms:.1f} ms in the queue; it was not computed"
    )
