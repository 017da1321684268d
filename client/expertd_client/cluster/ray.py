"""Servers of `expertctl ray up` as a cluster's list: those that serve now, as their coordinator says."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

import ray
from ray.exceptions import RayError

from expertd.errors import PlacementError
from expertd.placement import MOST_SERVERS

__all__ = ["NAMESPACE", "WATCH_S", "RayServers", "connect"]

NAMESPACE = "expertd"
"""Of all actors of `expertctl ray`, so that they are found from every job."""
WATCH_S = 1.0
"""How long a question for news waits for some."""

_REACH_S = 5.0
_PAUSE_S = 0.2
"""After the coordinator could not be asked."""


def connect(address: str | None = None) -> bool:
    """This process joins the cluster at that address, or that of RAY_ADDRESS or of this host, where it is in none.
    Whether it was in none.  Raises PlacementError where there is nothing to join."""
    if ray.is_initialized():
        return False
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if m := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", wanted):
            socket.create_connection((m[1].strip("[]"), int(m[2])), _REACH_S).close()  # Ray itself tries for 40 s
        ray.init(wanted, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except OSError as error:
        where = "none on this host" if wanted == "auto" else f"none at {wanted}: {error}"
        remedy = "ray start --head, or name another one: --ray ADDRESS, RAY_ADDRESS"
        raise PlacementError.about("Ray", got=where, want="a cluster", remedy=remedy) from None
    return True


class RayServers:
    """name: of `expertctl ray up`; address: of the Ray cluster, None = the one that this process is in, or else the one
    of RAY_ADDRESS or of this host.

    What each server holds it says itself, so experts that are moved are followed, too."""

    every_s = 0.05

    def __init__(self, name: str = "experts", address: str | None = None) -> None:
        self._name, self._address = name, address
        self._version = -1

    def read(self) -> tuple[str, ...]:
        """The addresses now; after the first time, at the next change or after WATCH_S."""
        connect(self._address)
        try:
            coordinator = ray.get_actor(self._name, namespace=NAMESPACE)
            found = ray.get(coordinator.servers.remote(self._version), timeout=WATCH_S + 5)
        except ValueError:
            raise PlacementError.about(
                "Ray", got=f"no servers {self._name!r}", want="them", remedy="expertctl ray up starts some"
            ) from None
        except AttributeError:
            raise PlacementError.about("Ray", got=f"another actor named {self._name!r}", want="a coordinator") from None
        except RayError as error:
            time.sleep(_PAUSE_S)
            raise PlacementError(
                f"Ray: the coordinator of {self._name!r} does not answer: {type(error).__name__}"
            ) from None
        if found is None:
            raise PlacementError(f"Ray: the coordinator of {self._name!r} is asking its servers")
        version, servers = _checked(self._name, found)
        if not servers and self._version == -1:
            raise PlacementError.about(f"servers {self._name!r}", got="none that serves", want="at least one")
        self._version = version
        return tuple(servers)


def _checked(name: str, found: Any) -> tuple[int, tuple[str, ...]]:
    """(version, addresses) as a coordinator says them.  Raises PlacementError."""
    version, servers = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if not isinstance(version, int) or not isinstance(servers, tuple) or len(servers) > MOST_SERVERS:
        raise PlacementError.about(f"servers {name!r}", got=f"{type(found).__name__}", want="a version and addresses")
    if not all(isinstance(each, str) for each in servers) or len(set(servers)) != len(servers):
        raise PlacementError.about(f"servers {name!r}", got="what is no list of addresses", want="each address once")
    return version, servers
