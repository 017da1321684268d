"""The C++ readers and writers of messages with tensors (csrc/decode.cpp, csrc/encode.cpp), through ctypes."""

from __future__ import annotations

import ctypes as C
import struct
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from expertd.common.bounds import MAX_RANK
from expertd.cxx import stale

__all__ = [
    "LIBRARY",
    "RAW_ANSWER",
    "REQUEST_FORM",
    "HeadRead",
    "Range",
    "RequestRead",
    "ResponseRead",
    "TensorRead",
    "library",
]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_codec.so"


class Range(C.Structure):
    """Bytes of the message; nothing where end is 0."""

    _fields_ = [("begin", C.c_uint64), ("end", C.c_uint64)]


class TensorRead(C.Structure):
    """A Tensor.  spelling: of expertd.codec.Spelling, for `data`; scaled: it has block scales."""

    _fields_ = [
        ("present", C.c_uint32),
        ("rank", C.c_uint32),
        ("dtype", C.c_int32),
        ("spelling", C.c_uint32),
        ("shape", C.c_uint64 * MAX_RANK),
        ("data", Range),
        ("scaled", C.c_uint32),
        ("block", C.c_uint32),
        ("scales", Range),
        ("scale_floats", Range),
    ]


class RequestRead(C.Structure):
    """A ForwardRequest."""

    _fields_ = [
        *((name, C.c_uint64) for name in ("request_id", "timeout_us", "sent_us", "weights_version")),
        ("layer", C.c_uint32),
        ("output_dtype", C.c_int32),
        ("output_form", C.c_int32),
        ("weight_on_input", C.c_uint32),
        *((name, Range) for name in ("traceparent", "grouped")),
        *((name, TensorRead) for name in ("hidden", "ids", "weights")),
    ]


class HeadRead(C.Structure):
    """What of a ForwardRequest decides how long it may take."""

    _fields_ = [
        *((name, C.c_uint64) for name in ("request_id", "timeout_us", "sent_us")),
        *((name, C.c_uint32) for name in ("layer", "tokens", "top_k", "spare")),
    ]


class ResponseRead(C.Structure):
    """A ForwardResponse."""

    _fields_ = [
        *((name, C.c_uint64) for name in ("request_id", "routes_computed", "placement_epoch", "weights_version")),
        *((name, Range) for name in ("digest", "timing", "load")),
        ("output", TensorRead),
    ]


RAW_ANSWER = struct.Struct("=12Q")
"""A ForwardResponse with a raw output [rows, columns]: request_id, routes_computed, dtype, rows, columns,
weights_version; begin and end of the output's bytes, of Timing and of Load."""

REQUEST_FORM = struct.Struct("=2iI" + 3 * "i4I")
"""What a request's writer is told beside numbers and bytes: output_dtype, output_form, router_weight_on_input; of each
tensor the dtype, spelling, rows, columns, and columns that share a scale (0: it has no scales)."""


@cache
def library() -> SimpleNamespace | None:
    """Its functions, by their names without the prefix; None: it is not built, or of other sources, and the generated
    classes do the work."""
    if stale(LIBRARY.name):
        return None
    try:
        lib = C.PyDLL(str(LIBRARY))
    except OSError:
        return None
    found = SimpleNamespace()
    for name, result, arguments in (
        ("sizes", None, (C.c_void_p,)),
        ("read_request", C.c_int, (C.c_char_p, C.c_uint64, C.c_int, C.c_void_p)),
        ("read_head", C.c_int, (C.c_char_p, C.c_uint64, C.c_void_p)),
        ("request_id", C.c_uint64, (C.c_char_p, C.c_uint64, C.c_int)),
        ("read_answer", C.c_int, (C.c_char_p, C.c_uint64, C.c_void_p)),
        ("read_response", C.c_int, (C.c_char_p, C.c_uint64, C.c_int, C.c_void_p)),
        ("write_request", C.py_object, (C.c_char_p, C.py_object)),
        ("write_response", C.py_object, (C.py_object,)),
    ):
        function = getattr(lib, "expertd_codec_" + name)
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found
