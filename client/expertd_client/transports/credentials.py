"""What a client shows a server, and what it wants to be shown: certificates and a token, from files that may change.

    ExpertClient("experts.example:50051", credentials=Credentials(ca="ca.pem", token_file="token"))

When a file changes, later connections and calls are made on a new channel with what it holds then; streams that stand
stay on theirs.  Files that are broken, or no pair, for a moment leave things as they were.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from expertd.common.files import named, read_file
from expertd_client.transports.grpc import common

__all__ = ["Credentials", "Methods", "Rotating"]

_LOOK_S, _LINGER_S = 1.0, 600.0
"""How often files are looked at; and how long a channel without streams stays after it was replaced: unary calls may be
under way on it."""

_MOST_BYTES = 8 << 20
"""Of each file; all authorities of a system have 0.2 MiB."""


@dataclass(frozen=True)
class Credentials:
    """Paths of PEM files, but for the last two.

    tls           by certificate authorities of this system; ca, or certificate and key, mean it, too
    ca            the server's certificate is signed by one of these
    certificate, key   this client's own (mTLS)
    token_file    holds the token alone, and is sent with every call; without TLS only for addresses of this host
    server_name   the name in the server's certificate, where it is not that of the address
    """

    tls: bool = False
    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    token_file: str | os.PathLike[str] | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("credentials: got one of certificate and key, want both or none")

    @property
    def secure(self) -> bool:
        return self.tls or self.ca is not None or self.certificate is not None

    @property
    def paths(self) -> list[Path]:
        return [Path(p) for p in (self.ca, self.certificate, self.key, self.token_file) if p is not None]

    def channel(self) -> grpc.ChannelCredentials | None:
        """For gRPC, of what the files hold now.  Raises OSError; ValueError where they are no pair."""
        if not self.secure:
            return None
        ca, certificate, key = (None if p is None else _read(p) for p in (self.ca, self.certificate, self.key))
        if certificate is not None and key is not None:
            self._load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, key)
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def context(self) -> ssl.SSLContext:
        """For sockets beside a channel, of what the files hold now: as strict as the channel.  Raises OSError;
        ValueError where they are no pair."""
        if self.ca is None:
            made = ssl.create_default_context()
        else:
            with named(_read(self.ca)) as ca:
                made = ssl.create_default_context(cafile=ca)
        if self.certificate is not None and self.key is not None:
            self._load_pair(made, _read(self.certificate), _read(self.key))
        return made

    def _load_pair(self, context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
        try:
            with named(certificate) as at, named(key) as key_at:
                context.load_cert_chain(at, key_at)
        except ssl.SSLError as e:
            raise ValueError(f"credentials: {self.certificate} and {self.key} are no pair: {e.reason}") from None

    def options(self) -> list[tuple[str, Any]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call.  Raises OSError; ValueError where the file holds no token."""
        if self.token_file is None:
            return ()
        token = _read(self.token_file).decode("ascii", errors="replace").strip()
        if not token or not token.isprintable() or " " in token or not token.isascii():
            raise ValueError(f"credentials: {self.token_file}: holds no token, want one on a line of its own")
        return (("authorization", f"Bearer {token}"),)


def _read(path: str | os.PathLike[str]) -> bytes:
    """Raises OSError."""
    return read_file(path, _MOST_BYTES)


class Methods:
    """One channel and its methods.  streams: how many stand on it."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self.channel, self._metadata = channel, metadata
        self.streams = 0
        self.retired_s = 0.0
        self.stream_forward: Any = channel.stream_stream(common.STREAM_FORWARD)  # bytes in, bytes out
        self.forward: Any = channel.unary_unary(common.FORWARD)
        if metadata:
            self.stream_forward, self.forward = (_With(m, metadata) for m in (self.stream_forward, self.forward))

    def unary(self, path: str, request: Any, answer: Any) -> Any:
        """The method at `path`, which takes messages like `request` and returns those of the class `answer`."""
        method = self.channel.unary_unary(
            path, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        return _With(method, self._metadata) if self._metadata else method


class _With:
    """A method with metadata."""

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._method, self._metadata = method, metadata

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._method(*args, metadata=self._metadata, **more)

    def future(self, *args: Any, **more: Any) -> Any:
        return self._method.future(*args, metadata=self._metadata, **more)


class Rotating:
    """The newest Methods, and the older ones as long as they are used.  From any thread.

    open: a channel of (credentials or None, options); close: ends one
    """

    def __init__(
        self,
        credentials: Credentials,
        open: Callable[[grpc.ChannelCredentials | None, list[tuple[str, Any]]], Any],
        close: Callable[[Any], None],
    ) -> None:
        self._credentials, self._open, self._close = credentials, open, close
        self._lock = threading.Lock()
        self._state = self._look()
        self._now = self._make()
        self._old: list[Methods] = []
        self._next_s = time.monotonic() + _LOOK_S

    def now(self) -> Methods:
        """Of the files as they were at most a second ago."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            with self._lock:
                self._next_s = now_s + _LOOK_S
                self._refresh(now_s)
        return self._now

    def refresh(self) -> None:
        """Look now."""
        with self._lock:
            self._refresh(time.monotonic())

    def close(self) -> None:
        for methods in (self._now, *self._old):
            self._close(methods.channel)

    def _refresh(self, now_s: float) -> None:
        try:
            state = self._look()
            if state != self._state:
                new = self._make()
                if self._look() == state:
                    self._now.retired_s = now_s
                    self._old.append(self._now)
                    self._now, self._state = new, state
                else:  # they changed while they were read
                    self._close(new.channel)
        except (OSError, ValueError):
            pass  # as it was; the next look is a second later
        for methods in [m for m in self._old if not m.streams and now_s - m.retired_s > _LINGER_S]:
            self._old.remove(methods)
            self._close(methods.channel)

    def _make(self) -> Methods:
        c = self._credentials
        metadata = c.metadata()
        return Methods(self._open(c.channel(), c.options()), metadata)

    def _look(self) -> list[tuple[int, int, int]]:
        found = [os.stat(p) for p in self._credentials.paths]
        return [(s.st_mtime_ns, s.st_size, s.st_ino) for s in found]
