"""Parity of the wire codec with the generated classes, on messages that are made field by field at the wire level.

Fields come in any order and more than once, packed, unpacked and split; submessages come in pieces; varints are longer
than they need be; unknown fields of every wire type and nested groups stand between them; texts may be no UTF-8; and
about half of the messages are then broken: cut off, bits flipped, bytes inserted or removed, sizes replaced by hostile
ones.  For each: either both readers accept it and every field is equal, or both refuse it; what the generated classes
accept and expertd.common.bounds calls too long is refused.

What is expected is spelled out here by accessors of the generated classes, so that the codec's own conversion of what
they read is under test as well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from expertd import codec
from expertd.codec import decode
from expertd.common.bounds import MAX_RANK
from expertd.errors import BadShapeError, MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb

SEEDS = 20
MESSAGES_A_SEED = 5000
"""100,000 messages in all, a quarter for each type; about 20 s on one core."""

Plain = Any  # nested tuples that compare by value

# ---- what a message says, by its generated class and by a view -------------------------------------------------------


def plain_tensor(m: Any) -> Plain:
    which = m.WhichOneof("data")
    data = b"" if which is None else m.raw if which == "raw" else getattr(m, which).SerializeToString()
    scales = None
    if m.HasField("scales"):
        typed = m.scales.floats.SerializeToString() if m.scales.HasField("floats") else None
        scales = (m.scales.block, m.scales.raw, typed)
    number = 0 if which is None else m.DESCRIPTOR.fields_by_name[which].number
    return (m.dtype, tuple(m.shape), number, data, scales)


def fields_of(message: Any) -> list[Any]:
    """Those that mean something."""
    return [f for f in message.DESCRIPTOR.fields if f.name != "padding"]


def plain_message(m: Any) -> Plain:
    """Every field of a ForwardRequest or ForwardResponse but padding, or the bytes of any other message."""
    if not isinstance(m, pb.ForwardRequest | pb.ForwardResponse):
        return (type(m).__name__, m.SerializeToString())
    out = []
    for f in fields_of(type(m)):
        value = getattr(m, f.name)
        if f.message_type is None:
            out.append(value)
        elif not m.HasField(f.name):
            out.append(None)
        else:
            out.append(plain_tensor(value) if f.message_type.name == "Tensor" else value.SerializeToString())
    return (type(m).__name__, *out)


def plain_stream(m: Any) -> Plain:
    kind = m.WhichOneof("kind")
    return None if kind is None else plain_message(getattr(m, kind))


def plain_view(view: Any) -> Plain:
    """The same of a view, field by field in the order of the contract."""
    if view is None:
        return None
    if isinstance(view, Message):
        return plain_message(view)
    message = pb.ForwardRequest if isinstance(view, codec.ForwardRequestView) else pb.ForwardResponse
    return (
        message.__name__,
        *(_plain_value(getattr(view, f.name)) for f in message.DESCRIPTOR.fields if f.name != "padding"),
    )


def _plain_value(value: Any) -> Plain:
    if isinstance(value, Message):
        return value.SerializeToString()
    if isinstance(value, codec.TensorView):
        data = value.data.SerializeToString() if isinstance(value.data, Message) else bytes(value.data or b"")
        scales = None
        if (s := value.scales) is not None:
            typed = None if s.floats is None else s.floats.SerializeToString()
            scales = (s.block, bytes(s.raw), typed)
        return (value.dtype, value.shape, value.spelling, data, scales)
    return value


Kind = tuple[type[Any], Callable[[Any], Plain], Callable[[bytes], Any], Callable[[Any], bytes], Callable[..., Any]]

KINDS: list[Kind] = [
    (
        pb.ForwardRequest,
        plain_message,
        codec.decode_forward_request,
        codec.encode_forward_request,
        partial(decode._request, stream=False),
    ),
    (
        pb.ForwardResponse,
        plain_message,
        codec.decode_forward_response,
        codec.encode_forward_response,
        partial(decode._response, stream=False),
    ),
    (
        pb.StreamForwardRequest,
        plain_stream,
        codec.decode_stream_request,
        codec.encode_stream_request,
        partial(decode._request, stream=True),
    ),
    (
        pb.StreamForwardResponse,
        plain_stream,
        codec.decode_stream_response,
        codec.encode_stream_response,
        partial(decode._response, stream=True),
    ),
]

# ---- messages at the wire level --------------------------------------------------------------------------------------

INTERESTING = (0, 1, 2, 3, 5, 127, 128, 300, 16383, 16384, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1)
UNKNOWN_NUMBERS = (12, 15, 16, 99, 2047, 2048, 19000, (1 << 29) - 1)
FIXED = {FieldDescriptor.TYPE_DOUBLE: (1, 8), FieldDescriptor.TYPE_FLOAT: (5, 4), FieldDescriptor.TYPE_FIXED32: (5, 4)}
TEXTS = (b"", b"00-4bf92f3577b34da6a3ce929d0e0e4736-01", "grün €".encode(), b"\xf0\x9f\x98\x80")
BAD_TEXTS = (b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82")


class Generator:
    """odd: how likely each unusual thing is; 0 = only what serializers write, though in any order."""

    def __init__(self, seed: int, odd: float) -> None:
        self.r = random.Random(seed)
        self.odd = odd

    def rare(self, factor: float = 1.0) -> bool:
        return self.r.random() < self.odd * factor

    def varint(self, value: int) -> bytes:
        out = bytearray()
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        if self.rare(0.3):  # longer than it need be, and once in ten longer than it may be
            out[-1] |= 0x80
            out += b"\x80" * self.r.randrange(0, 10 if self.r.random() < 0.1 else 2) + b"\0"
        return bytes(out)

    def tag(self, number: int, wire_type: int) -> bytes:
        return self.varint(number << 3 | wire_type)

    def sized(self, number: int, payload: bytes) -> bytes:
        return self.tag(number, 2) + self.varint(len(payload)) + payload

    def number(self) -> int:
        return (
            self.r.choice(INTERESTING) if self.r.random() < 0.7 else self.r.getrandbits(self.r.choice((7, 14, 32, 64)))
        )

    def message(self, d: Descriptor, depth: int = 0) -> bytes:
        chosen = [f for f in d.fields if self.r.random() < 0.6]
        oneofs: set[str] = set()
        parts = []
        for f in chosen:
            group = f.containing_oneof.name if f.containing_oneof else ""
            if group and group in oneofs and not self.rare():
                continue
            oneofs.add(group)
            parts += [self.field(f, depth) for _ in range(2 if self.rare() else 1)]
        parts += [self.unknown(depth) for _ in range(self.r.randrange(3)) if self.r.random() < 0.2]
        self.r.shuffle(parts)
        return b"".join(parts)

    def field(self, f: FieldDescriptor, depth: int) -> bytes:
        if self.rare(0.1):  # a wire type that the field does not have
            return self.unknown(depth, f.number)
        if f.message_type is not None:
            return self.sized(f.number, self.message(f.message_type, depth + 1))
        if f.type == FieldDescriptor.TYPE_BYTES:
            return self.sized(f.number, self.r.randbytes(self.r.choice((0, 1, 4, 16, 127, 128, 300))))
        if f.type == FieldDescriptor.TYPE_STRING:
            return self.sized(f.number, self.r.choice(BAD_TEXTS if self.rare(0.2) else TEXTS))
        if not f.is_repeated:
            wire_type = FIXED[f.type][0] if f.type in FIXED else 0
            return self.tag(f.number, wire_type) + self.scalar(f)
        runs = [self.r.randrange(5) for _ in range(2 if self.rare() else 1)]  # two runs: a split packed field
        return b"".join(self.repeated(f, n) for n in runs)

    def scalar(self, f: FieldDescriptor) -> bytes:
        if f.type in FIXED:
            return self.r.randbytes(FIXED[f.type][1])
        return self.varint(self.number() if self.rare(2) else self.r.randrange(7))

    def repeated(self, f: FieldDescriptor, count: int) -> bytes:
        values = [self.scalar(f) for _ in range(count)]
        if not self.rare():
            return self.sized(f.number, b"".join(values))
        wire_type = FIXED[f.type][0] if f.type in FIXED else 0
        return b"".join(self.tag(f.number, wire_type) + v for v in values)

    def unknown(self, depth: int, number: int = 0) -> bytes:
        number = number or self.r.choice(UNKNOWN_NUMBERS)
        wire_type = self.r.choice((0, 1, 2, 5, *((3, 4, 6, 7) if self.rare() else ())))
        payload = {
            0: lambda: self.varint(self.number()),
            1: lambda: self.r.randbytes(8),
            2: lambda: self.varint(3) + b"abc",
            3: lambda: self.unknown(depth + 1) * (depth < 8) + self.tag(number if not self.rare(0.2) else 7, 4),
            5: lambda: self.r.randbytes(4),
        }.get(wire_type, lambda: b"")()
        return self.tag(0 if self.rare(0.05) else number, wire_type) + payload

    def broken(self, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(self.r.choice((1, 1, 1, 2, 3))):
            if not out:
                break
            at = self.r.randrange(len(out))
            match self.r.randrange(6):
                case 0:
                    del out[at:]
                case 1 | 2:
                    out[at] ^= 1 << self.r.randrange(8)
                case 3:
                    del out[at : at + self.r.choice((1, 1, 4))]
                case 4:
                    out[at:at] = self.r.randbytes(self.r.choice((1, 1, 4)))
                case 5:  # a size or value that is hostile
                    out[at : at + 1] = self.r.choice(
                        (b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x07", b"\xff" * 10, b"\x7f")
                    )
        return bytes(out)


# ---- the tests -------------------------------------------------------------------------------------------------------


REFUSED = (MalformedMessageError, BadShapeError)


def too_long(message: Any) -> bool:
    """Whether some tensor in it has a longer shape than expertd.common.bounds allows: the one bound within reach
    here."""
    if isinstance(message, pb.Tensor):
        return len(message.shape) > MAX_RANK
    return any(too_long(value) for f, value in message.ListFields() if f.message_type is not None and not f.is_repeated)


def check_head(data: bytes, message: Any) -> None:
    """What a look finds in a sound message is what it holds."""
    head, f = decode.peek_forward(data), message.forward
    if head is not None:
        assert head[:2] + head[4:] == (f.request_id, f.layer, f.timeout_us, f.sent_us), data.hex()


def check_parity(kind: Kind, data: bytes) -> bool:
    """Whether both accept it; fails where they differ."""
    cls, plain, decode_fast, _, _ = kind
    try:
        message = cls.FromString(data)
    except DecodeError:
        if cls is pb.StreamForwardRequest:
            decode.peek_forward(data)  # whatever it finds in there
        with pytest.raises(REFUSED):
            decode_fast(data)
        return False
    if too_long(message):
        with pytest.raises(BadShapeError):
            decode_fast(data)
        return False
    want = plain(message)
    if cls is pb.StreamForwardRequest:
        check_head(data, message)
    try:
        got = plain_view(decode_fast(data))
    except MalformedMessageError as e:  # a small message longer than common.bounds allows: no other one may be refused
        if re.search(r"got \d{3,} bytes, want at most \d{3}$", e.message):
            return False
        raise
    assert got == want, (cls.__name__, data.hex())
    return True


@pytest.mark.parametrize("seed", range(SEEDS))
def test_reading_is_that_of_the_generated_classes(seed: int) -> None:
    g = Generator(seed, odd=(0.0, 0.02, 0.06, 0.15)[seed % 4])
    accepted = refused = scanned = whole = 0
    for i in range(MESSAGES_A_SEED):
        kind = KINDS[i % len(KINDS)]
        data = g.message(kind[0].DESCRIPTOR)
        if i % 8 >= 4:
            data = g.broken(data)
        else:
            whole += 1
        if check_parity(kind, data):
            accepted += 1
            scanned += scans(kind, data)
        else:
            refused += 1
    # The generator must keep making both sorts, and the reader in C++ must not leave the work to the generated classes.
    assert accepted > MESSAGES_A_SEED * 0.3, (accepted, refused)
    assert refused > MESSAGES_A_SEED * 0.1, (accepted, refused)
    if g.odd == 0.0:
        assert scanned > whole * 0.7, (scanned, whole)


def scans(kind: Kind, data: bytes) -> bool:
    """Whether the reader in C++ reads it, where it holds a request or an answer."""
    stream = issubclass(kind[0], pb.StreamForwardRequest | pb.StreamForwardResponse)
    if stream and kind[0].FromString(data).WhichOneof("kind") != "forward":
        return True  # it is the generated classes'
    try:
        return kind[4](data) is not None
    except REFUSED:
        return False


@pytest.mark.parametrize("seed", range(4))
def test_writing_is_that_of_the_generated_classes(seed: int) -> None:
    """Any message without unknown fields, read and written again, is what its generated class writes."""
    g = Generator(1000 + seed, odd=0.1)
    written = 0
    for i in range(MESSAGES_A_SEED // 5):
        cls, _, decode_fast, encode_fast, _ = KINDS[i % len(KINDS)]
        try:
            message = cls.FromString(g.message(cls.DESCRIPTOR))
        except DecodeError:
            continue
        message.DiscardUnknownFields()
        if too_long(message):
            continue
        stream = isinstance(message, pb.StreamForwardRequest | pb.StreamForwardResponse)
        if not stream or message.HasField("forward"):
            (message.forward if stream else message).ClearField("padding")
        want = message.SerializeToString()
        view = decode_fast(want)
        if view is not None:
            assert encode_fast(view) == want, (cls.__name__, want.hex())
            written += 1
    assert written > MESSAGES_A_SEED // 20


def usual(cls: type[Any]) -> Any:
    """A message as the client or the server sends it."""
    x, i, w = (
        pb.Tensor(dtype=dtype, shape=shape, raw=bytes(range(size)))  # type: ignore[arg-type]
        for dtype, shape, size in ((3, (2, 200), 40), (5, (2, 1), 8), (1, (2, 1), 8))
    )
    request = pb.ForwardRequest(request_id=300, layer=3, hidden_states=x, topk_ids=i, topk_weights=w, timeout_us=5000)
    response = pb.ForwardResponse(
        request_id=300, output=x, routes_computed=2, timing=pb.Timing(queue_ns=500, backend="x")
    )
    return {
        pb.ForwardRequest: request,
        pb.ForwardResponse: response,
        pb.StreamForwardRequest: pb.StreamForwardRequest(forward=request),
        pb.StreamForwardResponse: pb.StreamForwardResponse(forward=response),
    }[cls]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k[0].__name__)
def test_every_truncation_and_hostile_byte(kind: Kind) -> None:
    """Each prefix of messages as serializers write them, and each byte replaced by each hostile value and each flip."""
    g = Generator(7, odd=0.0)
    messages = [kind[0].FromString(g.message(kind[0].DESCRIPTOR)) for _ in range(12)]
    for message in [usual(kind[0]), *messages]:
        message.DiscardUnknownFields()
        data = message.SerializeToString()[:400]
        for stop in range(len(data)):
            check_parity(kind, data[:stop])
        for at in range(len(data)):
            for value in {0x00, 0x7F, 0x80, 0xFF, *(data[at] ^ 1 << bit for bit in range(8))}:
                check_parity(kind, data[:at] + bytes((value,)) + data[at + 1 :])


def test_a_view_of_a_larger_buffer_is_never_over_read() -> None:
    g = Generator(11, odd=0.1)
    for i in range(2000):
        kind = KINDS[i % len(KINDS)]
        data = g.message(kind[0].DESCRIPTOR)
        if i % 2:
            data = g.broken(data)
        inside = memoryview(b"\x08\x01" * 20 + data + b"\x08\x01" * 20)[40 : 40 + len(data)]
        try:
            want = plain_view(kind[2](data))
        except REFUSED:
            with pytest.raises(REFUSED):
                kind[2](inside)  # type: ignore[arg-type]
        else:
            assert plain_view(kind[2](inside)) == want  # type: ignore[arg-type]
