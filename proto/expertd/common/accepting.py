"""Accepting connections where the process may have no descriptor left.

A connection that cannot be accepted stays in the backlog, and its listening socket stays readable: whoever asks again
at once uses a whole core, as long as somebody else keeps the descriptors.  So the socket rests for a moment.  The
connections wait meanwhile; they are let in as soon as descriptors are free.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time

__all__ = ["REST_S", "Accepting", "is_shortage", "tell_shortage"]

log = logging.getLogger(__name__)

REST_S = 0.1
"""After a connection that could not be accepted."""
_TOLD_EVERY_S = 60.0
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_told_s: dict[str, float] = {}
_telling = threading.Lock()


def is_shortage(error: OSError) -> bool:
    """Whether the process, or the host, lacks what one more connection needs."""
    return error.errno in _SHORTAGES


def tell_shortage(what: str, error: OSError) -> None:
    """Logs it, at most once a minute for each `what`: who comes."""
    now = time.monotonic()
    with _telling:
        if now - _told_s.get(what, -_TOLD_EVERY_S) < _TOLD_EVERY_S:
            return
        _told_s[what] = now
    log.warning("%s wait to be let in: %s (ulimit -n)", what, error.strerror or error)


class Accepting:
    """A listening socket, not blocking, among what `poll` waits for.  what: who comes, for the log.

    Used by one thread: timeout_ms() before each poll, accept() where the socket is readable.
    """

    def __init__(self, listener: socket.socket, poll: select.poll, what: str) -> None:
        self._listener, self._poll, self._what = listener, poll, what
        self._rests_until_s: float | None = None
        poll.register(listener.fileno(), select.POLLIN)

    def accept(self) -> socket.socket | None:
        """The next connection; None: it has gone, or none can be had and the socket rests."""
        try:
            return self._listener.accept()[0]
        except OSError as e:
            if is_shortage(e):
                tell_shortage(self._what, e)
                self._poll.unregister(self._listener.fileno())
                self._rests_until_s = time.monotonic() + REST_S
            return None

    def timeout_ms(self, otherwise_ms: float | None = None) -> float | None:
        """How long to poll.  None: for ever."""
        if self._rests_until_s is None:
            return otherwise_ms
        left_ms = (self._rests_until_s - time.monotonic()) * 1000
        if left_ms <= 0:
            self._rests_until_s = None
            self._poll.register(self._listener.fileno(), select.POLLIN)
            return otherwise_ms
        return left_ms if otherwise_ms is None else min(left_ms, otherwise_ms)
