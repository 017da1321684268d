"""What a client of one server is made of: a transport, and an exchange over it.

Its imports are a half of the library, so ExpertClient imports this module when the first client is made.
"""

from __future__ import annotations

from expertd.shm.layout import ENTRIES
from expertd_client.exchange.exchange import Exchange
from expertd_client.requests.deadline import ThreadAlarm
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.protocol import Transport
from expertd_client.transports.table import blocking_transports

__all__ = ["ENTRIES", "connect"]


def connect(server: str | Transport, unary: bool, credentials: Credentials | None) -> tuple[Transport, Exchange]:
    """For ExpertClient, whose arguments these are.  Nothing is sent yet."""
    transport: Transport
    if isinstance(server, str):
        offers = blocking_transports(server, credentials)
        transport = GrpcTransport(server, unary=unary, credentials=credentials, offers=offers)
    else:
        transport = server
    return transport, Exchange(transport, ThreadAlarm)
