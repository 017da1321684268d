"""A ModelInferRequest as a request, and its answer: messages of the Open Inference Protocol, values of expertd.codec.

Bytes of the tensors are found here and never read by the generated class, which makes a Python call of what it finds;
what is left, names, shapes and parameters, is short, or is refused before it is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from expertd.codec import ForwardRequestView, TensorView
from expertd.codec.scan import OddError, size, skip, tag
from expertd.errors import (
    BadByteCountError,
    BadDtypeError,
    BadShapeError,
    LayerNotHeldError,
    MalformedMessageError,
    MessageTooLargeError,
    UnimplementedError,
)
from expertd.kserve import inference_pb2 as kserve
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.request import Answer, EngineRequest

__all__ = ["SHARED", "encode_answer", "layer_of", "read_request"]

_INPUTS = ("hidden_states", "topk_ids", "topk_weights")
_DTYPES: Mapping[str, tuple[int, str]] = {
    "FP32": (pb.DATA_TYPE_F32, "fp32_contents"),
    "FP16": (pb.DATA_TYPE_F16, ""),
    "BF16": (pb.DATA_TYPE_BF16, ""),
    "INT32": (pb.DATA_TYPE_I32, "int_contents"),
    "INT64": (pb.DATA_TYPE_I64, "int64_contents"),
}
"""Datatype -> ours, and the field of its typed elements; "": it has none."""
_NAMES = {"f32": "FP32", "f16": "FP16", "bf16": "BF16"}
_TYPED = {"fp32_contents": "<f4", "int_contents": "<i4", "int64_contents": "<i8"}
_RAW_FIELD, _RAW_ANSWER = 7 << 3 | 2, b"\x32"
_INPUT_FIELD, _CONTENTS_FIELD, _FLOATS_TAG = 5 << 3 | 2, 5 << 3 | 2, 6 << 3 | 2
_MOST_FIELDS, _MOST_HEAD, _MOST_TYPED, _SHORT = 64, 1 << 14, 1 << 17, 512
"""Fields of a request and of each input; bytes of all that is no element of a tensor, which the generated class reads
at 100 ns a parameter; bytes of typed elements that it reads, at 4 to 17 ns an element: 8192 tokens with 8 experts each
of 16,384.  Packed floats are as raw ones, so their number is bounded by the message's alone.  A short input is left to
the generated class whole, which is sooner than to look at its fields."""
SHARED = "shared memory is not taken here: send raw contents; expertd's own client has shared memory with its server"


def layer_of(name: str, version: str) -> int:
    """ "layer_3" -> 3.  Raises LayerNotHeldError."""
    m = re.fullmatch(r"layer_(0|[1-9]\d{0,8})", name)
    if m is None or version not in ("", "1"):
        got = f"{name[:80]!r}, version {version[:20]!r}"
        raise LayerNotHeldError.about("model", got=got, want='"layer_0", "layer_1", ..., version "" or "1"')
    return int(m[1])


# ---- a request -------------------------------------------------------------------------------------------------------


def read_request(data: bytes) -> tuple[ForwardRequestView, kserve.ModelInferRequest]:
    """What a ModelInferRequest asks for, its raw contents as views of it; and the message without contents.  Raises
    InvalidRequestErrors."""
    head, typed, raw = _split(data)
    try:
        read = kserve.ModelInferRequest.FromString(head)
    except DecodeError as e:
        raise MalformedMessageError(f"message: {e}; want a ModelInferRequest") from e
    tensors = _inputs(read, typed, raw)
    missing = [name for name in _INPUTS if name not in tensors]
    if missing:
        raise MalformedMessageError.about("inputs", got=f"none named {missing[0]}", want=", ".join(_INPUTS))
    _check_outputs(read)
    timeout = read.parameters["timeout"].int64_param if "timeout" in read.parameters else 0
    view = ForwardRequestView(layer=layer_of(read.model_name, read.model_version), timeout_us=max(0, timeout))
    view.hidden_states, view.topk_ids, view.topk_weights = (tensors[name] for name in _INPUTS)
    return view, read


def _split(data: bytes) -> tuple[bytes, list[memoryview | None], list[memoryview]]:
    """(all fields but the elements, typed contents of each input, raw contents)."""
    whole, rest, raw = memoryview(data), list[Any](), list[memoryview]()
    typed = list[memoryview | None]()
    try:
        for field, pos, start, stop in _fields(data, 0, len(data)):
            if field == _RAW_FIELD:
                raw.append(whole[start:stop])
            elif field == _INPUT_FIELD:
                short = stop - start <= _SHORT
                kept, contents = ([whole[start:stop]], None) if short else _input(data, whole, start, stop)
                if len(typed) == len(_INPUTS):
                    raise OddError(f"it has more than {len(_INPUTS)} inputs")
                typed.append(contents)
                rest += (b"\x2a", _varint(sum(map(len, kept))), *kept)
            else:
                rest.append(whole[pos:stop])
    except (OddError, IndexError) as e:
        raise MalformedMessageError(f"message: {e}; want a ModelInferRequest") from e
    nbytes = sum(map(len, rest))
    if nbytes > _MOST_HEAD:  # before they are copied, let alone read
        got = f"{nbytes} bytes of names, parameters and the like"
        raise MessageTooLargeError.about("message", got=got, want=f"at most {_MOST_HEAD}", remedy="send fewer")
    return b"".join(rest), typed, raw


def _input(data: bytes, whole: memoryview, begin: int, end: int) -> tuple[list[memoryview], memoryview | None]:
    """(the fields of an InferInputTensor but its contents, those).  Raises OddError."""
    kept, contents = list[memoryview](), None
    for field, pos, start, stop in _fields(data, begin, end):
        if field != _CONTENTS_FIELD:
            kept.append(whole[pos:stop])
        elif contents is not None:
            raise OddError("it has contents twice")
        else:
            contents = whole[start:stop]
    return kept, contents


def _fields(data: bytes, pos: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(tag, where it stands, where its bytes begin if it has a length, where it ends).  Raises OddError, IndexError."""
    for _ in range(_MOST_FIELDS):
        if pos >= end:
            break
        field, after = tag(data, pos)
        start, stop = size(data, after, end) if field & 7 == 2 else (after, skip(data, after, end, field))
        if stop > end:
            raise OddError("it is cut off")
        yield field, pos, start, stop
        pos = stop
    if pos < end:
        raise OddError(f"it has more than {_MOST_FIELDS} fields")


