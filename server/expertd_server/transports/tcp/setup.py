"""The listener for TCP, made of the server's options.  See Listen in transports/table.py."""

from __future__ import annotations

from collections.abc import Sequence

from expertd_kernels.sources.source import LayerInfo
from expertd_server.config.serve import ServeConfig
from expertd_server.engine.tcp_connections import TcpBounds
from expertd_server.service.service import Service
from expertd_server.transports.listening import listening
from expertd_server.transports.security import Security, tls_context
from expertd_server.transports.tcp.listener import TcpListener

__all__ = ["tcp_listener"]

_MOST_BYTES = 1 << 30
"""Of messages and answers of all connections together, at least."""


def tcp_listener(config: ServeConfig, service: Service, infos: Sequence[LayerInfo]) -> TcpListener | str:
    """For clients on any host, with TLS where gRPC has it."""
    del infos
    where = config.tcp_where
    if where is None:
        if config.tcp == "off":
            return "the server has it off (--tcp off); --tcp on switches it on"
        return (
            "the server has it off (no --tcp-listen); --tcp on switches it on, --tcp-listen HOST:PORT at that address"
        )
    security = Security(config.tls_cert, config.tls_key, config.tls_client_ca)
    most = service.limits.max_message_bytes
    bounds = TcpBounds(most, max(_MOST_BYTES, 4 * most), config.max_in_flight)
    with listening("--tcp-listen", where):
        listener = TcpListener(service.engine, where, bounds, tls=tls_context(security, service.metrics.reloaded))
        listener.start()
    return listener
