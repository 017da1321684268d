"""Messages of version 1, byte for byte.  Each file in tests/golden/wire says a message twice: as protobuf text, and as
bytes with what each of them means, written down by hand.  They must never change: other versions are on the codec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from expertd import codec
from expertd.codec.generated import request_view, response_view, stream_request_view, stream_response_view
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import weights_service_pb2 as weights_pb

FOLDER = Path(__file__).parents[2] / "golden" / "wire"
FILES = sorted(FOLDER.glob("*.txt"))

CODECS = {
    pb.ForwardRequest: (codec.decode_forward_request, codec.encode_forward_request, request_view),
    pb.ForwardResponse: (codec.decode_forward_response, codec.encode_forward_response, response_view),
    pb.StreamForwardRequest: (codec.decode_stream_request, codec.encode_stream_request, stream_request_view),
    pb.StreamForwardResponse: (codec.decode_stream_response, codec.encode_stream_response, stream_response_view),
}


def read(path: Path) -> tuple[Any, bytes]:
    """(the message in words, the bytes): a title with the type, text, ---, and lines of hex digits and remarks."""
    title, rest = path.read_text().split("\n\n", 1)
    text, _, hexes = rest.partition("\n---\n")
    name = title.split(":")[0].removeprefix("expertd.v1.")
    cls = getattr(pb, name, None) or getattr(weights_pb, name)
    data = b"".join(bytes.fromhex(re.split(r" {2,}", line.strip())[0]) for line in hexes.splitlines())
    return text_format.Parse(text, cls()), data


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_bytes_mean_the_words(path: Path) -> None:
    message, data = read(path)
    assert type(message).FromString(data) == message
    assert message.SerializeToString() == data


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_our_codec_reads_and_writes_them(path: Path) -> None:
    message, data = read(path)
    if type(message) not in CODECS:
        # small or rare: always the generated class
        assert type(message) is pb.DescribeResponse or type(message).DESCRIPTOR.file.name.endswith(
            "weights_service.proto"
        )
        return
    decode, encode, view = CODECS[type(message)]
    assert decode(data) == view(message)
    assert encode(view(message)) == data
    assert encode(decode(data)) == data


def test_every_message_with_a_tensor_and_every_kind_of_a_stream_is_there() -> None:
    seen = set()
    for path in FILES:
        message, _ = read(path)
        kind = (
            message.WhichOneof("kind")
            if isinstance(message, pb.StreamForwardRequest | pb.StreamForwardResponse)
            else ""
        )
        seen.add((type(message).__name__, kind))
    assert seen >= {
        ("ForwardRequest", ""),
        ("ForwardResponse", ""),
        ("StreamForwardRequest", "forward"),
        ("StreamForwardRequest", "cancel"),
        ("StreamForwardRequest", "session"),
        ("StreamForwardResponse", "forward"),
        ("StreamForwardResponse", "error"),
        ("DescribeResponse", ""),
        ("PutWeightsRequest", ""),
    }
