"""Tokens that a session gives out and another channel takes: each once, for a while."""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["Tokens", "has_share"]

_T = TypeVar("_T")

_BYTES = 32
_VALID_S = 10.0
_MOST = 256


def has_share(own: int, taken: int, most: int) -> bool:
    """Whether a caller who has `own` of the `taken` sessions may have one more of the `most` that there can be: as many
    as are free.  So one caller gets half of them, two a third each, and there is always room for another one."""
    return own < most - taken


class Tokens(Generic[_T]):
    """From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[_T, float]] = {}  # until when

    def issue(self, what: _T) -> str:
        """A token for `what`, in hexadecimal digits; "": too many wait for their client."""
        token = secrets.token_bytes(_BYTES)
        with self._lock:
            self._forget()
            if len(self._open) >= _MOST:
                return ""
            self._open[token] = what, time.monotonic() + _VALID_S
        return token.hex()

    def take(self, token: bytes) -> _T | None:
        """What the token was issued for, once; None: it is not valid.  Compared in constant time."""
        with self._lock:
            self._forget()
            found = next((t for t in self._open if hmac.compare_digest(t, token)), None)
            return None if found is None else self._open.pop(found)[0]

    def take_said(self, said: bytes) -> _T | None:
        """take() of the hexadecimal digits that a client sent; None where they are anything else."""
        if not re.fullmatch(rb"[0-9a-f]{64}", said):  # fromhex() takes spaces, too
            return None
        return self.take(bytes.fromhex(said.decode("ascii")))

    def waiting(self) -> Sequence[_T]:
        """What tokens that nobody has used yet are for."""
        with self._lock:
            self._forget()
            return [what for what, _ in self._open.values()]

    def drop(self, unwanted: Callable[[_T], bool]) -> None:
        """Tokens that are not valid any more."""
        with self._lock:
            for token in [t for t, (what, _) in self._open.items() if unwanted(what)]:
                del self._open[token]

    def _forget(self) -> None:
        now = time.monotonic()
        for token in [t for t, (_, until_s) in self._open.items() if until_s < now]:
            del self._open[token]
