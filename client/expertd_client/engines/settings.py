"""Who computes an engine's experts, as its user writes it; and the one connection of a process to them.

    EXPERTD_ADDRESS=10.0.0.1:50051                      one server that holds all experts
    EXPERTD_ADDRESS=10.0.0.1:50051,10.0.0.2:50051       several that hold them together
    EXPERTD_ADDRESS=/etc/expertd/placement.json         a placement's file, followed while it changes
    EXPERTD_CLIENT='{"timeout_s": 5, "ca": "ca.pem"}'   the other options

An engine whose configuration has room for it takes the same as one mapping, {"address": ..., "timeout_s": ...}.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expertd.errors import UnsupportedCombinationError
from expertd_client.clients.client import ExpertClient
from expertd_client.clients.forwarder import Forwarder
from expertd_client.cluster import ExpertCluster, PlacementFile
from expertd_client.engines.served import Found, max_tokens_of
from expertd_client.transports.credentials import Credentials

__all__ = ["Connection", "Settings", "connection_to", "settings_of"]

ADDRESS, OPTIONS = "EXPERTD_ADDRESS", "EXPERTD_CLIENT"
_NUMBERS = ("timeout_s", "start_timeout_s")
_FLAGS = ("tls", "graphs")
_CREDENTIALS = ("ca", "certificate", "key", "token_file", "server_name")


@dataclass(frozen=True)
class Settings:
    """servers           addresses, or one path of a placement's JSON
    timeout_s         of each call: an engine has no use for a step that never ends
    start_timeout_s   how long the servers may take to come up, when the engine starts
    credentials       TLS and a token; None = plain text
    graphs            full CUDA graphs contain the calls (vLLM): the one server computes on another GPU of this host
    """

    servers: tuple[str, ...]
    timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    credentials: Credentials | None = None
    graphs: bool = False

    @property
    def placement(self) -> bool:
        return len(self.servers) == 1 and self.servers[0].endswith(".json")


def settings_of(given: object, environ: Mapping[str, str]) -> Settings | None:
    """What the engine's configuration says, and else the environment; None = nobody asked for servers.

    given: None, an address, a list of them, or a mapping with "address" and options.  Raises
    UnsupportedCombinationError with what is wrong."""
    if given is not None:
        return _parsed(given if isinstance(given, Mapping) else {"address": given}, "configuration")
    if not environ.get(ADDRESS):
        return None
    try:
        options = json.loads(environ.get(OPTIONS) or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise _wrong(OPTIONS, environ[OPTIONS], 'a JSON object, as {"timeout_s": 5}')
    return _parsed({"address": environ[ADDRESS], **options}, OPTIONS)


def _parsed(options: Mapping[Any, Any], where: str) -> Settings:
    address = options.get("address")
    servers = address.split(",") if isinstance(address, str) else address
    if (
        not isinstance(servers, list | tuple)
        or not servers
        or not all(isinstance(s, str) and s.strip() for s in servers)
    ):
        raise _wrong(f"{where}: address", address, '"host:port", several of them, or the path of a placement.json')
    known = ("address", *_FLAGS, *_NUMBERS, *_CREDENTIALS)
    for key, value in options.items():
        if key not in known:
            raise _wrong(f"{where}: option", key, f"one of {', '.join(known)}")
        if key in _FLAGS and not isinstance(value, bool):
            raise _wrong(f"{where}: {key}", value, "true or false")
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if (key in _NUMBERS and not number) or (key in _CREDENTIALS and not isinstance(value, str)):
            raise _wrong(f"{where}: {key}", value, "a number of seconds > 0" if key in _NUMBERS else "a string")
    graphs = options.get("graphs", False)
    if graphs and (len(servers) > 1 or any(str(s).strip().endswith(".json") for s in servers)):
        raise _wrong(f"{where}: graphs", address, "one server, whose GPU is another one of this host")
    shown = {key: options[key] for key in _CREDENTIALS if key in options}
    tls = options.get("tls", False)
    try:
        credentials = Credentials(tls=tls, **shown) if shown or tls else None
    except ValueError as error:
        raise UnsupportedCombinationError(f"{where}: {error}") from None
    numbers = {key: float(options[key]) for key in _NUMBERS if key in options}
    return Settings(tuple(s.strip() for s in servers), credentials=credentials, graphs=graphs, **numbers)


def _wrong(subject: str, got: object, want: str) -> UnsupportedCombinationError:
    return UnsupportedCombinationError.about(subject, got=repr(got), want=want)


class Connection:
    """What all layers of a process share.  forwarder: closed when the process ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.forwarder = _forwarder(settings)

    def max_tokens(self, found: Found) -> int:
        """Most tokens of a request.  Waits until all experts of `found` have a server; raises PlacementError where
        servers are not those experts, UnavailableError where start_timeout_s is over."""
        return max_tokens_of([found], self.forwarder, self.settings.start_timeout_s)


_CONNECTIONS: dict[tuple[int, Settings], Connection] = {}
_LOCK = threading.Lock()


def connection_to(settings: Settings) -> Connection:
    """The connection of this process; made once, and again in a process that was forked from it."""
    with _LOCK:
        found = _CONNECTIONS.get((os.getpid(), settings))
        if found is None:
            found = _CONNECTIONS[os.getpid(), settings] = Connection(settings)
            atexit.register(found.forwarder.close)
        return found


def _forwarder(settings: Settings) -> Forwarder:
    more: dict[str, Any] = {"timeout_s": settings.timeout_s, "credentials": settings.credentials}
    first = next(iter(settings.servers))
    if settings.placement:
        return ExpertCluster(PlacementFile(first), **more)
    if len(settings.servers) > 1:
        return ExpertCluster(settings.servers, **more)
    return ExpertClient(first, **more)
