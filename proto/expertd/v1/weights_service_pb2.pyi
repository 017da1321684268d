from expertd.v1 import expert_service_pb2 as _expert_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RollingUpdate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLING_UPDATE_UNSPECIFIED: _ClassVar[RollingUpdate]
    ROLLING_UPDATE_ALLOWED: _ClassVar[RollingUpdate]
    ROLLING_UPDATE_REQUIRED: _ClassVar[RollingUpdate]

class WeightDelta(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_DELTA_UNSPECIFIED: _ClassVar[WeightDelta]
    WEIGHT_DELTA_XOR: _ClassVar[WeightDelta]
    WEIGHT_DELTA_OVERWRITE: _ClassVar[WeightDelta]

class UpdateState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_STATE_UNSPECIFIED: _ClassVar[UpdateState]
    UPDATE_STATE_RECEIVING: _ClassVar[UpdateState]
    UPDATE_STATE_PACKING: _ClassVar[UpdateState]
    UPDATE_STATE_READY: _ClassVar[UpdateState]
    UPDATE_STATE_COMMITTING: _ClassVar[UpdateState]
ROLLING_UPDATE_UNSPECIFIED: RollingUpdate
ROLLING_UPDATE_ALLOWED: RollingUpdate
ROLLING_UPDATE_REQUIRED: RollingUpdate
WEIGHT_DELTA_UNSPECIFIED: WeightDelta
WEIGHT_DELTA_XOR: WeightDelta
WEIGHT_DELTA_OVERWRITE: WeightDelta
UPDATE_STATE_UNSPECIFIED: UpdateState
UPDATE_STATE_RECEIVING: UpdateState
UPDATE_STATE_PACKING: UpdateState
UPDATE_STATE_READY: UpdateState
UPDATE_STATE_COMMITTING: UpdateState

class BeginUpdateRequest(_message.Message):
    __slots__ = ("update", "version", "label", "base", "fingerprint", "lease_s", "checkpoint", "dry_run", "delta", "host_id", "rolling")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    update: str
    version: int
    label: str
    base: int
    fingerprint: str
    lease_s: int
    checkpoint: str
    dry_run: bool
    delta: bool
    host_id: str
    rolling: RollingUpdate
    def __init__(self, update: _Optional[str] = ..., version: _Optional[int] = ..., label: _Optional[str] = ..., base: _Optional[int] = ..., fingerprint: _Optional[str] = ..., lease_s: _Optional[int] = ..., checkpoint: _Optional[str] = ..., dry_run: _Optional[bool] = ..., delta: _Optional[bool] = ..., host_id: _Optional[str] = ..., rolling: _Optional[_Union[RollingUpdate, str]] = ...) -> None: ...

class BeginUpdateResponse(_message.Message):
    __slots__ = ("version", "base", "layers", "memory", "waiting_limit_bytes", "memory_endpoint", "memory_token", "memory_refusal", "sampled", "base_identity", "gives_up", "rolling")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    WAITING_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    BASE_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    GIVES_UP_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    version: int
    base: int
    layers: int
    memory: _expert_service_pb2.Memory
    waiting_limit_bytes: int
    memory_endpoint: str
    memory_token: str
    memory_refusal: str
    sampled: _containers.RepeatedScalarFieldContainer[str]
    base_identity: str
    gives_up: int
    rolling: bool
    def __init__(self, version: _Optional[int] = ..., base: _Optional[int] = ..., layers: _Optional[int] = ..., memory: _Optional[_Union[_expert_service_pb2.Memory, _Mapping]] = ..., waiting_limit_bytes: _Optional[int] = ..., memory_endpoint: _Optional[str] = ..., memory_token: _Optional[str] = ..., memory_refusal: _Optional[str] = ..., sampled: _Optional[_Iterable[str]] = ..., base_identity: _Optional[str] = ..., gives_up: _Optional[int] = ..., rolling: _Optional[bool] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("handle", "offset")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class WeightPart(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "data", "sha256", "delta", "checksum", "memory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    sha256: bytes
    delta: WeightDelta
    checksum: str
    memory: DeviceMemory
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., sha256: _Optional[bytes] = ..., delta: _Optional[_Union[WeightDelta, str]] = ..., checksum: _Optional[str] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ...) -> None: ...

class PutWeightsRequest(_message.Message):
    __slots__ = ("update", "parts")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    update: str
    parts: _containers.RepeatedCompositeFieldContainer[WeightPart]
    def __init__(self, update: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[WeightPart, _Mapping]]] = ...) -> None: ...

class PutWeightsResponse(_message.Message):
    __slots__ = ("kept_bytes", "ignored_bytes", "layers_done")
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IGNORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_DONE_FIELD_NUMBER: _ClassVar[int]
    kept_bytes: int
    ignored_bytes: int
    layers_done: int
    def __init__(self, kept_bytes: _Optional[int] = ..., ignored_bytes: _Optional[int] = ..., layers_done: _Optional[int] = ...) -> None: ...

class PrepareUpdateRequest(_message.Message):
    __slots__ = ("update", "identity")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    update: str
    identity: str
    def __init__(self, update: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class PrepareUpdateResponse(_message.Message):
    __slots__ = ("version", "layers", "packing_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PACKING_S_FIELD_NUMBER: _ClassVar[int]
    version: _expert_service_pb2.WeightVersion
    layers: int
    packing_s: float
    def __init__(self, version: _Optional[_Union[_expert_service_pb2.WeightVersion, _Mapping]] = ..., layers: _Optional[int] = ..., packing_s: _Optional[float] = ...) -> None: ...

class CommitUpdateRequest(_message.Message):
    __slots__ = ("update", "through_layer")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    THROUGH_LAYER_FIELD_NUMBER: _ClassVar[int]
    update: str
    through_layer: int
    def __init__(self, update: _Optional[str] = ..., through_layer: _Optional[int] = ...) -> None: ...

class CommitUpdateResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _expert_service_pb2.WeightVersion
    def __init__(self, version: _Optional[_Union[_expert_service_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class AbortUpdateRequest(_message.Message):
    __slots__ = ("update",)
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    update: str
    def __init__(self, update: _Optional[str] = ...) -> None: ...

class AbortUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUpdateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUpdateResponse(_message.Message):
    __slots__ = ("update", "state", "version", "layers", "layers_done", "kept_bytes", "waiting_bytes", "last_error", "versions", "highest_version", "rolling", "layers_switched")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_DONE_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    LAYERS_SWITCHED_FIELD_NUMBER: _ClassVar[int]
    update: str
    state: UpdateState
    version: int
    layers: int
    layers_done: int
    kept_bytes: int
    waiting_bytes: int
    last_error: str
    versions: _containers.RepeatedCompositeFieldContainer[_expert_service_pb2.WeightVersion]
    highest_version: int
    rolling: bool
    layers_switched: int
    def __init__(self, update: _Optional[str] = ..., state: _Optional[_Union[UpdateState, str]] = ..., version: _Optional[int] = ..., layers: _Optional[int] = ..., layers_done: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., last_error: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[_expert_service_pb2.WeightVersion, _Mapping]]] = ..., highest_version: _Optional[int] = ..., rolling: _Optional[bool] = ..., layers_switched: _Optional[int] = ...) -> None: ...

class RollbackVersionRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class RollbackVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _expert_service_pb2.WeightVersion
    def __init__(self, version: _Optional[_Union[_expert_service_pb2.WeightVersion, _Mapping]] = ...) -> None: ...
