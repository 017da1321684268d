"""Answers of a stream, read in few steps where they look as they nearly always do: a raw output, Timing and Load.

Timing and Load are read when somebody asks.  Everything else goes by decode_stream_response, which says what is right.
"""

from __future__ import annotations

import ctypes as C
from typing import TypeVar

from google.protobuf.message import DecodeError

from expertd.codec.decode import decode_stream_response
from expertd.codec.library import RAW_ANSWER, library
from expertd.codec.values import ForwardResponseView, StreamResponseView, TensorView
from expertd.common import bounds
from expertd.errors import BadResponseError, ExpertdError
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["AnswerReader", "RawAnswer", "ServerReport"]

_M = TypeVar("_M", pb.Timing, pb.Load)


class RawAnswer:
    """A ForwardResponse whose output is raw bytes, without scales.

    dtype, shape   of the output; nobody has checked them against its bytes
    message        what it came in; the output stands from `begin` to `end`
    report         what the server says of its time and its load
    weights_version  that computed it; 0 = not said
    """

    __slots__ = (
        "begin",
        "dtype",
        "end",
        "message",
        "report",
        "request_id",
        "routes_computed",
        "shape",
        "weights_version",
    )

    def __init__(
        self,
        request_id: int,
        dtype: int,
        shape: tuple[int, int],
        message: bytes,
        begin: int,
        end: int,
        routes_computed: int,
        report: ServerReport,
        weights_version: int = 0,
    ) -> None:
        self.request_id, self.dtype, self.shape = request_id, dtype, shape
        self.message, self.begin, self.end = message, begin, end
        self.routes_computed, self.report, self.weights_version = routes_computed, report, weights_version

    def view(self) -> ForwardResponseView:
        """The same as decode_stream_response gives it.  Raises BadResponseError."""
        output = TensorView.of_raw(self.dtype, self.shape, memoryview(self.message)[self.begin : self.end])
        return ForwardResponseView(
            self.request_id,
            output,
            None,
            self.routes_computed,
            self.report.timing(),
            self.report.load(),
            weights_version=self.weights_version,
        )


class ServerReport:
    """Timing and Load of an answer, read when somebody asks.  It does not keep the output."""

    __slots__ = ("_load", "_timing")

    def __init__(self, timing: bytes, load: bytes) -> None:
        self._timing, self._load = timing, load

    def timing(self) -> pb.Timing:
        """Raises BadResponseError where it is none."""
        return _read(pb.Timing, self._timing)

    def load(self) -> pb.Load:
        """Raises BadResponseError where it is none."""
        return _read(pb.Load, self._load)


def _read(cls: type[_M], data: bytes) -> _M:
    try:
        return bounds.read(cls, data)
    except (DecodeError, ExpertdError) as bad:
        raise BadResponseError.about("answer", got=f"bytes that are no {cls.__name__}", want="one") from bad


class AnswerReader:
    """Reads the answers of one stream, on one thread at a time."""

    def __init__(self) -> None:
        lib = library()
        self._read = None if lib is None else lib.read_answer
        self._found = bytearray(RAW_ANSWER.size)
        self._address = C.addressof(C.c_char.from_buffer(self._found))
        self._unpack = RAW_ANSWER.unpack

    def read(self, data: bytes) -> StreamResponseView | RawAnswer | None:
        """As decode_stream_response.  Of a RawAnswer Timing and Load are not read yet, nor checked."""
        if self._read is None or not self._read(data, len(data), self._address):
            return decode_stream_response(data)
        number, routes, dtype, M, H, version, begin, end, timing, timing_end, load, load_end = self._unpack(self._found)
        report = ServerReport(data[timing:timing_end], data[load:load_end])
        return RawAnswer(number, dtype, (M, H), data, begin, end, routes, report, version)