def _inputs(
    read: kserve.ModelInferRequest, typed: list[memoryview | None], raw: list[memoryview]
) -> dict[str, TensorView]:
    if raw and len(raw) != len(read.inputs):
        got = f"{len(raw)} raw contents of {len(read.inputs)} inputs"
        raise MalformedMessageError.about("raw_input_contents", got=got, want="one for each input, or none")
    tensors = dict[str, TensorView]()
    for n, (x, contents) in enumerate(zip(read.inputs, typed, strict=True)):
        if x.name not in _INPUTS or x.name in tensors:
            got = f"{x.name[:80]!r}{' once more' if x.name in tensors else ''}"
            raise MalformedMessageError.about("input", got=got, want=", ".join(_INPUTS))
        if "shared_memory_region" in x.parameters:
            raise UnimplementedError(f"{x.name}: {SHARED}")
        if x.datatype not in _DTYPES:
            raise BadDtypeError.about(x.name, got=repr(x.datatype[:80]), want=", ".join(_DTYPES))
        if len(x.shape) != 2 or not all(0 <= extent < 1 << 32 for extent in x.shape):
            raise BadShapeError.about(x.name, got=str(list(x.shape[:9])), want="two extents")
        dtype, field = _DTYPES[x.datatype]
        if x.HasField("contents"):
            contents = memoryview(x.contents.SerializeToString())
        if raw:
            if contents is not None:
                raise MalformedMessageError.about(x.name, got="raw and typed contents", want="one of them")
            data: Any = raw[n]
        else:
            data = _typed(x, field, contents or memoryview(b""))
        tensors[x.name] = TensorView.of_raw(dtype, tuple(x.shape), data)
    return tensors


