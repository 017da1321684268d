from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_F32: _ClassVar[DataType]
    DATA_TYPE_F16: _ClassVar[DataType]
    DATA_TYPE_BF16: _ClassVar[DataType]
    DATA_TYPE_E4M3: _ClassVar[DataType]
    DATA_TYPE_I32: _ClassVar[DataType]
    DATA_TYPE_I64: _ClassVar[DataType]

class OutputForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_FORM_UNSPECIFIED: _ClassVar[OutputForm]
    OUTPUT_FORM_TENSOR: _ClassVar[OutputForm]
    OUTPUT_FORM_DIGEST: _ClassVar[OutputForm]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_F32: DataType
DATA_TYPE_F16: DataType
DATA_TYPE_BF16: DataType
DATA_TYPE_E4M3: DataType
DATA_TYPE_I32: DataType
DATA_TYPE_I64: DataType
OUTPUT_FORM_UNSPECIFIED: OutputForm
OUTPUT_FORM_TENSOR: OutputForm
OUTPUT_FORM_DIGEST: OutputForm

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "raw", "floats", "ints", "synthetic", "scales")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    FLOATS_FIELD_NUMBER: _ClassVar[int]
    INTS_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    raw: bytes
    floats: FloatValues
    ints: IntValues
    synthetic: SyntheticValues
    scales: BlockScales
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., raw: _Optional[bytes] = ..., floats: _Optional[_Union[FloatValues, _Mapping]] = ..., ints: _Optional[_Union[IntValues, _Mapping]] = ..., synthetic: _Optional[_Union[SyntheticValues, _Mapping]] = ..., scales: _Optional[_Union[BlockScales, _Mapping]] = ...) -> None: ...

class FloatValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class IntValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class SyntheticValues(_message.Message):
    __slots__ = ("seed", "zipf_exponent")
    SEED_FIELD_NUMBER: _ClassVar[int]
    ZIPF_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    seed: int
    zipf_exponent: float
    def __init__(self, seed: _Optional[int] = ..., zipf_exponent: _Optional[float] = ...) -> None: ...

