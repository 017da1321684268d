"""Where a placement comes from: a value, a file, a name.  None of them is a database, and a cluster follows each while
it runs.

    ["10.0.0.1:50051", "10.0.0.2:50051"]    addresses: each server says itself what it holds
    Placement(...)                        expertd.placement: who holds what
    PlacementFile("placement.json")       its JSON, read again when it changes
    Dns("experts.svc:50051")               every address behind a name (a headless service), resolved again
    RayServers("experts")                 those of `expertctl ray up` (expertctl.ray)
    EndpointSlices("experts")             the ready endpoints of a Kubernetes service (cluster.kubernetes)
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from expertd.common.files import read_file
from expertd.errors import PlacementError
from expertd.placement import MOST_BYTES, Placement
from expertd_client.cluster.members import Targets
from expertd_client.transports.address import PORT

__all__ = ["Dns", "Fixed", "PlacementFile", "Source", "publish", "source_of"]


@runtime_checkable
class Source(Protocol):
    """every_s: how often it is read; infinite = once.  What it says replaces what it said before; where it raises
    PlacementError or OSError, that stays in force."""

    every_s: float

    def read(self) -> Targets:
        """What it says now.  May take a while: it is called in a thread."""
        ...


class Fixed:
    """What never changes."""

    every_s = float("inf")

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        if not isinstance(targets, Placement) and len(set(targets)) != len(targets):
            raise PlacementError.about("servers", got=list(targets), want="each address once")

    def read(self) -> Targets:
        return self._targets


class PlacementFile:
    """A placement's JSON.  A new one is to be renamed over the old one, so that no half of it is read; a smaller epoch
    than the one in force is refused."""

    def __init__(self, path: str | os.PathLike[str], every_s: float = 0.25) -> None:
        self.every_s = every_s
        self._path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._placement: Placement | None = None

    def read(self) -> Targets:
        state = self._path.stat()
        seen = (state.st_ino, state.st_size, state.st_mtime_ns)
        if self._placement is None or seen != self._seen:
            placement = Placement.from_json(read_file(self._path, MOST_BYTES))
            if self._placement is not None and placement.epoch < self._placement.epoch:
                raise PlacementError.about(
                    f"{self._path}: epoch", got=placement.epoch, want=f"at least {self._placement.epoch}, in force now"
                )
            self._placement, self._seen = placement, seen
        return self._placement


def publish(path: Path, placement: Placement) -> None:
    """Write it for PlacementFile, by renaming, so that nobody reads half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(placement.to_json())
    os.chmod(name, 0o644)
    os.replace(name, path)


class Dns:
    """Every address that a name has: "experts.svc:50051"; without a port it is 50051."""

    def __init__(self, target: str, every_s: float = 1.0) -> None:
        self.every_s = every_s
        m = re.fullmatch(r"([^:/\s]+)(?::(\d+))?", target)
        if m is None:
            raise PlacementError.about("DNS name", got=repr(target), want='"name" or "name:port"')
        self._host, self._port = m[1], int(m[2] or PORT)

    def read(self) -> Targets:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        hosts = sorted({str(entry[4][0]) for entry in found})
        return tuple(f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts)


def source_of(servers: Placement | Sequence[str] | Source) -> Source:
    """The source behind what a cluster was made with."""
    if isinstance(servers, str):
        raise PlacementError.about(
            "servers", got=repr(servers), want="a list of addresses, a Placement or a source", remedy=f"[{servers!r}]"
        )
    if isinstance(servers, Placement | Sequence):
        if not isinstance(servers, Placement) and not servers:
            raise PlacementError.about("servers", got="none", want="at least one address")
        return Fixed(servers if isinstance(servers, Placement) else tuple(servers))
    return servers
