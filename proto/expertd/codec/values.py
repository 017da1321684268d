"""What decoding gives and encoding takes: the messages with tensors as plain slotted values.

Field by field the messages of expert_service.proto.  A message field that is absent is None; a scalar that is absent is
its proto3 default (0, "", False).  Enums are plain ints, as open as they are on the wire: whether a dtype is one that
makes sense is the servicer's question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from expertd.common.dtypes import SCALED_COLUMNS, scales_at
from expertd.v1 import expert_service_pb2 as pb

__all__ = [
    "Buffer",
    "ForwardHead",
    "ForwardRequestView",
    "ForwardResponseView",
    "ScalesView",
    "Spelling",
    "StreamRequestView",
    "StreamResponseView",
    "TensorView",
]

Buffer: TypeAlias = Any
"""Anything with C-contiguous bytes behind the buffer protocol: bytes, memoryview, array, numpy.ndarray."""


class Spelling:
    """Which field of Tensor.data is set: its field number in the contract, 0 = none."""

    NONE = 0
    RAW = 3
    FLOATS = 4
    INTS = 5
    SYNTHETIC = 6


@dataclass(slots=True)
class ScalesView:
    """BlockScales.  block: columns a scale; raw: f32 [M, ceil(H / block)], little-endian; floats: typed values."""

    block: int = 0
    raw: Buffer = b""
    floats: pb.FloatValues | None = None


@dataclass(slots=True)
class TensorView:
    """Tensor.

    dtype     DataType as an int
    shape     extents, as they came: nobody has checked them against the data
    spelling  which of the Spelling constants `data` is
    data      RAW: the bytes (decoded: a memoryview of the message, valid while the view is referenced);
              FLOATS, INTS, SYNTHETIC: the generated message; NONE: None
    scales    block scales, or None
    """

    dtype: int = 0
    shape: tuple[int, ...] = ()
    spelling: int = Spelling.NONE
    data: Any = None
    scales: ScalesView | None = None

    @classmethod
    def of_raw(cls, dtype: int, shape: tuple[int, ...], raw: Buffer, scales: ScalesView | None = None) -> TensorView:
        return cls(dtype, shape, Spelling.RAW, raw, scales)

    @classmethod
    def of_piece(cls, dtype: int, shape: tuple[int, int], memory: Buffer) -> TensorView:
        """[M, H] in one piece of memory of u8, E4M3 with its scales behind it (expertd.common.dtypes.tensor_bytes)."""
        if dtype != pb.DATA_TYPE_E4M3:
            return cls.of_raw(dtype, shape, memory)
        M, H = shape
        scales = ScalesView(SCALED_COLUMNS, memory[scales_at(M, H) :])
        return cls.of_raw(dtype, shape, memory[: M * H], scales)

    @property
    def raw(self) -> Buffer:
        """The bytes; only where spelling is RAW."""
        assert self.spelling == Spelling.RAW, self.spelling
        return self.data

    @property
    def floats(self) -> Sequence[float]:
        """The typed values; only where spelling is FLOATS."""
        assert self.spelling == Spelling.FLOATS, self.spelling
        values: Sequence[float] = self.data.values
        return values

    @property
    def ints(self) -> Sequence[int]:
        """The typed values; only where spelling is INTS."""
        assert self.spelling == Spelling.INTS, self.spelling
        values: Sequence[int] = self.data.values
        return values

    @property
    def synthetic(self) -> pb.SyntheticValues:
        """The seed and the distribution; only where spelling is SYNTHETIC."""
        assert isinstance(self.data, pb.SyntheticValues), self.spelling
        return self.data


class ForwardHead(NamedTuple):
    """Of a ForwardRequest what decides how long it may take.  tokens, top_k: 1 where they were not found."""

    request_id: int
    layer: int
    tokens: int
    top_k: int
    timeout_us: int
    sent_us: int


@dataclass(slots=True)
class ForwardRequestView:
    """ForwardRequest: one layer, one batch of M tokens."""

    request_id: int = 0
    layer: int = 0
    hidden_states: TensorView | None = None
    topk_ids: TensorView | None = None
    topk_weights: TensorView | None = None
    grouped: pb.GroupedRows | None = None
    timeout_us: int = 0
    output_dtype: int = 0
    output_form: int = 0
    traceparent: str = ""
    router_weight_on_input: bool = False
    sent_us: int = 0
    weights_version: int = 0


@dataclass(slots=True)
class ForwardResponseView:
    """ForwardResponse: the partial sum [M, H], or its digest, and what it cost.

    give_back   no field of the message: for the receiver to call when it has read `output`, where a transport lent that
                memory; None = the receiver's own
    """

    request_id: int = 0
    output: TensorView | None = None
    digest: pb.Digest | None = None
    routes_computed: int = 0
    timing: pb.Timing | None = None
    load: pb.Load | None = None
    placement_epoch: int = 0
    weights_version: int = 0
    give_back: Callable[[], None] | None = field(default=None, repr=False, compare=False)


StreamRequestView: TypeAlias = "ForwardRequestView | pb.CancelRequest | pb.SessionOffer"
StreamResponseView: TypeAlias = "ForwardResponseView | pb.RequestError | pb.SessionAnswer | pb.Load"