def _typed(x: Any, field: str, contents: memoryview) -> Any:
    """The elements of a typed tensor, little-endian.  Raises InvalidRequestErrors."""
    elements = _elements(x, field, contents)
    got, want = len(elements) // np.dtype(_TYPED[field]).itemsize, math.prod(x.shape)
    if got != want:
        raise BadByteCountError.about(
            f"{x.name}.contents", got=f"{got} value{'s' * (got != 1)}", want=f"{want} for {list(x.shape)}"
        )
    return elements


def _elements(x: Any, field: str, contents: memoryview) -> Any:
    if not field:
        raise BadDtypeError.about(f"{x.name}.contents", got=x.datatype, want="FP32, INT32 or INT64", remedy="send raw")
    if field == "fp32_contents" and (floats := _packed_floats(contents)) is not None:
        return floats
    if len(contents) > _MOST_TYPED:
        got, want = f"{len(contents)} bytes of typed elements", f"at most {_MOST_TYPED}, or packed FP32"
        raise MessageTooLargeError.about(f"{x.name}.contents", got=got, want=want, remedy="send raw contents")
    try:
        read = kserve.InferTensorContents.FromString(bytes(contents))
    except DecodeError as e:
        raise MalformedMessageError(f"{x.name}.contents: {e}; want an InferTensorContents") from e
    other = [f.name for f, _ in read.ListFields() if f.name != field]
    if other:
        raise MalformedMessageError.about(f"{x.name}.contents", got=other[0], want=f"{field}, for {x.datatype}")
    return np.asarray(getattr(read, field), _TYPED[field]).tobytes()


def _packed_floats(contents: memoryview) -> memoryview | None:
    """The elements where there is nothing but one packed fp32_contents, as serializers write it."""
    try:
        if contents[0] != _FLOATS_TAG:
            return None
        start, stop = size(contents, 1, len(contents))
    except (OddError, IndexError):
        return None
    return contents[start:stop] if stop == len(contents) else None


def _check_outputs(read: kserve.ModelInferRequest) -> None:
    for y in read.outputs:
        if "shared_memory_region" in y.parameters:
            raise UnimplementedError(f"{y.name[:80]}: {SHARED}")
        if y.name != "output" or len(read.outputs) > 1:
            got = f"{len(read.outputs)}, one of them {y.name[:80]!r}"
            raise MalformedMessageError.about("outputs", got=got, want='"output", or none')


# ---- an answer -------------------------------------------------------------------------------------------------------


def encode_answer(head: kserve.ModelInferRequest, r: EngineRequest, a: Answer) -> bytes:
    """A ModelInferResponse; the output is copied once, into it."""
    count, backend = kserve.InferParameter(int64_param=a.routes_computed), kserve.InferParameter(string_param=a.backend)
    begin = kserve.ModelInferResponse(
        model_name=head.model_name,
        model_version="1",
        id=head.id,
        parameters={"routes_computed": count, "backend": backend},
        outputs=[_output(_NAMES[r.output_dtype], r.tokens, r.layer.hidden_size)],
    ).SerializeToString()
    raw: Any = a.output
    return b"".join((begin, _RAW_ANSWER, _varint(raw.nbytes), raw))


@lru_cache(maxsize=256)
def _output(datatype: str, tokens: int, H: int) -> kserve.ModelInferResponse.InferOutputTensor:
    return kserve.ModelInferResponse.InferOutputTensor(name="output", datatype=datatype, shape=[tokens, H])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
