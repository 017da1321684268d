"""Answers, read in few steps where they look as they nearly always do: a raw output, Timing and Load.

Between two messages a program sleeps, and when it wakes nothing that it runs is in a cache: each function takes five to
seven times what it takes in a loop (docs/log/inline-path.md), so what counts is how many different ones there are.
What repeats from answer to answer, how the output begins by dtype and shape, is kept; Timing and Load are read when
somebody asks.  Everything else goes by decode_stream_response, which says what is right: tests hold this to it.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError

from expertd import bounds
from expertd.codec.decode import decode_stream_response
from expertd.codec.encode import tensor_head
from expertd.codec.scan import OddError, size, varint
from expertd.codec.values import ForwardResponseView, Spelling, StreamResponseView, TensorView
from expertd.errors import BadResponseError, ExpertdError
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["Told", "UsualAnswer", "UsualAnswers"]

_M = TypeVar("_M", pb.Timing, pb.Load)


class UsualAnswer:
    """A ForwardResponse whose output is raw bytes, without scales.

    dtype, shape   of the output; nobody has checked them against its bytes
    message        what it came in; the output stands from `begin` to `end`
    told           what the server says of its time and its load
    weights_version  that computed it; 0 = not said
    """

    __slots__ = (
        "begin",
        "dtype",
        "end",
        "message",
        "request_id",
        "routes_computed",
        "shape",
        "told",
        "weights_version",
    )

    def __init__(
        self,
        request_id: int,
        dtype: int,
        shape: tuple[int, ...],
        message: bytes,
        begin: int,
        end: int,
        routes_computed: int,
        told: Told,
        weights_version: int = 0,
    ) -> None:
        self.request_id, self.dtype, self.shape = request_id, dtype, shape
        self.message, self.begin, self.end = message, begin, end
        self.routes_computed, self.told, self.weights_version = routes_computed, told, weights_version

    def view(self) -> ForwardResponseView:
        """The same as decode_stream_response gives it.  Raises BadResponseError."""
        output = TensorView.of_raw(self.dtype, self.shape, memoryview(self.message)[self.begin : self.end])
        return ForwardResponseView(
            self.request_id,
            output,
            None,
            self.routes_computed,
            self.told.timing(),
            self.told.load(),
            weights_version=self.weights_version,
        )


class Told:
    """What stands behind an answer's output, read when somebody asks.  It does not keep the output."""

    __slots__ = ("_load_at", "_message", "_timing_at")

    def __init__(self, message: bytes, timing_at: int, load_at: int) -> None:
        """message: the end of the answer, up to the Load's; the Timing stands from timing_at to load_at - 2, the Load
        from load_at on."""
        self._message, self._timing_at, self._load_at = message, timing_at, load_at

    def timing(self) -> pb.Timing:
        """Raises BadResponseError where it is none."""
        return _read(pb.Timing, self._message[self._timing_at : self._load_at - 2])

    def load(self) -> pb.Load:
        """Raises BadResponseError where it is none."""
        return _read(pb.Load, self._message[self._load_at :])


def _read(cls: type[_M], data: bytes) -> _M:
    try:
        return bounds.read(cls, data)
    except (DecodeError, ExpertdError) as bad:
        raise BadResponseError.about("answer", got=f"bytes that are no {cls.__name__}", want="one") from bad


class UsualAnswers:
    """Reads the answers of one stream.  Keeps how their outputs begin, by the first bytes of that."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[bytes, int, tuple[int, ...], int]] = {}

    def read(self, data: bytes) -> StreamResponseView | UsualAnswer | None:
        """As decode_stream_response.  Of an answer as usual Timing and Load are not read yet, nor checked."""
        try:
            usual = self._usual(data)
        except (OddError, IndexError):
            usual = None
        if usual is not None:
            return usual
        message = decode_stream_response(data)
        if isinstance(message, ForwardResponseView):
            self._remember(message.output)
        return message

    def _usual(self, data: bytes) -> UsualAnswer | None:
        if data[0] != 0x0A:
            return None
        pos, end = size(data, 1, len(data))
        if end != len(data) or data[pos] != 0x08:
            return None
        request_id, pos = varint(data, pos + 1)
        if data[pos] == 0x7A and data[pos + 1] < 0x80:  # padding
            pos += 2 + data[pos + 1]
        known = self._heads.get(data[pos : pos + _TELLING])
        if known is None or not data.startswith(known[0], pos):
            return None
        head, dtype, shape, nbytes = known
        begin = pos + len(head)
        tail = pos = begin + nbytes
        routes_computed = 0
        if data[pos] == 0x20:
            routes_computed, pos = varint(data, pos + 1)
        if data[pos] != 0x2A or data[pos + 1] >= 0x80:
            return None
        timing_at = pos + 2
        pos = timing_at + data[pos + 1]
        if data[pos] != 0x32 or data[pos + 1] >= 0x80:
            return None
        load_at = pos + 2
        load_end = pos = load_at + data[pos + 1]
        version = 0
        if pos != end and data[pos] == 0x40:
            version, pos = varint(data, pos + 1)
        if pos != end and (data[pos] != 0x7A or pos + 2 + data[pos + 1] != end):  # padding
            return None
        told = Told(data[tail:load_end], timing_at - tail, load_at - tail)
        return UsualAnswer(request_id, dtype, shape, data, begin, tail, routes_computed, told, version)

    def _remember(self, output: TensorView | None) -> None:
        if output is None or output.spelling != Spelling.RAW or output.scales is not None:
            return
        nbytes = len(output.data)
        head = tensor_head(0x12, output.dtype, output.shape, Spelling.RAW, nbytes, 0)
        if len(self._heads) >= _HEADS:
            self._heads.clear()
        self._heads[head[:_TELLING]] = (head, output.dtype, output.shape, nbytes)


_TELLING = 7
"""Bytes of an output's head that have its tag, its size and, below 2 MiB, its dtype."""
_HEADS = 256
"""Kept at once."""
