"""Who may do what: callers with tokens or certificates, from a TOML file.

    [callers.decode-pool]
    tokens = ["..."]                       # at least 16 characters; or sha256 = ["64 hex digits"] of each
    certificates = ["decode.example"]      # the common name or an alternative name of the client's certificate
    rights = ["call", "describe"]          # or ["admin"], which is all of them

A token is compared with every one that there is, in the same time whichever it is.  No text and no log repeats one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from expertd.errors import PermissionDeniedError, UnauthenticatedError
from expertd_server.service.reloading import FileError

# Why it is so: decision 103 in DECISIONS.md.
__all__ = ["ADMIN", "CALL", "DESCRIBE", "Access", "Admitted", "Client", "parse_access"]

CALL, DESCRIBE, ADMIN = "call", "describe", "admin"
_RIGHTS = (CALL, DESCRIBE, ADMIN)
_LEAST_TOKEN = 16
_KEYS = ("tokens", "sha256", "certificates", "rights")


class Client(NamedTuple):
    """One entry of the file."""

    name: str
    rights: frozenset[str]

    def may(self, right: str) -> bool:
        return right in self.rights or ADMIN in self.rights


class Admitted(str):
    """The name of a caller who was let in, with what showed who it is.

    credential   SHA-256 of its token, or the name in its certificate
    until_s      when its certificate ends, by time.time(); 0 = it showed a token
    """

    credential: bytes | str
    until_s: float

    def __new__(cls, name: str, credential: bytes | str, until_s: float = 0.0) -> Admitted:
        made = super().__new__(cls, name)
        made.credential, made.until_s = credential, until_s
        return made


class Access:
    """A file's entries."""

    def __init__(self, tokens: Mapping[bytes, Client], certificates: Mapping[str, Client]) -> None:
        self._tokens, self._certificates = dict(tokens), dict(certificates)
        self._callers = {c.name: c for c in (*tokens.values(), *certificates.values())}

    def admit(
        self, token: str | None, certificates: Iterable[str], right: str, until_s: Callable[[], float] = lambda: 0.0
    ) -> Admitted:
        """The caller.  until_s: when its certificate ends.  Raises UnauthenticatedError or PermissionDeniedError."""
        found = self._find(token, certificates)
        if found is None:
            shown = "a token that is not known" if token is not None else "no token, and no certificate that is known"
            raise UnauthenticatedError.about("caller", got=shown, want="metadata `authorization: Bearer TOKEN`")
        credential, caller = found
        admitted = Admitted(caller.name, credential, until_s() if isinstance(credential, str) else 0.0)
        self.check(admitted, right)
        return admitted

    def name_of(self, token: str | None, certificates: Iterable[str]) -> str:
        """Of the caller that shows this, whatever its rights; "" = it is not known."""
        found = self._find(token, certificates)
        return "" if found is None else found[1].name

    def check(self, admitted: str, right: str) -> None:
        """Raises what admit() raises, for a caller that was let in before: by its name and, of an Admitted, by the
        credential that it showed then."""
        name = str(admitted)
        caller = self._callers.get(name)
        if caller is None:
            raise UnauthenticatedError(f"caller {name}: is let in no more; want a token or certificate that is known")
        if isinstance(admitted, Admitted):
            shown = admitted.credential
            known = self._tokens.get(shown) if isinstance(shown, bytes) else self._certificates.get(shown)
            if known is None or known.name != name:
                raise UnauthenticatedError(
                    f"caller {name}: what it showed is let in no more; want a token or certificate that is known"
                )
            if admitted.until_s and time.time() > admitted.until_s:
                raise UnauthenticatedError(f"caller {name}: its certificate has expired; want one that is valid")
        if not caller.may(right):
            raise PermissionDeniedError.about(
                f"caller {name}", got=f"rights {', '.join(sorted(caller.rights)) or 'none'}", want=right
            )

    def _find(self, token: str | None, certificates: Iterable[str]) -> tuple[bytes | str, Client] | None:
        found = None
        if token is not None:
            digest = hashlib.sha256(token.encode()).digest()
            for known, caller in self._tokens.items():
                if hmac.compare_digest(known, digest):
                    found = known, caller
            return found  # a wrong token is not mended by a certificate
        return next(((name, c) for name in certificates if (c := self._certificates.get(name)) is not None), None)


def parse_access(data: Sequence[bytes]) -> Access:
    """From the bytes of the file.  Raises FileError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
    try:
        table = tomllib.loads(data[0].decode())
    except (ValueError, RecursionError):  # no TOML, no UTF-8, a number of thousands of digits; brackets in brackets
        raise FileError("the file of callers is no TOML") from None
    callers = table.get("callers")
    if not isinstance(callers, dict) or not callers or set(table) != {"callers"}:
        raise FileError("the file of callers holds no callers, want [callers.NAME] for each and nothing else")
    tokens: dict[bytes, Client] = {}
    certificates: dict[str, Client] = {}
    for name, entry in callers.items():
        caller, digests, names = _entry(name, entry)
        for other in (*(tokens.get(d) for d in digests), *(certificates.get(n) for n in names)):
            if other is not None:
                raise FileError(f"callers.{name}: has a token or certificate that callers.{other.name} has, too")
        tokens |= dict.fromkeys(digests, caller)
        certificates |= dict.fromkeys(names, caller)
    return Access(tokens, certificates)


def _entry(name: str, entry: Any) -> tuple[Client, list[bytes], list[str]]:
    where = f"callers.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_.@/-]{1,64}", name) or not isinstance(entry, dict):
        raise FileError(f"{where[:80]!r}: want [callers.NAME] with a name of up to 64 letters, digits and ._@/-")
    for key, value in entry.items():
        if key not in _KEYS:
            raise FileError(f"{where}: has the key {key!r:.40}, want {', '.join(_KEYS)}")
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise FileError(f"{where}.{key}: want a list of texts")
    rights = entry.get("rights", [])
    if not rights or not set(rights) <= set(_RIGHTS):
        raise FileError(f"{where}.rights: got {rights!r:.80}, want some of {', '.join(_RIGHTS)}")
    digests = []
    for token in entry.get("tokens", []):
        if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            raise FileError(f"{where}.tokens: one has {len(token)} characters, want {_LEAST_TOKEN} or more of ASCII")
        digests.append(hashlib.sha256(token.encode()).digest())
    for text in entry.get("sha256", []):
        if not re.fullmatch(r"[0-9a-f]{64}", text):
            raise FileError(f"{where}.sha256: one is no 64 hex digits")
        digests.append(bytes.fromhex(text))
    names = list(entry.get("certificates", []))
    if not digests and not names:
        raise FileError(f"{where}: has neither a token nor a certificate")
    return Client(name, frozenset(rights)), digests, names
