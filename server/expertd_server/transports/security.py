"""TLS, and who a call is from: what gRPC knows of it, in the words of service/access.py.

Certificates are read again when their files change, before the handshake of a new connection; connections that stand
stay.  Tokens and certificates are looked at when a call begins, and every half second on streams and sessions that
stand: whether the file of callers still has them, and whether the certificate has expired.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from expertd.common.files import named
from expertd.errors import ExpertdError
from expertd_server.service.access import CALL, Access, parse_access
from expertd_server.service.reloading import FileError, Reloading
from expertd_server.transports.x509 import certificate_until_s

# Why it is so: decision 153 in DECISIONS.md.
__all__ = ["Gate", "Security", "check_tls", "tls_context", "tls_credentials"]

Told = Callable[[str, bool], None]

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

_SETTLE_S = 0.05
"""gRPC asks for certificates under a lock, and begins the handshake after it, with what was made of those before: new
ones free that, and a handshake that has just begun would end the process.  So new ones are told so much later, while
nobody else may ask."""


class Security(NamedTuple):
    """Of a gRPC server.  certificate, key: PEM files, None = plain text; client_ca: callers need a certificate that one
    of these signed; callers: the file of service/access.py, None = everybody who can connect."""

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    callers: Path | None = None
    reflection: bool = True
    health: bool = True
    kserve: bool = False
    channelz: bool = False


def tls_credentials(
    s: Security, told: Told, until: Callable[[float], None] = lambda until_s: None
) -> grpc.ServerCredentials | None:
    """None = plain text.  until: called with when each certificate that is used ends, by time.time().  Raises
    FileError."""
    if s.certificate is None or s.key is None:
        return None
    paths = [s.certificate, s.key, *([s.client_ca] if s.client_ca else [])]

    def load(data: Sequence[bytes]) -> Any:
        made = _configuration(paths, data)
        found = _CERTIFICATE.search(data[0])  # the first is the server's own, those of authorities follow
        if found is not None:
            until(certificate_until_s(found[0]))
        return made

    held: Reloading[Any] = Reloading("tls", paths, load, told, every_s=0.0)
    seen = held.generation

    def fetch() -> Any:
        """gRPC asks before each handshake; None = as before."""
        nonlocal seen
        held.current()
        if held.generation == seen:
            return None
        seen = held.generation
        time.sleep(_SETTLE_S)
        return held.value

    return grpc.dynamic_ssl_server_credentials(held.value, fetch, require_client_authentication=s.client_ca is not None)


def tls_context(s: Security, told: Told) -> Callable[[], ssl.SSLContext] | None:
    """The same for sockets beside gRPC's: the context of a new connection.  None = plain text.  Raises FileError."""
    if s.certificate is None or s.key is None:
        return None
    paths = [s.certificate, s.key, *([s.client_ca] if s.client_ca else [])]
    return Reloading("tls", paths, lambda data: _context(paths, data), told, every_s=0.0).current


def check_tls(s: Security) -> None:
    """Raises FileError where its files are no certificate, key and authorities."""
    tls_context(s, lambda what, good: None)


def _context(paths: Sequence[Path], data: Sequence[bytes]) -> ssl.SSLContext:
    """Raises FileError."""
    made = _checked(paths, data)
    made.verify_mode = ssl.CERT_REQUIRED if len(data) > 2 else ssl.CERT_NONE
    return made


def _configuration(paths: Sequence[Path], data: Sequence[bytes]) -> Any:
    """Raises FileError."""
    _checked(paths, data)
    roots = data[2] if len(data) > 2 else None
    return grpc.ssl_server_certificate_configuration([(data[1], data[0])], root_certificates=roots)


def _checked(paths: Sequence[Path], data: Sequence[bytes]) -> ssl.SSLContext:
    """Of what was read of the paths, not of what lies there now.  Raises FileError where key and certificate are no
    pair, or something is no PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        with named(data[0]) as certificate, named(data[1]) as key:
            context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError, OSError) as e:
        why = getattr(e, "reason", None) or type(e).__name__
        raise FileError(f"{paths[0]} and {paths[1]}: are no certificate and its key in PEM: {why}") from None
    if len(data) > 2:
        try:
            context.load_verify_locations(cadata=data[2].decode("ascii"))
        except (ssl.SSLError, ValueError) as e:
            why = getattr(e, "reason", None) or type(e).__name__
            raise FileError(f"{paths[2]}: are no certificates in PEM: {why}") from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


class Gate:
    """Says who a call is from, and whether he may.  Raises FileError where the file of callers is not good."""

    def __init__(self, callers: Path | None, told: Told = lambda what, good: None) -> None:
        self._access: Reloading[Access] | None = None
        if callers is not None:
            self._access = Reloading("callers", [callers], lambda data: _parsed(callers, data), told)

    @property
    def guards(self) -> bool:
        """Whether there is anybody whom it would not let in."""
        return self._access is not None

    def look(self) -> None:
        """Read the file again where it has changed, as a call does; at most once a second."""
        if self._access is not None:
            self._access.current()

    def admit(self, context: Any, right: str) -> str:
        """The caller: an Admitted of the file, else the peer's address.  Raises UnauthenticatedError or
        PermissionDeniedError."""
        if self._access is None:
            return str(context.peer())
        return self._access.current().admit(_token(context), _names(context), right, lambda: _until_s(context))

    def name_of(self, context: Any) -> str:
        """For the log, of a caller who was refused: the name in the file where what it shows is known there, else the
        peer's address."""
        known = None if self._access is None else self._access.current().name_of(_token(context), _names(context))
        return known or str(context.peer())

    def refusal(self, caller: str) -> ExpertdError | None:
        """Why a caller who was let in before may not call any more."""
        if self._access is None:
            return None
        try:
            self._access.current().check(caller, CALL)
        except ExpertdError as e:
            return e
        return None


def _parsed(path: Path, data: Sequence[bytes]) -> Access:
    """Raises FileError, whose text names the file."""
    try:
        return parse_access(data)
    except FileError as e:
        raise FileError(f"{path}: {e}") from None


def _token(context: Any) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            kind, _, token = text.partition(" ")
            return token.strip() if kind.lower() == "bearer" else ""
    return None


def _until_s(context: Any) -> float:
    """When the caller's certificate ends, by time.time()."""
    found = (context.auth_context() or {}).get("x509_pem_cert", ())
    return min((certificate_until_s(pem) for pem in found), default=0.0)


def _names(context: Any) -> list[str]:
    """Of the caller's certificate, which TLS has verified."""
    found = context.auth_context() or {}
    values = (*found.get("x509_subject_alternative_name", ()), *found.get("x509_common_name", ()))
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values]
