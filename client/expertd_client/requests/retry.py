"""When a failed request is sent again: never, unless the caller says so.

The experts of a layer are a pure function of the request, so sending it again is safe; it still doubles the server's
work and hides trouble, and only the caller knows what his time is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd.errors import ExpertdError

__all__ = ["NEVER", "Retry", "pause_s"]


@dataclass(frozen=True, slots=True)
class Retry:
    """Tries again after errors of the table that are retryable, within the request's own timeout.

    attempts       tries in all; 1 = no second one
    pause_s        before the second try; doubled for each one after it
    max_pause_s    largest pause; a server that asks for a longer one (retry_after_us) gets it
    """

    attempts: int = 3
    pause_s: float = 0.02
    max_pause_s: float = 1.0


NEVER = Retry(attempts=1)


def pause_s(retry: Retry, error: ExpertdError, attempt: int, left_s: float | None) -> float | None:
    """Seconds to wait before the next try after try number `attempt` (from 1) failed; None = give up.

    left_s: what is left of the request's time; None = unlimited.  A pause that would outlast it is the end.
    """
    if attempt >= retry.attempts or not error.retryable:
        return None
    pause = max(min(retry.pause_s * 2.0 ** (attempt - 1), retry.max_pause_s), error.retry_after_us * 1e-6)
    return pause if left_s is None or pause < left_s else None
