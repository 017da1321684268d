"""The Open Inference Protocol (KServe v2) in front of the same requests: a layer is a model, "layer_3", its inputs are
hidden_states, topk_ids and topk_weights, its output is output.  For load generators and clients that speak it; what it
costs beside Forward stands in docs/load.md.

Who may call, how many calls are open, what is refused and what is counted is as for Forward and Describe: a request
goes the same way from the first byte on.  What the protocol has beside that is answered by UNIMPLEMENTED.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from expertd.errors import (
    BadDtypeError,
    BadShapeError,
    LayerNotHeldError,
    MalformedMessageError,
    MessageTooLargeError,
    NotReadyError,
    UnimplementedError,
)
from expertd.kserve import inference_pb2 as kserve
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, TensorView
from expertd.wire.scan import OddError, size, skip, tag
from expertd_server.engine.admission import State
from expertd_server.engine.request import Answer, Request
from expertd_server.service.access import CALL, DESCRIBE
from expertd_server.service.service import Service
from expertd_server.transports.grpc_service import Servicer
from expertd_server.views.call_metrics import Rpc

__all__ = ["KSERVE", "KServe", "encode_answer", "read_request"]

KSERVE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
VERSION = importlib.metadata.version("expertd")

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
_MOST_FIELDS, _MOST_TYPED = 64, 1 << 20
"""Fields of a request, and bytes of all but its raw contents: those are read by the generated class, which may take
many times their size.  Larger tensors are to be raw."""
_SHARED = "shared memory is not taken here: send raw contents; expertd's own client has shared memory with its server"


class KServe:
    """The facade of one Servicer."""

    def __init__(self, service: Service, servicer: Servicer) -> None:
        self._service, self._servicer = service, servicer
        self._rpcs: dict[str, Rpc] = {}
        self._asked: Mapping[str, tuple[str, Any, Callable[[Any], Any]]] = {
            "ServerLive": ("", kserve.ServerLiveRequest, lambda _: kserve.ServerLiveResponse(live=True)),
            "ServerReady": ("", kserve.ServerReadyRequest, lambda _: kserve.ServerReadyResponse(ready=self._ready)),
            "ModelReady": ("", kserve.ModelReadyRequest, self._model_ready),
            "ServerMetadata": (DESCRIBE, kserve.ServerMetadataRequest, _server_metadata),
            "ModelMetadata": (DESCRIBE, kserve.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": (DESCRIBE, kserve.ModelConfigRequest, self._model_config),
        }

    def handler(self) -> grpc.GenericRpcHandler:
        return _Handler(self._method)

    def _method(self, name: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        rpc = self._rpcs.get(name)
        if rpc is None:
            known = name in self._asked or name == "ModelInfer"
            rpc = Rpc(self._service.metrics, "unary", name if known else "other", KSERVE)
            self._rpcs[name if known else "other"] = rpc
        right, message, answer = self._asked.get(name, ("", None, _refuse(name)))

        async def infer(data: bytes, context: Any) -> bytes:
            return await self._infer(rpc, data, context)

        async def tell(data: bytes, context: Any) -> bytes:
            return await self._servicer.tell(rpc, data, context, right, lambda d: _told(message, d, answer))

        return infer if name == "ModelInfer" else tell

    async def _infer(self, rpc: Rpc, data: bytes, context: Any) -> bytes:
        head = kserve.ModelInferRequest()

        def decode(message: bytes) -> ForwardRequestView:
            view, read = read_request(message)
            head.model_name, head.id = read.model_name, read.id
            return view

        def encode(r: Request, a: Answer) -> bytes:
            return encode_answer(head, r, a)

        return await self._servicer.compute(rpc, data, context, CALL, decode, encode)

    @property
    def _ready(self) -> bool:
        return self._service.engine.state is State.SERVING

    def _model_ready(self, request: Any) -> kserve.ModelReadyResponse:
        try:
            self._layer(request.name, request.version)
        except (LayerNotHeldError, NotReadyError):
            return kserve.ModelReadyResponse(ready=False)
        return kserve.ModelReadyResponse(ready=self._ready)

    def _layer(self, name: str, version: str) -> tuple[pb.Layer, int]:
        """And the hidden size.  Raises LayerNotHeldError, NotReadyError."""
        number, described = layer_of(name, version), self._service.describe(False)
        layer = next((x for x in described.layers if x.layer == number), None)
        if layer is None:
            held = ", ".join(f"layer_{x.layer}" for x in described.layers[:8])
            raise LayerNotHeldError.about("model", got=repr(name[:80]), want=f"one that is held here: {held}, ...")
        return layer, described.model.hidden_size

    def _model_metadata(self, request: Any) -> kserve.ModelMetadataResponse:
        layer, H = self._layer(request.name, request.version)
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        inputs, output = _tensors(layer.top_k, H)
        return kserve.ModelMetadataResponse(
            name=request.name,
            versions=["1"],
            platform="expertd",
            inputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in inputs],
            outputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in output],
        )

    def _model_config(self, request: Any) -> kserve.ModelConfigResponse:
        layer, H = self._layer(request.name, request.version)
        inputs, output = _tensors(layer.top_k, H)
        types = {"FP32": kserve.TYPE_FP32, "INT32": kserve.TYPE_INT32}
        config = kserve.ModelConfig(
            name=request.name,
            platform="expertd",
            backend="expertd",
            input=[kserve.ModelInput(name=n, data_type=types[d], dims=s) for n, d, s in inputs],
            output=[kserve.ModelOutput(name=n, data_type=types[d], dims=s) for n, d, s in output],
        )
        return kserve.ModelConfigResponse(config=config)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Of every method of the service, also of those that are refused."""

    def __init__(self, method: Callable[[str], Callable[[bytes, Any], Awaitable[bytes]]]) -> None:
        self._method = method

    def service(self, details: Any) -> Any:
        service, _, method = details.method.removeprefix("/").partition("/")
        return grpc.unary_unary_rpc_method_handler(self._method(method)) if service == KSERVE else None


