"""The Open Inference Protocol (KServe v2) in front of the same requests: a layer is a model, "layer_3", its inputs are
hidden_states, topk_ids and topk_weights, its output is output.  For load generators and clients that speak it; what it
costs beside Forward stands in docs/load.md.

Who may call, how many calls are open, what is refused and what is counted is as for Forward and Describe: a request
goes the same way from the first byte on.  What the protocol has beside that is answered by UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

import expertd
from expertd.codec import ForwardRequestView
from expertd.errors import LayerNotHeldError, MalformedMessageError, NotReadyError, UnimplementedError
from expertd.kserve import inference_pb2 as kserve
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import State
from expertd_server.engine.request import Answer, EngineRequest
from expertd_server.service.access import CALL, DESCRIBE
from expertd_server.service.service import Service
from expertd_server.transports.grpc.service import Servicer
from expertd_server.transports.kserve.messages import SHARED, encode_answer, layer_of, read_request
from expertd_server.views.call_metrics import Rpc

__all__ = ["KSERVE", "KServe"]

KSERVE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
VERSION = expertd.__version__


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
            rpc = Rpc(self._service.metrics.calls, "unary", name if known else "other", KSERVE)
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

        def encode(r: EngineRequest, a: Answer) -> bytes:
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


def _tensors(top_k: int, H: int) -> tuple[list[tuple[str, str, list[int]]], list[tuple[str, str, list[int]]]]:
    """(inputs, outputs): name, datatype, shape."""
    inputs = [("hidden_states", "FP32", [-1, H]), ("topk_ids", "INT32", [-1, top_k])]
    return [*inputs, ("topk_weights", "FP32", [-1, top_k])], [("output", "FP32", [-1, H])]


def _server_metadata(_: Any) -> kserve.ServerMetadataResponse:
    return kserve.ServerMetadataResponse(name="expertd", version=VERSION)


def _refuse(name: str) -> Callable[[Any], Any]:
    def refuse(_: Any) -> Any:
        if "SharedMemory" in name:
            raise UnimplementedError(f"{name[:60]}: {SHARED}")
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
