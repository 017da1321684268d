"""How requests reach the server and answers leave it.

A transport carries messages and owns their memory.  It does not deal with layers, queues or kernels.  gRPC is one; the
others are a folder here each, and an entry in table.py:

    Transport    listens, says that the server serves, drains
    Listener     a Transport besides gRPC: a client asks for it on its gRPC stream (SessionOffer), and gets a token and
                 an endpoint
    Outlet       the way back of one connection; it makes the connection's ClientConnection and gives it what it reads

Shared memory and TCP hand their connections to the engine's core (C++).  A transport in Python does this for each
connection, on a thread of its own choice, one at a time:

    session = ClientConnection(service, outlet, client, transport=NAME)   client: its address, or the name it proved
    service.check_size(nbytes)            of each message, before it is decoded; raises
    session.take(view, arrival_ns)        a decoded message; arrival_ns: time.monotonic_ns() when it came
    session.refuse(error, request_id)     for a message that could not be decoded
    session.end()                         the client has sent everything
    session.finished()                    everything is answered; raises where the server drains
    session.close()                       the connection is gone, or over

take() never waits.  `view` is a value of expertd.codec.  Its tensors are buffers of the transport's, which are read, on
the engine's thread or by a device, until the request is answered, and until its batch is over where it was cancelled:
the memory must not be changed or reused while anything refers to it.  Where take() returns a Future, the transport
reads nothing more from this client until that is done.  The session deals with what concerns all transports: ids, how
many requests are in flight, cancels, draining, counting.

The output of an answer stands in the engine's memory while outlet.answer() runs, which encodes or copies it.

A call that is one request by itself needs no session: service.forward(view, reply, caller=, arrival_ns=) takes it, and
reply(request, outcome) comes once.
"""

from __future__ import annotations

from typing import Protocol

from expertd_server.service.connection import Outlet
from expertd_server.service.offers import OfferedTransport

__all__ = ["Listener", "Outlet", "Transport"]


class Transport(Protocol):
    """Listens for clients.  Its methods may be called from any thread; several live side by side in one process."""

    def start(self) -> str:
        """Listen, and say that the server does not serve yet.  The address, for people and clients.  Raises OSError."""
        ...

    def open(self) -> None:
        """Say that the server serves."""

    def drain(self, until_s: float) -> bool:
        """Say that it does not any more, wait until everything that was taken is answered and written, and stop
        listening; service.drain() was called before.  until_s: time.monotonic() at which it closes all the same: then
        False."""
        ...

    def close(self) -> None:
        """Close at once, whatever is under way.  May be called twice."""


class Listener(Transport, OfferedTransport, Protocol):
    """A transport besides gRPC: offer() lets a client in, dismiss() ends connections of clients without a right."""

    @property
    def notice(self) -> str:
        """A sentence for people, said when the server starts; "" = none."""
        ...
