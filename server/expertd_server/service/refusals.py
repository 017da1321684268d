"""Lines of the log about requests that were refused or failed: who asked, and why not.

An overloaded server refuses thousands a second, and a client in a loop asks as often: of one reason and one caller
there is a line every few seconds, which says how many it stands for, and of all together a bounded number.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from expertd.errors import TABLE, Code, ExpertdError, RequestCancelledError
from expertd_server.config.logs import fields

__all__ = ["REQUEST_ID", "Refusals", "request_id_of"]

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
"""Metadata of a call: its caller's name for it."""
_GOOD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}")
_EVERY_S = 10.0
_MOST_LINES = 20
_MOST_KEYS = 512
_FAULTS = (Code.INTERNAL, Code.UNKNOWN)


def request_id_of(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """What the caller calls this call; "" where he says nothing that can stand in a log."""
    for key, value in metadata or ():
        if key == REQUEST_ID:
            return value if isinstance(value, str) and _GOOD_ID.fullmatch(value) else ""
    return ""


def traceparent_of(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """Of a call's metadata, "" where there is none."""
    found = next((value for key, value in metadata or () if key == "traceparent"), "")
    return found if isinstance(found, str) else ""


class _Line:
    """What is told of one reason and one caller.  until_s: no other line before; left: refused since the last one."""

    def __init__(self, until_s: float) -> None:
        self.until_s, self.left = until_s, 0


class Refusals:
    """From any thread.  every_s: at most one line a reason and caller, and `most` of all; clock: seconds."""

    def __init__(
        self, every_s: float = _EVERY_S, most: int = _MOST_LINES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s, self._most, self._clock = every_s, most, clock
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], _Line] = {}
        self._window_s = clock()
        self._told = self._untold = 0

    def tell(self, error: ExpertdError, caller: str, request: str = "") -> str:
        """One request of `caller` was not computed.  request: the id of the request, "" = none was given.  The id that
        its line has, "" = it has no line."""
        if isinstance(error, RequestCancelledError) or not self._may_tell(error.reason, caller, 1):
            return ""
        request = request or secrets.token_hex(8)
        self._write(
            error.code, error.reason, caller, f"request {request} of {caller}: {error.message}", request=request
        )
        return request

    def tell_many(self, reason: str, caller: str, requests: int) -> None:
        """So many requests of `caller` were answered with `reason`, one of the table of errors."""
        if reason != RequestCancelledError.reason and self._may_tell(reason, caller, requests):
            more = "one request" if requests == 1 else f"{requests} requests"
            self._write(TABLE[reason].code, reason, caller, f"{more} of {caller}", requests=requests)

    def flush(self) -> None:
        """Say how many more there were, where the time for a line has come; called now and then."""
        now = self._clock()
        due = []
        with self._lock:
            self._turn(now)
            for key, line in list(self._lines.items()):
                if now < line.until_s:
                    continue
                if line.left and self._told < self._most:
                    due.append((*key, line.left))
                    self._told += 1
                    self._lines[key] = _Line(now + self._every_s)
                elif not line.left:
                    del self._lines[key]
        for reason, caller, n in due:
            self._write(TABLE[reason].code, reason, caller, f"{n} more requests of {caller}", requests=n)

    def _may_tell(self, reason: str, caller: str, requests: int) -> bool:
        """Whether a line is due; else they are counted."""
        now = self._clock()
        with self._lock:
            self._turn(now)
            line = self._lines.get((reason, caller))
            if line is not None:  # the next one is flush()'s
                line.left += requests
                return False
            if len(self._lines) >= _MOST_KEYS or self._told >= self._most:
                self._untold += requests
                return False
            self._lines[reason, caller] = _Line(now + self._every_s)
            self._told += 1
            return True

    def _turn(self, now_s: float) -> None:
        """A new window for lines of all callers together.  Called with the lock."""
        if now_s - self._window_s < self._every_s:
            return
        self._window_s, self._told = now_s, 0
        untold, self._untold = self._untold, 0
        if untold:
            log.info("%d more requests of other clients were refused", untold, extra=fields(requests=untold))

    @staticmethod
    def _write(code: Code, reason: str, caller: str, what: str, **more: Any) -> None:
        level = logging.WARNING if code in _FAULTS else logging.INFO
        log.log(level, "%s: %s", reason, what, extra=fields(reason=reason, code=code.name, caller=caller, **more))
