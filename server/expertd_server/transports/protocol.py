"""The one seam of the server: how requests come in and answers go out.

A transport moves messages and owns their memory; layers, queues and kernels are not its business.  Adding one (a ring
in shared memory, a framed TCP channel, CUDA IPC) is one file here with two things:

    Transport    a way in: where it listens, when it says that the server serves, how it drains
    Outlet       the way back of one connection; it makes the connection's Session and gives it what it reads

For each connection, on a thread of the transport's choice (one at a time):

    session = service.session(outlet, caller)         caller: the peer's address, or its name where it proved one
    service.check_size(nbytes)                        of each message, before it is decoded; raises
    session.take(view, arrival_ns, into=, memory=)    a decoded message; arrival_ns: time.monotonic_ns() when it came
    session.refuse(error, request_id)                 for a message that could not be decoded
    session.end()                                     the caller has sent everything
    session.finished()                                everything is answered; raises where the server drains
    session.close()                                   the connection is gone, or over

What take() gets:
    view     a value of expertd.codec.  Its tensors are buffers of the transport's and are read at any time until
             released(memory) is called: on the engine's thread, perhaps by a device.  What a peer could still write to
             is checked after it was copied, so a change spoils its own request and no other.
    into     None, or where the output is to lie: then the engine writes it there, converted, and the transport need not
             look at the answer's bytes (a slot that the caller reads).  Else the output stands in the engine's memory
             while outlet.answer() runs, which encodes or copies it.
    memory   the transport's own name for that memory, or None.  released(memory) comes exactly once, whatever became of
             the request: answered, refused, failed, expired, or cancelled, and then perhaps long after the cancel was
             answered, because its batch was under way.  Before every request's memory was released no connection may be
             unmapped.

take() never waits.  Where it returns a Future, nothing more is read from this caller until that is done.  Whatever
concerns all transports (ids, how many are in flight, cancels, draining, counting) is done by the session.

A call that is one request by itself needs no session: service.forward(view, reply, caller=, arrival_ns=) takes it, and
reply(request, outcome) comes once.
"""

from __future__ import annotations

from typing import Protocol

from expertd_server.service.session import Outlet

__all__ = ["Outlet", "Transport"]


class Transport(Protocol):
    """A way in.  From any thread; several live side by side in one process."""

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
