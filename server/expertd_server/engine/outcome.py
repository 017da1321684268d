"""How requests end: what each is answered with, and the call that tells."""

from __future__ import annotations

import logging

from expertd.errors import ExpertdError, InternalError
from expertd_server.engine.request import EngineRequest, Outcome

__all__ = ["hand_over", "reply"]

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
