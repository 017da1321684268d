"""TCP, for clients on other hosts ("tcp")."""

from expertd_server.transports.tcp.listener import TcpEngine, TcpListener

__all__ = ["TcpListener", "TcpEngine"]
