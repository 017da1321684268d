"""Messages of gRPC streams that the core reads and answers by itself (csrc/messages.cpp)."""

from __future__ import annotations

import ctypes as C
import time
from collections.abc import Callable

from expertd.errors import DeadlineExceededError, OverloadedError
from expertd_server.engine.admission import overloaded, too_late
from expertd_server.engine.core import FORM_BYTES, Core, InlineMessage, library
from expertd_server.engine.delivery import Delivery
from expertd_server.engine.request import Request

__all__ = ["Looked", "Messages"]

_new_bytes: Callable[[None, int], bytes] = C.pythonapi.PyBytes_FromStringAndSize
"""A bytes object whose contents are still to be written; nobody else sees it before they are."""
C.pythonapi.PyBytes_FromStringAndSize.restype = C.py_object
C.pythonapi.PyBytes_FromStringAndSize.argtypes = (C.c_char_p, C.c_ssize_t)


class Looked:
    """The message that look() read last.  For one thread at a time.

    message   its facts
    """

    def __init__(self) -> None:
        memory = bytearray(C.sizeof(InlineMessage))
        self.message = InlineMessage.from_buffer(memory)
        self.address = C.addressof(self.message)
        self._form = memoryview(memory)[:FORM_BYTES]
        self._look = library().expertd_message_look

    def look(self, data: bytes) -> bytes | None:
        """What a StreamForwardRequest has in common with all that are checked alike: layer, shapes, dtypes.  None: it
        holds something else than a request with raw tensors, or is spelled or asks for something that is unusual."""
        return self._form.tobytes() if self._look(data, len(data), self.address) else None


class Messages:
    """Of one engine.  number_of: a caller's number in the core."""

    def __init__(self, core: Core, delivery: Delivery, number_of: Callable[[str], int]) -> None:
        self._core, self._delivery, self._number_of = core, delivery, number_of

    def looked(self) -> Looked:
        """For one thread."""
        return Looked()

    def submit(self, r: Request, looked: Looked, data: bytes) -> bool:
        """Put `r`, which `data` holds that was `looked` at, into its line.  r.ready or r.reply gets what becomes of it,
        maybe before this returns; r.hidden, r.ids and r.weights are not looked at.  Raises OverloadedError and
        DeadlineExceededError.  False: it is refused for another reason, which submit() of the engine tells."""
        answer = _new_bytes(None, looked.message.answer_bytes)
        reason, after_us = self._delivery.submit_message(r, looked.address, data, answer, self._number_of(r.caller))
        if reason == OverloadedError.reason:
            raise overloaded(r.deadline_ns, time.monotonic_ns(), 1000 * after_us)
        if reason == DeadlineExceededError.reason:
            raise too_late()
        return not reason
