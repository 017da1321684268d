"""Calls whose caller left before he was answered: a line of the log at debug each, and no trace.

gRPC tells a handler that its caller left by cancelling it.  A call that ends in that very moment fails where it is
answered, some of it in gRPC's own code after the handler: gRPC logs that as an error, with a trace, if it has not yet
seen that the caller left.  Callers with short deadlines make hundreds of such traces an hour.
"""

from __future__ import annotations

import logging

import grpc

__all__ = ["has_left", "tell_of_leaving_at_debug"]

log = logging.getLogger(__name__)

_GRPC = logging.getLogger("grpc._cython.cygrpc")


def has_left(e: BaseException | None) -> bool:
    """Whether a call failed with `e` because it was over.  What is wrong with the call itself fails before that, as
    'Failed grpc_call_start_batch', and is a fault of ours."""
    return isinstance(e, grpc.aio.InternalError) and str(e).startswith('Failed "execute_batch"')


def tell_of_leaving_at_debug() -> None:
    """From now on, in this process; may be called again."""
    _GRPC.addFilter(_others)


def _others(record: logging.LogRecord) -> bool:
    """Whether gRPC's line stays as it is."""
    if record.exc_info and has_left(record.exc_info[1]):
        log.debug("its caller left: %s", record.getMessage())
        return False
    return True