def layer_of(name: str, version: str) -> int:
    """ "layer_3" -> 3.  Raises LayerNotHeldError."""
    m = re.fullmatch(r"layer_(0|[1-9]\d{0,8})", name)
    if m is None or version not in ("", "1"):
        got = f"{name[:80]!r}, version {version[:20]!r}"
        raise LayerNotHeldError.about("model", got=got, want='"layer_0", "layer_1", ..., version "" or "1"')
    return int(m[1])


def _tensors(top_k: int, H: int) -> tuple[list[tuple[str, str, list[int]]], list[tuple[str, str, list[int]]]]:
    """(inputs, outputs): name, datatype, shape."""
    inputs = [("hidden_states", "FP32", [-1, H]), ("topk_ids", "INT32", [-1, top_k])]
    return [*inputs, ("topk_weights", "FP32", [-1, top_k])], [("output", "FP32", [-1, H])]


def _server_metadata(_: Any) -> kserve.ServerMetadataResponse:
    return kserve.ServerMetadataResponse(name="expertd", version=VERSION)


def _refuse(name: str) -> Callable[[Any], Any]:
    def refuse(_: Any) -> Any:
        if "SharedMemory" in name:
            raise UnimplementedError(f"{name[:60]}: {_SHARED}")
        known = "ServerLive, ServerReady, ModelReady, ServerMetadata, ModelMetadata, ModelConfig and ModelInfer"
        raise UnimplementedError(f"{name[:60]}: is not served, want {known}; many requests at once: many ModelInfers")

    return refuse


def _told(message: Any, data: bytes, answer: Callable[[Any], Any]) -> bytes:
    """The answer to a small message; message: None where it is not read."""
    if message is None:
        answer(None)
    if len(data) > 1024:
        raise MalformedMessageError.about("message", got=f"{len(data)} bytes", want="at most 1024")
    try:
        request = message.FromString(data)
    except DecodeError as e:
        raise MalformedMessageError(f"message: {e}; want a {message.DESCRIPTOR.name}") from e
    out: bytes = answer(request).SerializeToString()
    return out


# ---- a request -------------------------------------------------------------------------------------------------------


def read_request(data: bytes) -> tuple[ForwardRequestView, kserve.ModelInferRequest]:
    """What a ModelInferRequest asks for, its raw contents as views of it; and the message without them.  Raises
    InvalidRequestErrors."""
    head, raw = _split(data)
    try:
        read = kserve.ModelInferRequest.FromString(head)
    except DecodeError as e:
        raise MalformedMessageError(f"message: {e}; want a ModelInferRequest") from e
    tensors = _inputs(read, raw)
    missing = [name for name in _INPUTS if name not in tensors]
    if missing:
        raise MalformedMessageError.about("inputs", got=f"none named {missing[0]}", want=", ".join(_INPUTS))
    _check_outputs(read)
    timeout = read.parameters["timeout"].int64_param if "timeout" in read.parameters else 0
    view = ForwardRequestView(layer=layer_of(read.model_name, read.model_version), timeout_us=max(0, timeout))
    view.hidden_states, view.topk_ids, view.topk_weights = (tensors[name] for name in _INPUTS)
    return view, read


