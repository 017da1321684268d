"""The numbers and structs of the engine's core, as csrc/core.h has them; a test holds the sizes together."""

from __future__ import annotations

import ctypes as C
from typing import Any

from expertd.common.bounds import MAX_RANK
from expertd.errors import TABLE, ExpertdError
from expertd_server.engine.refusal_texts import REASONS
from expertd_server.engine.report import WAIT_BOUNDS_NS

__all__ = [
    "CHECK",
    "COLLECT",
    "COLLECT_E4M3",
    "COLLECT_ROUTES",
    "COLLECT_STAGED",
    "DELIVER",
    "EXPERTS",
    "INTERRUPTED",
    "MOST_OUTCOMES",
    "REASONS",
    "RUN",
    "STOPPED",
    "WHOLE",
    "BatchRecord",
    "Config",
    "Forward",
    "InlineMessage",
    "BatchSlotMemory",
    "LayerFacts",
    "Load",
    "Measured",
    "Outcome",
    "TcpBoundsStruct",
    "RequestFacts",
    "Run",
    "TensorFacts",
    "TraceRecord",
    "Waiting",
]

STOPPED, RUN, CHECK, INTERRUPTED = 0, 1, 2, 3
"""What `Core.run` returns for."""
MOST_OUTCOMES = 256
"""That come with one call."""
WHOLE, EXPERTS, COLLECT, COLLECT_ROUTES, DELIVER, COLLECT_E4M3, COLLECT_STAGED = range(7)
"""Pieces of a batch as CUDA graphs: see csrc/core.h."""


def _fields(spec: str) -> list[tuple[str, Any]]:
    """ "u64: a b; u32: c" -> ctypes fields."""
    kinds: dict[str, Any] = {
        "u64": C.c_uint64,
        "u32": C.c_uint32,
        "i32": C.c_int32,
        "u16": C.c_uint16,
        "u8": C.c_uint8,
        "f32": C.c_float,
        "ptr": C.c_void_p,
    }
    out = []
    for part in spec.split(";"):
        kind, names = part.split(":")
        out += [(name, kinds[kind.strip()]) for name in names.split()]
    return out


class Config(C.Structure):
    """Of a core.  device: 1 where batches are described by a table and end by a word (a GPU)."""

    _fields_ = [
        *_fields(
            "u32: batch_slots max_tokens max_queue_requests streamed_rows; u64: max_queue_tokens"
            " max_queue_routes max_queue_bytes spin_ns brief_ns max_wait_ns;"
            "f32: patience; u8: compute_dtype device refuse_late traces nonfinite"
        ),
        ("spare", C.c_uint8 * 7),
    ]


class Forward(C.Structure):
    """A request whose tensors lie in this process; addresses.  bytes: memory that it holds until it is answered."""

    _fields_ = [
        *_fields(
            "u64: hidden scales ids weights out bytes arrival_ns deadline_ns weights_version;"
            "u32: layer tokens top_k caller hidden_size;"
            "u8: hidden_dtype ids_dtype weights_dtype out_dtype router_weight_on_input on_device named spare"
        ),
        ("trace", C.c_uint8 * 24),
    ]


class InlineMessage(C.Structure):
    """A message that holds a checked request.  hidden, scales, ids, weights: where they begin in it; output_bytes: of
    the output; answer_bytes: of the message that answers it."""

    _fields_ = [
        *_fields(
            "u32: layer tokens hidden_size top_k; u8: hidden_dtype ids_dtype weights_dtype out_dtype"
            " router_weight_on_input traced"
        ),
        ("spare", C.c_uint8 * 2),
        *_fields(
            "u64: request_id timeout_us sent_us hidden scales ids weights output_bytes answer_bytes weights_version"
        ),
    ]


class TensorFacts(C.Structure):
    """What a Tensor says of itself.  spelling: of expertd.codec.Spelling; amount: bytes where it is raw, numbers where
    they are typed; scaled: it carries block scales, of scale_bytes bytes of f32; scales_twice: as bytes and numbers."""

    _fields_ = [
        *_fields("u32: present; i32: dtype; u32: spelling rank"),
        ("shape", C.c_uint64 * MAX_RANK),
        *_fields("u64: amount; u32: scaled scale_block; u64: scale_bytes; u32: scales_twice spare"),
    ]


