"""How long everything in a message may be: one table, checked before a length is paid for.

    most elements    of each repeated field, most bytes of each text           MOST
    most bytes       of each small message, before its generated class reads it   MOST_BYTES
    most bytes       of a message that only the generated classes can read      ODD_BYTES

The bounds are far above what any caller needs and far below what would hold up a server: whatever comes, reading it
takes milliseconds and memory in proportion to its bytes.  `raw` bytes have no bound here: they are not copied, and a
server bounds whole messages (Limits.max_message_bytes).  A test makes every field of the contract one too long.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from expertd.errors import BadShapeError, MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb

# Why it is so: decision 92 in DECISIONS.md.
__all__ = ["MAX_RANK", "MOST", "MOST_BYTES", "ODD_BYTES", "read", "shape_too_long", "within"]

_M = TypeVar("_M")

MAX_RANK = 8
"""Extents of a shape.  What the contract asks for has two."""

MOST: dict[str, int] = {
    "Tensor.shape": MAX_RANK,
    "FloatValues.values": 1 << 20,
    "IntValues.values": 1 << 18,
    "GroupedRows.expert_ids": 1 << 16,
    "GroupedRows.row_counts": 1 << 16,
    "ForwardRequest.traceparent": 256,
    "SessionOffer.transports": 16,
    "SessionOffer.transports[]": 64,
    "SessionOffer.host_id": 256,
    "SessionAnswer.verdicts": 16,
    "SessionAnswer.token": 256,
    "SessionAnswer.endpoint": 256,
    "TransportVerdict.transport": 64,
    "TransportVerdict.reason": 4096,
    "RequestError.reason": 256,
    "RequestError.message": 1 << 16,
    "Timing.backend": 256,
}
"""Most elements of a repeated field, most bytes of a text; "[]": of each text of a repeated field.  Of
what travels on Forward and StreamForward, and of other requests; Describe's answer grows with the model's layers."""

MOST_BYTES: dict[type[Any], int] = {
    pb.FloatValues: (4 << 20) + 8,
    pb.IntValues: 1 << 20,  # a small id takes a byte or two, -1 takes 10
    pb.SyntheticValues: 256,
    pb.GroupedRows: 1 << 20,
    pb.CancelRequest: 256,
    pb.Digest: 256,
    pb.Timing: 1024,
    pb.Load: 256,
    pb.RequestError: 1 << 17,
    pb.DescribeRequest: 256,
}
"""Unknown fields of a newer caller included."""

_SHORT = 256
"""A small message of so many bytes holds nothing that is too long."""

ODD_BYTES = 1 << 18
"""Of a message that the reader in C++ leaves to the generated classes, which may take 40 bytes of memory for each."""


_GO_ON = bytes(range(0x80, 0x100))
"""Bytes of a varint that are not its last."""


def read(cls: type[_M], data: Any) -> _M:
    """`cls.FromString(data)` of a small message.  Raises MalformedMessageError where it is too long or holds too much,
    DecodeError where it is none."""
    most = MOST_BYTES[cls]
    if len(data) > most:
        raise MalformedMessageError.about(_name(cls), got=f"{len(data)} bytes", want=f"at most {most}")
    if len(data) > ODD_BYTES and (cls is pb.IntValues or cls is pb.FloatValues):
        _count(_name(cls), data, 4 if cls is pb.FloatValues else 0)
    message: _M = cls.FromString(data)  # type: ignore[attr-defined]
    if len(data) > _SHORT:
        within(message)
    return message


def _count(name: str, data: Any, size: int) -> None:
    """Raises MalformedMessageError where `data` is not one packed field, as serializers write it, or one of too many
    numbers: read one by one, these cost 10 to 25 times what it takes to count them.  size: of each, 0 = varints."""
    end = next((i for i in range(1, 6) if data[i] < 0x80), 6) + 1
    length = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[1:end]))
    if data[0] != 0x0A or end + length != len(data):
        got = f"{len(data)} bytes that are not one packed field"
        raise MalformedMessageError.about(f"{name}.values", got=got, want=f"at most {ODD_BYTES} of such")
    _check(f"{name}.values", length // size if size else len(bytes(data[end:]).translate(None, _GO_ON)), "elements")


def within(message: Any) -> None:
    """Raises BadShapeError or MalformedMessageError where something in `message` or in a message in it is too long."""
    for f, value in message.ListFields():
        name = f"{message.DESCRIPTOR.name}.{f.name}"
        if f.is_repeated:
            _check(name, len(value), "elements")
            if f.type == FieldDescriptor.TYPE_STRING:
                for text in value:
                    _check(f"{name}[]", len(text.encode()), "bytes")
            elif f.message_type is not None:
                for each in value:
                    within(each)
        elif f.type == FieldDescriptor.TYPE_STRING:
            _check(name, len(value.encode()), "bytes")
        elif f.message_type is not None:
            within(value)


def shape_too_long(got: str) -> BadShapeError:
    """The refusal of a shape that is longer than any tensor's; got: how long, in words."""
    return BadShapeError.about("Tensor.shape", got=got, want=f"at most {MAX_RANK} extents")


def _check(name: str, length: int, unit: str) -> None:
    most = MOST.get(name)
    if most is None or length <= most:
        return
    if name == "Tensor.shape":
        raise shape_too_long(f"{length} extents")
    raise MalformedMessageError.about(name, got=f"{length} {unit}", want=f"at most {most}")


def _name(cls: type[Any]) -> str:
    return str(cls.DESCRIPTOR.name)
