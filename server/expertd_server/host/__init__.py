"""One server of a process: what listens, in which order it starts, drains and closes."""

from expertd_server.host.host import Host

__all__ = ["Host"]
