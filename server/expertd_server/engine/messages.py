"""Messages of gRPC streams that the core reads and answers by itself (csrc/messages.cpp)."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable

import numpy as np

from expertd.common.dtypes import DTYPE_NAME
from expertd_server.engine.core import Core, InlineMessage, Outcome, library
from expertd_server.engine.delivery import Delivery
from expertd_server.engine.request import EngineRequest, Operand, Reply
from expertd_server.engine.served import ServedLayer

__all__ = ["Looked", "Messages"]

_new_bytes: Callable[[None, int], bytes] = C.pythonapi.PyBytes_FromStringAndSize
"""A bytes object whose contents are still to be written; nobody else sees it before they are."""
C.pythonapi.PyBytes_FromStringAndSize.restype = C.py_object
C.pythonapi.PyBytes_FromStringAndSize.argtypes = (C.c_char_p, C.c_ssize_t)

_READ_BY_CORE = Operand("", np.empty(0))


class Looked:
    """The message that look() read last.  For one thread at a time.

    message   its facts
    """

    def __init__(self, core: Core) -> None:
        self.message = InlineMessage()
        self.address = C.addressof(self.message)
        self._core, self._look = core, library().expertd_message_look

    def look(self, data: bytes) -> bool:
        """Whether a StreamForwardRequest holds a request with raw tensors that nothing is wrong with.  False: it holds
        something else, it is spelled or asks for something that is unusual, or it is to be refused."""
        return bool(self._look(self._core.address, data, len(data), self.address))

    def request(
        self, layer: ServedLayer, reply: Reply, caller: str, arrival_ns: int, queued_ns: int, deadline_ns: int
    ) -> EngineRequest:
        """The request that was looked at, for whoever waits for its answer; its tensors are the core's alone."""
        m = self.message
        return EngineRequest(
            layer,
            m.tokens,
            m.top_k,
            _READ_BY_CORE,
            _READ_BY_CORE,
            _READ_BY_CORE,
            reply,
            caller,
            m.request_id,
            arrival_ns,
            queued_ns,
            deadline_ns,
            bool(m.router_weight_on_input),
            DTYPE_NAME[m.out_dtype],
        )


class Messages:
    """Of one engine.  number_of: a caller's number in the core."""

    def __init__(self, core: Core, delivery: Delivery, number_of: Callable[[str], int]) -> None:
        self._core, self._delivery, self._number_of = core, delivery, number_of
        self._submit = library().expertd_message_submit
        # While delivery.lock is held:
        self._handle, self._outcome = C.c_uint64(), Outcome()
        self._out = tuple(map(C.addressof, (self._handle, self._outcome)))

    def looked(self) -> Looked:
        """For one thread."""
        return Looked(self._core)

    def submit(
        self,
        looked: Looked,
        data: bytes,
        caller: str,
        begun_ns: int,
        deadline_ns: int,
        under_way: Callable[[], EngineRequest],
    ) -> bytes | None:
        """Put the request that `data` holds, and that was `looked` at, into its queue: between two sleeps every
        function is run out of cold caches, so this is one.

        The answer, where it is there at once.  None: its EngineRequest, which under_way() makes, will be told.  Raises
        the error that refuses it."""
        answer = _new_bytes(None, looked.message.answer_bytes)
        number, delivery, outcome = self._number_of(caller), self._delivery, self._outcome
        with delivery.lock:
            refused = self._submit(
                self._core.address, looked.address, data, answer, number, begun_ns, deadline_ns, *self._out
            )
            if not refused and not outcome.handle:
                delivery.wait_for(self._handle.value, under_way(), data, answer)
                return None
            if not refused and not outcome.reason:
                return answer
            raise outcome.error()
