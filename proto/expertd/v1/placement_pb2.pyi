from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Placement(_message.Message):
    __slots__ = ("version", "epoch", "fingerprint", "num_experts", "servers")
    class NumExpertsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    fingerprint: str
    num_experts: _containers.ScalarMap[str, int]
    servers: _containers.RepeatedCompositeFieldContainer[PlacedServer]
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., num_experts: _Optional[_Mapping[str, int]] = ..., servers: _Optional[_Iterable[_Union[PlacedServer, _Mapping]]] = ...) -> None: ...

class PlacedServer(_message.Message):
    __slots__ = ("address", "layers")
    class LayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    address: str
    layers: _containers.ScalarMap[str, str]
    def __init__(self, address: _Optional[str] = ..., layers: _Optional[_Mapping[str, str]] = ...) -> None: ...
