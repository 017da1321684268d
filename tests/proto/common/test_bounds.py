"""Nothing in a message is longer than expertd.common.bounds says: every field of the contract, made one too long by a
generator, is refused by name before it is paid for; as long as allowed, it is read."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from costs import cheaper
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from expertd import codec
from expertd.common.bounds import MAX_RANK, MOST, MOST_BYTES, read
from expertd.errors import BadShapeError, ExpertdError, MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb

ROOTS: dict[type[Any], Callable[[bytes], Any]] = {
    pb.ForwardRequest: codec.decode_forward_request,
    pb.ForwardResponse: codec.decode_forward_response,
    pb.StreamForwardRequest: codec.decode_stream_request,
    pb.StreamForwardResponse: codec.decode_stream_response,
    **{cls: partial(read, cls) for cls in MOST_BYTES if cls.__name__.endswith("Request")},
}
"""What a client and a server are sent, and who reads it."""

Path = tuple[FieldDescriptor, ...]


def paths(d: Descriptor, before: Path = ()) -> Iterator[Path]:
    """Ways from a message to each field whose length the sender chooses: a list or a text."""
    for f in d.fields:
        if f.is_repeated or f.type == FieldDescriptor.TYPE_STRING:
            yield (*before, f)
        if f.message_type is not None:
            yield from paths(f.message_type, (*before, f))


CASES = [(root, path) for root in ROOTS for path in paths(root.DESCRIPTOR)]


def name_of(path: Path) -> str:
    return f"{path[-1].containing_type.name}.{path[-1].name}"


def message(root: type[Any], path: Path, length: int) -> bytes:
    """A message in which nothing is set but the end of `path`, so long."""
    made = m = root()
    for f in path[:-1]:
        m = getattr(m, f.name).add() if f.is_repeated else getattr(m, f.name)
    last = path[-1]
    if not last.is_repeated:
        setattr(m, last.name, "x" * length)
    elif last.message_type is not None:
        for _ in range(length):
            getattr(m, last.name).add()
    else:
        getattr(m, last.name).extend(["x"] * length if last.type == FieldDescriptor.TYPE_STRING else [1] * length)
    return bytes(made.SerializeToString())


def test_every_list_and_text_has_a_bound_and_nothing_else_has():
    reached = {name_of(path) for _, path in CASES}
    assert {name.removesuffix("[]") for name in MOST} == reached


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("root", "path"), CASES, ids=lambda x: x.__name__ if isinstance(x, type) else name_of(x))
def test_one_too_long_is_refused_by_name_and_as_long_as_allowed_is_read(root, path):
    most = MOST[name_of(path)]
    ROOTS[root](message(root, path, most))
    with pytest.raises((BadShapeError, MalformedMessageError), match=r"want at most \d+") as e:
        ROOTS[root](message(root, path, most + 1))
    assert any(f.message_type is not None and f.message_type.name in str(e.value) for f in path[:-1]) or name_of(
        path
    ) in str(e.value)


@pytest.mark.timeout(20)
def test_a_text_of_a_list_has_a_bound():
    for length in (64, 65):
        offer = pb.StreamForwardRequest(session=pb.SessionOffer(transports=["x" * length])).SerializeToString()
        if length == 64:
            assert codec.decode_stream_request(offer) is not None
        else:
            with pytest.raises(MalformedMessageError, match=r"SessionOffer.transports\[\]: got 65 bytes"):
                codec.decode_stream_request(offer)


def long_shape(count: int, packed: bool) -> bytes:
    """A ForwardRequest with request_id 7 whose synthetic hidden states have so many extents of 2^32 - 1."""
    extents = b"\xff\xff\xff\xff\x0f"
    shape = b"\x12" + varint(5 * count) + extents * count if packed else (b"\x10" + extents) * count
    tensor = b"\x08\x03" + shape + b"\x32\x02\x08\x01"
    return b"\x08\x07\x10\x00\x1a" + varint(len(tensor)) + tensor


def varint(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes((*out, n))


def hostile() -> dict[str, bytes]:
    """Megabytes that nobody needs, as ForwardRequests."""
    sized = lambda tag, data: tag + varint(len(data)) + data  # noqa: E731
    return {
        "a shape of a million extents": long_shape(1_000_000, packed=True),
        "the same unpacked": long_shape(1_000_000, packed=False),
        "a shape in a million pieces": b"\x08\x07" + sized(b"\x1a", b"\x12\x01\x01" * 1_000_000),
        "ten million typed numbers": b"\x08\x07" + sized(b"\x1a", sized(b"\x2a", sized(b"\x0a", b"\x01" * 10_000_000))),
        "twelve million bytes of them": b"\x08\x07" + sized(b"\x1a", sized(b"\x2a", b"\x08\x01" * 6_000_000)),
        "ten million groups of rows": b"\x08\x07" + sized(b"\x32", sized(b"\x0a", b"\x01" * 10_000_000)),
        "empty tensors": b"\x08\x07" + b"\x1a\x00" * 5_000_000,
        "empty fields": b"\x08\x07" + b"\x7a\x00" * 5_000_000,
        "groups": b"\x08\x07" + b"\x7b\x7c" * 5_000_000,
        "a trace context of megabytes": b"\x08\x07" + sized(b"\x52", b"x" * 10_000_000),
    }


def cheap(read: Callable[[bytes], object], cls: type[Any], data: bytes, times: float) -> bool:
    """Whether to refuse `data` takes less than `times` what protobuf takes to read it, here and now."""

    def refused() -> None:
        with contextlib.suppress(ExpertdError):
            read(data)

    return cheaper(refused, lambda: cls.FromString(data), times)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", hostile())
def test_a_hostile_message_costs_neither_time_nor_memory(attack):
    """Time: at most a few times what protobuf takes to read the same bytes once, here and now."""
    data = hostile()[attack]
    tracemalloc.start()
    try:
        with pytest.raises(ExpertdError) as e:
            codec.decode_forward_request(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert e.value.request_id == 7, "who asked is told"
    assert len(str(e.value)) < 700
    assert peak < 4 << 20
    assert cheap(codec.decode_forward_request, pb.ForwardRequest, data, 3)


def typed(tag: bytes, values: bytes) -> bytes:
    tensor = tag + varint(len(values)) + values
    return b"\x08\x07\x1a" + varint(len(tensor)) + tensor


FLOATS, INTS, MiB = b"\x22", b"\x2a", 1 << 20
TYPED = {
    "as many as fit": (typed(INTS, b"\x0a" + varint(MiB - 5) + b"\x01" * (MiB - 5)), "got 1048571 elements, want"),
    "ten million": (typed(INTS, b"\x0a" + varint(10 * MiB) + b"\x01" * 10 * MiB), "bytes, want at most 1048576"),
    "one by one": (typed(INTS, b"\x08\x01" * (MiB // 2)), "not one packed field"),
    "empty pieces": (typed(INTS, b"\x0a\x00" * (MiB // 2)), "not one packed field"),
    "empty pieces of floats": (typed(FLOATS, b"\x0a\x00" * (2 * MiB)), "not one packed field"),
    "floats one by one": (typed(FLOATS, b"\x0d\x00\x00\x00\x00" * (MiB // 2)), "not one packed field"),
    "something else": (typed(FLOATS, b"\x12\x00" * (2 * MiB)), "not one packed field"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("how", TYPED)
def test_typed_numbers_are_counted_before_they_are_read(how):
    data, said = TYPED[how]
    with pytest.raises(MalformedMessageError, match=said) as e:
        codec.decode_forward_request(data)
    assert e.value.request_id == 7
    assert cheap(codec.decode_forward_request, pb.ForwardRequest, data, 1 / 2)


def test_typed_numbers_as_many_as_allowed_are_read():
    ids = pb.IntValues(values=[-1] * 100_000 + [127] * 10_000)
    view = codec.decode_forward_request(typed(INTS, ids.SerializeToString()))
    assert list(view.hidden_states.ints) == list(ids.values)  # type: ignore[union-attr]


def test_an_offer_of_two_million_transports_is_refused_before_it_is_read():
    data = pb.StreamForwardRequest(session=pb.SessionOffer(transports=["shm"] * 2_200_000)).SerializeToString()
    with pytest.raises(MalformedMessageError, match="no StreamForwardRequest"):
        codec.decode_stream_request(data)
    assert cheap(codec.decode_stream_request, pb.StreamForwardRequest, data, 1 / 10)


@pytest.mark.parametrize("cls", MOST_BYTES, ids=lambda c: c.__name__)
def test_small_messages_have_a_size(cls):
    unknown = b"\xfa\x07" + varint(MOST_BYTES[cls]) + bytes(MOST_BYTES[cls])
    with pytest.raises(MalformedMessageError, match=rf"{cls.__name__}: got {len(unknown)} bytes, want at most"):
        read(cls, unknown)


def test_a_shape_as_long_as_allowed_is_read():
    view = codec.decode_forward_request(long_shape(MAX_RANK, packed=True))
    assert view.hidden_states is not None
    assert len(view.hidden_states.shape) == MAX_RANK
    assert len(codec.decode_forward_request(long_shape(MAX_RANK, packed=False)).hidden_states.shape) == MAX_RANK  # type: ignore[union-attr]
