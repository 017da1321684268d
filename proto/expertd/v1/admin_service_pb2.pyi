from expertd.v1 import expert_service_pb2 as _expert_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_STATE_UNSPECIFIED: _ClassVar[ChangeState]
    CHANGE_STATE_PREPARING: _ClassVar[ChangeState]
    CHANGE_STATE_PREPARED: _ClassVar[ChangeState]
    CHANGE_STATE_COMMITTING: _ClassVar[ChangeState]
CHANGE_STATE_UNSPECIFIED: ChangeState
CHANGE_STATE_PREPARING: ChangeState
CHANGE_STATE_PREPARED: ChangeState
CHANGE_STATE_COMMITTING: ChangeState

class PrepareRequest(_message.Message):
    __slots__ = ("change", "layers", "fingerprint", "dry_run", "keep_s")
    class LayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    change: str
    layers: _containers.ScalarMap[str, str]
    fingerprint: str
    dry_run: bool
    keep_s: int
    def __init__(self, change: _Optional[str] = ..., layers: _Optional[_Mapping[str, str]] = ..., fingerprint: _Optional[str] = ..., dry_run: _Optional[bool] = ..., keep_s: _Optional[int] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("layers", "done", "memory")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    layers: int
    done: int
    memory: _expert_service_pb2.Memory
    def __init__(self, layers: _Optional[int] = ..., done: _Optional[int] = ..., memory: _Optional[_Union[_expert_service_pb2.Memory, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("change", "epoch", "linger_ms")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINGER_MS_FIELD_NUMBER: _ClassVar[int]
    change: str
    epoch: int
    linger_ms: int
    def __init__(self, change: _Optional[str] = ..., epoch: _Optional[int] = ..., linger_ms: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("change",)
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    change: str
    def __init__(self, change: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("change", "state", "layers", "done", "placement_epoch")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    change: str
    state: ChangeState
    layers: int
    done: int
    placement_epoch: int
    def __init__(self, change: _Optional[str] = ..., state: _Optional[_Union[ChangeState, str]] = ..., layers: _Optional[int] = ..., done: _Optional[int] = ..., placement_epoch: _Optional[int] = ...) -> None: ...
