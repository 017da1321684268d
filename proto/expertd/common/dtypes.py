"""The project's words for element types, and their numbers in the contract: "bf16" is DATA_TYPE_BF16."""

from __future__ import annotations

from collections.abc import Mapping

from expertd.v1 import expert_service_pb2 as pb

__all__ = [
    "DTYPE_BYTES",
    "DTYPE_NAME",
    "DTYPE_NUMBER",
    "FLOAT_DTYPES",
    "HIDDEN_DTYPES",
    "INT_DTYPES",
    "SCALED_COLUMNS",
    "dtype_name",
    "scales_at",
    "scales_of_row",
    "tensor_bytes",
]

FLOAT_DTYPES = ("f32", "f16", "bf16")
"""Of router weights, and of outputs."""
HIDDEN_DTYPES = (*FLOAT_DTYPES, "e4m3")
"""Of hidden states, and of outputs on request."""
INT_DTYPES = ("i32", "i64")
"""Of expert ids."""

DTYPE_NUMBER: Mapping[str, pb.DataType] = {
    "f32": pb.DATA_TYPE_F32,
    "f16": pb.DATA_TYPE_F16,
    "bf16": pb.DATA_TYPE_BF16,
    "e4m3": pb.DATA_TYPE_E4M3,
    "i32": pb.DATA_TYPE_I32,
    "i64": pb.DATA_TYPE_I64,
}
"""Every dtype that travels."""
DTYPE_NAME: Mapping[int, str] = {number: name for name, number in DTYPE_NUMBER.items()}

DTYPE_BYTES: Mapping[int, int] = {
    pb.DATA_TYPE_F32: 4,
    pb.DATA_TYPE_F16: 2,
    pb.DATA_TYPE_BF16: 2,
    pb.DATA_TYPE_E4M3: 1,
    pb.DATA_TYPE_I32: 4,
    pb.DATA_TYPE_I64: 8,
}
"""Of an element."""

SCALED_COLUMNS = 128
"""Columns of a row of e4m3 that share a scale."""

_WORDS = {number: name.removeprefix("DATA_TYPE_").lower() for name, number in pb.DataType.items()}


def dtype_name(number: int) -> str:
    """The word for any DataType, also for one that does not travel; the number itself where it is unknown."""
    return _WORDS.get(number, str(number))


def scales_of_row(columns: int) -> int:
    """f32 scales of a row of e4m3: the last one may be of fewer columns."""
    return -(-columns // SCALED_COLUMNS)


def scales_at(rows: int, columns: int) -> int:
    """Bytes from the codes of e4m3 [rows, columns] to their scales, where both lie in one piece of memory."""
    return -(-rows * columns // 4) * 4


def tensor_bytes(number: int, rows: int, columns: int) -> int:
    """Of [rows, columns] of a DataType in one piece of memory, e4m3 with its scales."""
    if number == pb.DATA_TYPE_E4M3:
        return scales_at(rows, columns) + 4 * rows * scales_of_row(columns)
    return rows * columns * DTYPE_BYTES[number]