class RequestFacts(C.Structure):
    """What a ForwardRequest says of itself, for the check (csrc/check.h).  grouped_ids, grouped_counts: so many
    expert_ids and row_counts; grouped_each: rows_per_expert; grouped_most, grouped_rows: the largest and the sum of
    row_counts."""

    _fields_ = [
        *_fields(
            "u32: layer; i32: output_dtype output_form; u32: weight_on_input grouped grouped_ids grouped_counts"
            " grouped_each grouped_most; f32: zipf_exponent; u64: grouped_rows"
        ),
        ("hidden", TensorFacts),
        ("ids", TensorFacts),
        ("weights", TensorFacts),
    ]


class Outcome(C.Structure):
    """What became of a request.  posted_ns: when; reason: index into REASONS; weights_version: that computed it."""

    _fields_ = [
        *_fields(
            "u64: handle posted_ns weights_version; u32: reason routes_computed queue_ns collect_ns kernel_ns"
            " deliver_ns batch_tokens batch_requests backend retry_after_us session_gone"
        ),
        ("text", C.c_char * 228),
    ]

    def error(self) -> ExpertdError:
        """Of one that was refused."""
        text: bytes = self.text
        return TABLE[REASONS[self.reason]](text.decode(errors="replace"), retry_after_us=self.retry_after_us)


class LayerFacts(C.Structure):
    """slots: [num_experts + 1] int32, copied; expert_tokens: [held] uint64 that the core counts in, or 0; the same on a
    device: device_slots int32, device_counts int64, or 0.  call, context, experts:
    expertd_kernels.common.protocol.Direct."""

    _fields_ = _fields(
        "u32: layer generation hidden_size num_experts held top_k takes_e4m3; ptr: slots"
        " expert_tokens;"
        "u64: device_slots device_counts call context experts weights_version"
    )


class Measured(C.Structure):
    """What a batch of a layer took before it was served."""

    _fields_ = _fields("u32: rows top_k; u64: ns")


class BatchSlotMemory(C.Structure):
    """Addresses of a batch slot's host memory; table, verdicts, done: for devices."""

    _fields_ = _fields(
        "ptr: table verdicts done hidden slots weights out; u64: hidden_bytes slots_bytes weights_bytes out_bytes"
        " device_hidden device_out device_codes device_scales"
    )


class Run(C.Structure):
    """A batch that the caller of `Core.run` computes.  Addresses on a CPU, 0 on a device (its table says).  whole: a
    graph of all of it pays, whatever its size; launch_error: of CUDA, because of which the core could not launch it."""

    _fields_ = _fields(
        "u32: batch_slot layer generation tokens rows top_k router_weight_on_input requests whole launch_error;"
        "u64: hidden slots weights out"
    )


class BatchRecord(C.Structure):
    """Batches of one layer that are alike, for metrics: tokens and requests of each, routes and times of all."""

    _fields_ = [
        *_fields("u32: layer generation backend tokens requests failed batches"),
        ("waits", C.c_uint32 * (len(WAIT_BOUNDS_NS) + 1)),
        *_fields("u64: routes queue_ns collect_ns kernel_ns deliver_ns"),
    ]


class TraceRecord(C.Structure):
    """The way of one request of a session, by transport (1 shared memory, 2 TCP), that its caller traces.  trace: as
    expertd.common.trace_context has it; times of CLOCK_MONOTONIC; computed_ns: end of the kernel, 0 = it was not
    computed; deliver_ns: of its whole batch."""

    _fields_ = [
        ("trace", C.c_uint8 * 24),
        *_fields(
            "u64: arrival_ns computed_ns answered_ns; u32: layer tokens top_k reason backend queue_ns collect_ns"
            " kernel_ns batch_tokens batch_requests transport deliver_ns"
        ),
    ]


class Waiting(C.Structure):
    """What waits, of all callers or of one.  bytes: of memory."""

    _fields_ = _fields("u64: requests tokens routes bytes")


class TcpBoundsStruct(C.Structure):
    """engine.tcp_connections.TcpBounds, and how each reason travels: its code, whether it may be retried."""

    _fields_ = [
        *_fields("u64: most_message most_bytes; u32: most_in_flight half_ms unread_ms"),
        ("codes", C.c_uint32 * len(REASONS)),
        ("retryable", C.c_uint32 * len(REASONS)),
    ]


class Load(C.Structure):
    _fields_ = _fields(
        "u32: queued_tokens queued_requests waiting_tokens waiting_requests; f32: token_ns; u32: draining;"
        "u64: admitted batches tokens wait_ns"
    )