def _split(data: bytes) -> tuple[bytes, list[memoryview]]:
    """(all fields but the raw contents, the raw contents)."""
    whole, raw, rest = memoryview(data), list[memoryview](), list[memoryview]()
    pos, end, most = 0, len(data), _MOST_FIELDS
    try:
        while pos < end:
            field, after = tag(data, pos)
            if field == _RAW_FIELD:
                start, stop = size(data, after, end)
                raw.append(whole[start:stop])
            else:
                stop = skip(data, after, end, field)
                rest.append(whole[pos:stop])
            most -= 1
            if stop > end or most < 0:
                raise OddError("it is cut off" if stop > end else f"it has more than {_MOST_FIELDS} fields")
            pos = stop
    except (OddError, IndexError) as e:
        raise MalformedMessageError(f"message: {e}; want a ModelInferRequest") from e
    nbytes = sum(map(len, rest))
    if nbytes > _MOST_TYPED:  # before they are copied, let alone read
        got = f"{nbytes} bytes beside raw contents"
        raise MessageTooLargeError.about("message", got=got, want=f"at most {_MOST_TYPED}", remedy="send raw contents")
    return b"".join(rest), raw


def _inputs(read: kserve.ModelInferRequest, raw: list[memoryview]) -> dict[str, TensorView]:
    if raw and len(raw) != len(read.inputs):
        got = f"{len(raw)} raw contents of {len(read.inputs)} inputs"
        raise MalformedMessageError.about("raw_input_contents", got=got, want="one for each input, or none")
    tensors = dict[str, TensorView]()
    for n, x in enumerate(read.inputs):
        if x.name not in _INPUTS or x.name in tensors:
            got = f"{x.name[:80]!r}{' once more' if x.name in tensors else ''}"
            raise MalformedMessageError.about("input", got=got, want=", ".join(_INPUTS))
        if "shared_memory_region" in x.parameters:
            raise UnimplementedError(f"{x.name}: {_SHARED}")
        if x.datatype not in _DTYPES:
            raise BadDtypeError.about(x.name, got=repr(x.datatype[:80]), want=", ".join(_DTYPES))
        if len(x.shape) != 2 or not all(0 <= extent < 1 << 32 for extent in x.shape):
            raise BadShapeError.about(x.name, got=str(list(x.shape[:9])), want="two extents")
        dtype, typed = _DTYPES[x.datatype]
        if raw:
            if x.HasField("contents"):
                raise MalformedMessageError.about(x.name, got="raw and typed contents", want="one of them")
            data: Any = raw[n]
        else:
            data = _typed(x, typed)
        tensors[x.name] = TensorView.of_raw(dtype, tuple(x.shape), data)
    return tensors


def _typed(x: Any, field: str) -> bytes:
    """The elements of a typed tensor as bytes."""
    if not field:
        raise BadDtypeError.about(f"{x.name}.contents", got=x.datatype, want="FP32, INT32 or INT64", remedy="send raw")
    other = [f.name for f, _ in x.contents.ListFields() if f.name != field]
    if other:
        raise MalformedMessageError.about(f"{x.name}.contents", got=other[0], want=f"{field}, for {x.datatype}")
    return np.asarray(getattr(x.contents, field), _TYPED[field]).tobytes()


def _check_outputs(read: kserve.ModelInferRequest) -> None:
    for y in read.outputs:
        if "shared_memory_region" in y.parameters:
            raise UnimplementedError(f"{y.name[:80]}: {_SHARED}")
        if y.name != "output" or len(read.outputs) > 1:
            got = f"{len(read.outputs)}, one of them {y.name[:80]!r}"
            raise MalformedMessageError.about("outputs", got=got, want='"output", or none')


# ---- an answer -------------------------------------------------------------------------------------------------------


def encode_answer(head: kserve.ModelInferRequest, r: Request, a: Answer) -> bytes:
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
