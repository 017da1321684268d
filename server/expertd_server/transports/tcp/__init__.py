"""TCP, for clients on other hosts ("tcp")."""

from expertd_server.transports.tcp.listener import TcpDoor, TcpEngine

__all__ = ["TcpDoor", "TcpEngine"]
