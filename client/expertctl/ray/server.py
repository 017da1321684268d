"""The actor around one server.  What serves is of the package expertd_server, which nodes have and drivers need not."""

from __future__ import annotations

import importlib
from typing import Any

import ray

from expertctl.ray.spec import Place, Spec

__all__ = ["ServerActor"]


class ServerActor:
    """One server of a Spec, in a process of Ray's; Ray starts another one where it ends."""

    def __init__(self, spec: Spec, place: Place) -> None:
        self._node = str(ray.util.get_node_ip_address())
        hosted = importlib.import_module("expertd_server.commands.hosted")
        self._hosted = hosted.Hosted(spec.argv_of(place, self._node))

    def state(self) -> dict[str, Any]:
        """Watched.heard takes it."""
        return {**self._hosted.state(), "node": self._node}

    def drain(self, grace_s: float) -> bool:
        """Whether everything that was taken is answered."""
        return bool(self._hosted.drain(grace_s))
