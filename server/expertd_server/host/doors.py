"""Where a server can be reached besides gRPC, and who may: made of its options.  Refusals are sentences for clients."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence

from expertd_kernels.sources.source import LayerInfo
from expertd_server.boot.assignment import BootError, WrongOptionError
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address
from expertd_server.engine.engine import Engine
from expertd_server.engine.peers import PeerBounds
from expertd_server.service.reloading import FileError
from expertd_server.transports import channelz
from expertd_server.transports.security import Security, Told, tls_context
from expertd_server.transports.shm import ShmDoor
from expertd_server.transports.tcp import TcpDoor

__all__ = ["largest_message", "listening", "message_bytes", "security_of", "shm_door", "tcp_door"]

_MOST_BYTES = (1 << 31) - 1
"""Of a message: protobuf's and gRPC's own limit."""
_MOST_PEER_BYTES = 1 << 30
"""Of messages and answers of all sessions over TCP."""


def message_bytes(max_tokens: int, infos: Sequence[LayerInfo]) -> int:
    """What a request of max_tokens tokens needs with everything in its widest dtype, headers included."""
    widest = max(4 * i.hidden_size + 12 * i.top_k for i in infos)
    return max_tokens * widest + (64 << 10)


def largest_message(config: ServeConfig, infos: Sequence[LayerInfo]) -> int:
    """Bytes of the largest that is taken."""
    return config.max_message_bytes or min(message_bytes(config.max_tokens, infos), _MOST_BYTES)


def arena_bytes(max_tokens: int, infos: Sequence[LayerInfo]) -> int:
    """Of one session's shared memory: two of its largest requests, bf16 in and out, within bounds."""
    widest = max(4 * i.hidden_size + 12 * i.top_k for i in infos)
    return min(max(2 * max_tokens * widest, 16 << 20), 256 << 20)


def shm_door(config: ServeConfig, engine: Engine, infos: Sequence[LayerInfo]) -> ShmDoor | str:
    """The open door to shared memory, or why there is none."""
    if not config.offers_shm:
        return f"the server has it off (--shm {config.shm}, listening on {config.listen.host}); --shm on switches it on"
    door = ShmDoor(engine, arena_bytes=arena_bytes(config.max_tokens, infos), most_bytes=config.shm_memory)
    try:
        door.start()
    except OSError as e:
        return str(e)
    return door


def tcp_door(config: ServeConfig, engine: Engine, most_message: int, told: Told) -> TcpDoor | str:
    """The door to sessions over TCP, or why there is none.  Raises BootError."""
    where = config.tcp_where
    if where is None:
        return f"the server has it off (--tcp {config.tcp}, no --tcp-listen); --tcp-listen HOST:PORT switches it on"
    security = Security(config.tls_cert, config.tls_key, config.tls_client_ca)
    bounds = PeerBounds(most_message, max(_MOST_PEER_BYTES, 4 * most_message), config.max_in_flight)
    with listening("--tcp-listen", where):
        door = TcpDoor(engine, where, bounds, tls=tls_context(security, told))
        door.start()
    return door


def security_of(config: ServeConfig) -> Security:
    """Who may call gRPC, and what it serves beside expertd.v1.  Raises BootError."""
    return Security(
        config.tls_cert,
        config.tls_key,
        config.tls_client_ca,
        config.callers,
        config.reflection,
        config.health,
        config.kserve,
        _channelz(config),
    )


def _channelz(config: ServeConfig) -> bool:
    """Whether it is served.  Raises BootError where it is asked for and cannot be."""
    how, why_not = config.channelz, channelz.missing()
    if how == "on" and why_not:
        raise WrongOptionError(f"--channelz on: {why_not}")
    return how == "on" or (how == "auto" and config.listen.loopback and not why_not)


@contextlib.contextmanager
def listening(option: str, where: Address) -> Iterator[None]:
    """OSError and FileError become BootError: a port that is taken may be free later, an address that this host does
    not have, or may not listen at, is a wrong option."""
    try:
        yield
    except FileError as e:
        raise WrongOptionError(str(e)) from None
    except OSError as e:
        wrong = isinstance(e, socket.gaierror) or e.errno in (errno.EADDRNOTAVAIL, errno.EACCES)
        error = WrongOptionError if wrong else BootError
        raise error(f"{option} {where}: cannot listen there: {e.strerror or e}") from e
