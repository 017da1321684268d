"""The server's own account of its messages (gRPC reflection), as command lines read it.

Python's descriptors lack two things that those of other languages have: fields carry no JSON names, so grpcurl prints
routes_computed where buf prints routesComputed; and a method's name is no symbol, so ghz does not find what it is to
call.  Files adds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_reflection.v1alpha.reflection import SERVICE_NAME
from grpc_reflection.v1alpha.reflection import aio as grpcio
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from expertd.errors import ExpertdError
from expertd_server.service.access import DESCRIBE
from expertd_server.transports.security import Gate

__all__ = ["add_reflection"]


def add_reflection(server: Any, services: Sequence[str], gate: Gate) -> None:
    """Of the services named, and of itself, for those who may describe."""
    add_ServerReflectionServicer_to_server(_Guarded([*services, SERVICE_NAME], gate), server)


class _Guarded(grpcio.ReflectionServicer):  # type: ignore[misc]
    def __init__(self, services: Sequence[str], gate: Gate) -> None:
        super().__init__(service_names=services, pool=Files(services))
        self._gate = gate

    async def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        try:
            self._gate.admit(context, DESCRIBE)
        except ExpertdError as e:
            await context.abort(e.code.grpc, e.message, e.to_trailing_metadata())
        answers: Any = super().ServerReflectionInfo(request_iterator, context)
        async for answer in answers:
            yield answer


class Files:
    """What the servicer asks of a DescriptorPool, of the files of `services` and those that they import."""

    def __init__(self, services: Iterable[str]) -> None:
        self._pool = DescriptorPool()
        added: set[str] = set()
        for service in services:
            self._add(Default().FindServiceByName(service).file, added)

    def _add(self, file: FileDescriptor, added: set[str]) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for imported in file.dependencies:
            self._add(imported, added)
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        for message in proto.message_type:
            _name_in_json(message, file.message_types_by_name[message.name])
        self._pool.Add(proto)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802 - protobuf's name
        """Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _name_in_json(message: DescriptorProto, described: Descriptor) -> None:
    for field in message.field:
        field.json_name = described.fields_by_name[field.name].json_name
    for nested in message.nested_type:
        _name_in_json(nested, described.nested_types_by_name[nested.name])