class BlockScales(_message.Message):
    __slots__ = ("block", "raw", "floats")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    FLOATS_FIELD_NUMBER: _ClassVar[int]
    block: int
    raw: bytes
    floats: FloatValues
    def __init__(self, block: _Optional[int] = ..., raw: _Optional[bytes] = ..., floats: _Optional[_Union[FloatValues, _Mapping]] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("request_id", "layer", "hidden_states", "topk_ids", "topk_weights", "grouped", "timeout_us", "output_dtype", "output_form", "traceparent", "router_weight_on_input", "sent_us", "weights_version", "padding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    TOPK_IDS_FIELD_NUMBER: _ClassVar[int]
    TOPK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GROUPED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FORM_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_WEIGHT_ON_INPUT_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    layer: int
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    grouped: GroupedRows
    timeout_us: int
    output_dtype: DataType
    output_form: OutputForm
    traceparent: str
    router_weight_on_input: bool
    sent_us: int
    weights_version: int
    padding: bytes
    def __init__(self, request_id: _Optional[int] = ..., layer: _Optional[int] = ..., hidden_states: _Optional[_Union[Tensor, _Mapping]] = ..., topk_ids: _Optional[_Union[Tensor, _Mapping]] = ..., topk_weights: _Optional[_Union[Tensor, _Mapping]] = ..., grouped: _Optional[_Union[GroupedRows, _Mapping]] = ..., timeout_us: _Optional[int] = ..., output_dtype: _Optional[_Union[DataType, str]] = ..., output_form: _Optional[_Union[OutputForm, str]] = ..., traceparent: _Optional[str] = ..., router_weight_on_input: _Optional[bool] = ..., sent_us: _Optional[int] = ..., weights_version: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class GroupedRows(_message.Message):
    __slots__ = ("expert_ids", "row_counts", "rows_per_expert")
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_EXPERT_FIELD_NUMBER: _ClassVar[int]
    expert_ids: _containers.RepeatedScalarFieldContainer[int]
    row_counts: _containers.RepeatedScalarFieldContainer[int]
    rows_per_expert: int
    def __init__(self, expert_ids: _Optional[_Iterable[int]] = ..., row_counts: _Optional[_Iterable[int]] = ..., rows_per_expert: _Optional[int] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("request_id", "output", "digest", "routes_computed", "timing", "load", "placement_epoch", "weights_version", "padding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUTES_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    output: Tensor
    digest: Digest
    routes_computed: int
    timing: Timing
    load: Load
    placement_epoch: int
    weights_version: int
    padding: bytes
    def __init__(self, request_id: _Optional[int] = ..., output: _Optional[_Union[Tensor, _Mapping]] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ..., routes_computed: _Optional[int] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., placement_epoch: _Optional[int] = ..., weights_version: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("sum", "sum_of_squares", "crc32")
    SUM_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_SQUARES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    sum: float
    sum_of_squares: float
    crc32: int
    def __init__(self, sum: _Optional[float] = ..., sum_of_squares: _Optional[float] = ..., crc32: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("decode_ns", "queue_ns", "copy_in_ns", "kernel_ns", "copy_out_ns", "encode_ns", "batch_tokens", "batch_requests", "backend", "arrival_ns")
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    COPY_IN_NS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_NS_FIELD_NUMBER: _ClassVar[int]
    COPY_OUT_NS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    decode_ns: int
    queue_ns: int
    copy_in_ns: int
    kernel_ns: int
    copy_out_ns: int
    encode_ns: int
    batch_tokens: int
    batch_requests: int
    backend: str
    arrival_ns: int
    def __init__(self, decode_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., copy_in_ns: _Optional[int] = ..., kernel_ns: _Optional[int] = ..., copy_out_ns: _Optional[int] = ..., encode_ns: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., batch_requests: _Optional[int] = ..., backend: _Optional[str] = ..., arrival_ns: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queued_tokens", "queued_requests", "token_ns", "draining")
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    queued_tokens: int
    queued_requests: int
    token_ns: float
    draining: bool
    def __init__(self, queued_tokens: _Optional[int] = ..., queued_requests: _Optional[int] = ..., token_ns: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class StreamForwardRequest(_message.Message):
    __slots__ = ("forward", "cancel", "session")
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    forward: ForwardRequest
    cancel: CancelRequest
    session: SessionOffer
    def __init__(self, forward: _Optional[_Union[ForwardRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., session: _Optional[_Union[SessionOffer, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class SessionOffer(_message.Message):
    __slots__ = ("transports", "host_id")
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    def __init__(self, transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ...) -> None: ...

class StreamForwardResponse(_message.Message):
    __slots__ = ("forward", "error", "session", "load")
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    forward: ForwardResponse
    error: RequestError
    session: SessionAnswer
    load: Load
    def __init__(self, forward: _Optional[_Union[ForwardResponse, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., session: _Optional[_Union[SessionAnswer, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("request_id", "code", "reason", "message", "retryable", "retry_after_us")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_US_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    code: int
    reason: str
    message: str
    retryable: bool
    retry_after_us: int
    def __init__(self, request_id: _Optional[int] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_us: _Optional[int] = ...) -> None: ...

class SessionAnswer(_message.Message):
    __slots__ = ("verdicts", "token", "endpoint")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[TransportVerdict]
    token: str
    endpoint: str
    def __init__(self, verdicts: _Optional[_Iterable[_Union[TransportVerdict, _Mapping]]] = ..., token: _Optional[str] = ..., endpoint: _Optional[str] = ...) -> None: ...

class TransportVerdict(_message.Message):
    __slots__ = ("transport", "accepted", "reason")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transport: str
    accepted: bool
    reason: str
    def __init__(self, transport: _Optional[str] = ..., accepted: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("include_decisions",)
    INCLUDE_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    include_decisions: bool
    def __init__(self, include_decisions: _Optional[bool] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("instance_id", "version", "model", "layers", "limits", "input_dtypes", "output_dtypes", "transports", "placement_epoch", "load", "memory", "admin_address", "versions")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    INPUT_DTYPES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    version: str
    model: Model
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    limits: Limits
    input_dtypes: _containers.RepeatedScalarFieldContainer[DataType]
    output_dtypes: _containers.RepeatedScalarFieldContainer[DataType]
    transports: _containers.RepeatedScalarFieldContainer[str]
    placement_epoch: int
    load: Load
    memory: Memory
    admin_address: str
    versions: _containers.RepeatedCompositeFieldContainer[WeightVersion]
    def __init__(self, instance_id: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., input_dtypes: _Optional[_Iterable[_Union[DataType, str]]] = ..., output_dtypes: _Optional[_Iterable[_Union[DataType, str]]] = ..., transports: _Optional[_Iterable[str]] = ..., placement_epoch: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., admin_address: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[WeightVersion, _Mapping]]] = ...) -> None: ...

class WeightVersion(_message.Message):
    __slots__ = ("number", "label", "digest", "ready_unix_ns", "serving", "source", "identity", "folder", "rolling", "layers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    READY_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    label: str
    digest: str
    ready_unix_ns: int
    serving: bool
    source: str
    identity: str
    folder: str
    rolling: bool
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., label: _Optional[str] = ..., digest: _Optional[str] = ..., ready_unix_ns: _Optional[int] = ..., serving: _Optional[bool] = ..., source: _Optional[str] = ..., identity: _Optional[str] = ..., folder: _Optional[str] = ..., rolling: _Optional[bool] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("weights_bytes", "scratch_bytes", "buffers_bytes", "graphs_bytes", "context_bytes", "pinned_bytes", "limit_bytes", "free_bytes", "weights_mapped", "loading_bytes", "shared_bytes", "pools_bytes")
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_MAPPED_FIELD_NUMBER: _ClassVar[int]
    LOADING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOLS_BYTES_FIELD_NUMBER: _ClassVar[int]
    weights_bytes: int
    scratch_bytes: int
    buffers_bytes: int
    graphs_bytes: int
    context_bytes: int
    pinned_bytes: int
    limit_bytes: int
    free_bytes: int
    weights_mapped: bool
    loading_bytes: int
    shared_bytes: int
    pools_bytes: int
    def __init__(self, weights_bytes: _Optional[int] = ..., scratch_bytes: _Optional[int] = ..., buffers_bytes: _Optional[int] = ..., graphs_bytes: _Optional[int] = ..., context_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., weights_mapped: _Optional[bool] = ..., loading_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., pools_bytes: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("family", "fingerprint", "hidden_size")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    family: str
    fingerprint: str
    hidden_size: int
    def __init__(self, family: _Optional[str] = ..., fingerprint: _Optional[str] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("layer", "num_experts", "held", "top_k", "intermediate_size", "weight_scheme", "activation_scheme", "checkpoint_activation_scheme", "activation", "backend", "verdicts", "chosen_by", "plan", "from_cache", "advice", "weight_digests", "parts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SCHEME_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_SCHEME_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ACTIVATION_SCHEME_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_BY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    num_experts: int
    held: _containers.RepeatedCompositeFieldContainer[ExpertRange]
    top_k: int
    intermediate_size: int
    weight_scheme: str
    activation_scheme: str
    checkpoint_activation_scheme: str
    activation: str
    backend: str
    verdicts: _containers.RepeatedCompositeFieldContainer[BackendVerdict]
    chosen_by: str
    plan: _containers.RepeatedCompositeFieldContainer[PlanEntry]
    from_cache: bool
    advice: Advice
    weight_digests: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[LayerPart]
    def __init__(self, layer: _Optional[int] = ..., num_experts: _Optional[int] = ..., held: _Optional[_Iterable[_Union[ExpertRange, _Mapping]]] = ..., top_k: _Optional[int] = ..., intermediate_size: _Optional[int] = ..., weight_scheme: _Optional[str] = ..., activation_scheme: _Optional[str] = ..., checkpoint_activation_scheme: _Optional[str] = ..., activation: _Optional[str] = ..., backend: _Optional[str] = ..., verdicts: _Optional[_Iterable[_Union[BackendVerdict, _Mapping]]] = ..., chosen_by: _Optional[str] = ..., plan: _Optional[_Iterable[_Union[PlanEntry, _Mapping]]] = ..., from_cache: _Optional[bool] = ..., advice: _Optional[_Union[Advice, _Mapping]] = ..., weight_digests: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[LayerPart, _Mapping]]] = ...) -> None: ...

class LayerPart(_message.Message):
    __slots__ = ("device", "hardware", "backend", "held", "why", "weights_bytes", "surface")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    device: str
    hardware: str
    backend: str
    held: _containers.RepeatedCompositeFieldContainer[ExpertRange]
    why: str
    weights_bytes: int
    surface: _containers.RepeatedCompositeFieldContainer[SurfacePoint]
    def __init__(self, device: _Optional[str] = ..., hardware: _Optional[str] = ..., backend: _Optional[str] = ..., held: _Optional[_Iterable[_Union[ExpertRange, _Mapping]]] = ..., why: _Optional[str] = ..., weights_bytes: _Optional[int] = ..., surface: _Optional[_Iterable[_Union[SurfacePoint, _Mapping]]] = ...) -> None: ...

class SurfacePoint(_message.Message):
    __slots__ = ("experts", "routes", "microseconds")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    experts: int
    routes: int
    microseconds: float
    def __init__(self, experts: _Optional[int] = ..., routes: _Optional[int] = ..., microseconds: _Optional[float] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("backend", "needs", "command", "text")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    backend: str
    needs: str
    command: str
    text: str
    def __init__(self, backend: _Optional[str] = ..., needs: _Optional[str] = ..., command: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class PlanEntry(_message.Message):
    __slots__ = ("max_tokens", "backend")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    backend: str
    def __init__(self, max_tokens: _Optional[int] = ..., backend: _Optional[str] = ...) -> None: ...

class ExpertRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class BackendVerdict(_message.Message):
    __slots__ = ("backend", "eligible", "refusals", "microseconds", "relative_error", "times", "grade")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    GRADE_FIELD_NUMBER: _ClassVar[int]
    backend: str
    eligible: bool
    refusals: _containers.RepeatedScalarFieldContainer[str]
    microseconds: float
    relative_error: float
    times: _containers.RepeatedCompositeFieldContainer[CallTime]
    grade: str
    def __init__(self, backend: _Optional[str] = ..., eligible: _Optional[bool] = ..., refusals: _Optional[_Iterable[str]] = ..., microseconds: _Optional[float] = ..., relative_error: _Optional[float] = ..., times: _Optional[_Iterable[_Union[CallTime, _Mapping]]] = ..., grade: _Optional[str] = ...) -> None: ...

class CallTime(_message.Message):
    __slots__ = ("tokens", "microseconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    microseconds: float
    def __init__(self, tokens: _Optional[int] = ..., microseconds: _Optional[float] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_tokens", "max_message_bytes", "max_requests_in_flight")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    max_message_bytes: int
    max_requests_in_flight: int
    def __init__(self, max_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_requests_in_flight: _Optional[int] = ...) -> None: ...
