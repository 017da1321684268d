"""The transports that a server offers besides gRPC, as far as its options allow them.

A transport is a folder here, a folder of the client, and an entry in each side's table (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from expertd_kernels.sources.source import LayerInfo
from expertd_server.config.serve import ServeConfig
from expertd_server.service.service import Service
from expertd_server.transports.protocol import Listener
from expertd_server.transports.shm.setup import gpu_listener, shm_listener
from expertd_server.transports.tcp.setup import tcp_listener

__all__ = ["TRANSPORTS", "Entry", "Listen", "listeners"]

Listen: TypeAlias = Callable[[ServeConfig, Service, Sequence[LayerInfo]], "Listener | str"]
"""Takes the options, the service that requests go to, and the layers that may be held.  Gives a listener that was
started, or a sentence for clients: why this server has none.  Raises BootError."""


class Entry(NamedTuple):
    """One transport.

    name     as in SessionOffer.transports
    listen   starts it
    """

    name: str
    listen: Listen


TRANSPORTS: list[Entry] = [
    Entry("shm", shm_listener),
    Entry("cuda_ipc", gpu_listener),
    Entry("tcp", tcp_listener),
]
"""An entry finds those before it in Service.offered."""


def listeners(config: ServeConfig, service: Service, infos: Sequence[LayerInfo]) -> Iterator[Listener]:
    """Starts each transport, enters it in `service.offered`, and yields those that listen.  Raises BootError."""
    for entry in TRANSPORTS:
        listener = service.offered[entry.name] = entry.listen(config, service, infos)
        if not isinstance(listener, str):
            yield listener
