"""The texts that refuse requests, of checks and of admission: one table for all transports, in Python and in C++.

Each entry names an error of `expertd.errors` and its text with the values that it tells.  The core reads the table as
`csrc/refusal_texts.h`, which `python -m expertd_server.engine.refusal_texts` writes; a test compares the two.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from expertd import errors as e
from expertd.codec import NO_MESSAGE
from expertd.common.bounds import MAX_RANK
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["HEADER", "REASONS", "TEXTS", "RefusalText", "header", "refusal"]

HEADER = Path(__file__).parent / "csrc" / "refusal_texts.h"


class RefusalText(NamedTuple):
    """error: of the table of errors.  text: "subject: got {value}, want ...; remedy" with named values."""

    error: type[e.ExpertdError]
    text: str


TEXTS: dict[str, RefusalText] = {
    # the message
    "malformed": RefusalText(e.MalformedMessageError, NO_MESSAGE),
    "no_kind": RefusalText(e.MalformedMessageError, "message: got nothing that this connection takes, want {want}"),
    # the connection
    "missing_request_id": RefusalText(
        e.MissingRequestIdError, "request_id: got 0, want a number that is unique among those in flight"
    ),
    "duplicate_request_id": RefusalText(
        e.DuplicateRequestIdError, "request_id: got {number}, want one that is not in flight on this connection"
    ),
    "too_many_in_flight": RefusalText(
        e.TooManyRequestsError,
        "connection: got {requests} requests in flight, {unread} answers unread, and one more, want at most {most}"
        " together; wait for an answer first",
    ),
    "unread_bytes": RefusalText(
        e.TooManyRequestsError,
        "answers: got {own} bytes of this connection that are not read, of {all} in all, and {more} more, want at most"
        " {most} of one connection, and room for others; read answers first",
    ),
    # the layer
    "layer_not_held": RefusalText(
        e.LayerNotHeldError, "layer: got {layer}, want one of those held here: {held}; Describe lists them"
    ),
    "version_not_held": RefusalText(
        e.WeightsVersionNotHeldError,
        "weights_version: got {version}, want one that is held here: {held}, or none; ask another replica",
    ),
    # hidden_states
    "missing_hidden_states": RefusalText(e.MalformedMessageError, "hidden_states: absent, want a Tensor [M, H]"),
    "hidden_shape": RefusalText(e.BadShapeError, "hidden_states: got {shape}, want [M, {hidden_size}]"),
    "too_many_tokens": RefusalText(
        e.TooManyTokensError, "hidden_states: got {tokens} tokens, want at most {most}; split the batch"
    ),
    "synthetic_e4m3": RefusalText(
        e.BadTensorSpellingError,
        "hidden_states: E4M3: got synthetic, want raw or floats; the server draws F32, F16 and BF16",
    ),
    "missing_scales": RefusalText(e.BadTensorSpellingError, "hidden_states: E4M3: got no scales, want {count} of them"),
    "scale_block": RefusalText(e.BadShapeError, "hidden_states.scales.block: got {block}, want {want}"),
    "scales_twice": RefusalText(e.BadTensorSpellingError, "hidden_states.scales: got raw and floats, want one of them"),
    "scale_bytes": RefusalText(
        e.BadByteCountError,
        "hidden_states.scales: got {got} bytes, want {want}: f32 {shape}, one for {block} columns",
    ),
    # any tensor
    "shape_too_long": RefusalText(
        e.BadShapeError, f"Tensor.shape: got {{rank}} extents, want at most {MAX_RANK} extents"
    ),
    "e4m3_elsewhere": RefusalText(
        e.ScalesUnsupportedError, "{name}: got E4M3, want {want}: hidden_states alone take it"
    ),
    "scales_elsewhere": RefusalText(
        e.ScalesUnsupportedError, "{name}: got block scales with {dtype} elements, want them with E4M3 alone"
    ),
    "dtype": RefusalText(e.BadDtypeError, "{name}.dtype: got {dtype}, want {want}"),
    "raw_bytes": RefusalText(e.BadByteCountError, "{name}.raw: got {got} bytes, want {want} for {shape} {dtype}"),
    "no_data": RefusalText(e.BadTensorSpellingError, "{name}: has no data, want raw, typed values or synthetic"),
    "typed_values": RefusalText(
        e.BadTensorSpellingError, "{name}: typed values of {dtype}: got {got}, want {want}, raw or synthetic"
    ),
    "typed_count": RefusalText(e.BadByteCountError, "{name}: typed values: got {got}, want {want} for {shape}"),
    "zipf_exponent": RefusalText(e.BadTensorSpellingError, "topk_ids.zipf_exponent: got {got}, want 0 to 100"),
    # routes
    "missing_routes": RefusalText(
        e.MalformedMessageError, "{name}: absent, want topk_ids and topk_weights [M, top_k], or grouped"
    ),
    "ids_shape": RefusalText(
        e.BadShapeError, "topk_ids: got {shape}, want [{tokens}, top_k] with top_k from 1 to {experts}"
    ),
    "weights_shape": RefusalText(e.BadShapeError, "topk_weights: got {shape}, want the shape of topk_ids, {want}"),
    "too_many_routes": RefusalText(
        e.TooManyTokensError,
        "topk_ids: got {routes} routes, {top_k} for each of {tokens} tokens, want at most {most}, as {most_tokens}"
        " tokens with the model's {model_top_k} have; split the batch",
    ),
    "weight_on_input": RefusalText(
        e.UnsupportedCombinationError,
        "router_weight_on_input: got top_k {top_k}, want top_k 1; with more routes a token has no single input weight",
    ),
    "grouped_beside": RefusalText(
        e.UnsupportedCombinationError,
        "grouped: given together with topk_ids, topk_weights or router_weight_on_input; want rows grouped by expert,"
        " whose weight is 1, or routes",
    ),
    "grouped_lengths": RefusalText(
        e.BadShapeError, "grouped: got {ids} expert_ids and {counts} row_counts, want as many of each"
    ),
    "grouped_rows": RefusalText(
        e.BadShapeError, "grouped.row_counts: got {rows} rows, want the {tokens} of hidden_states"
    ),
    "grouped_each": RefusalText(
        e.BadShapeError,
        "grouped.rows_per_expert: got {each} rows for each of {experts} experts, want the {tokens} rows of"
        " hidden_states",
    ),
    "grouped_most": RefusalText(
        e.BadShapeError, "grouped.row_counts: got {most} rows of an expert, want at most rows_per_expert, {each}"
    ),
    # the output
    "output_dtype": RefusalText(
        e.OutputDtypeUnsupportedError, "output_dtype: got {dtype}, want F32, F16, BF16, E4M3 or 0"
    ),
    "output_form": RefusalText(
        e.OutputFormUnknownError, "output_form: got {form}, want TENSOR (1, or 0) or DIGEST (2)"
    ),
    "digest_of_e4m3": RefusalText(
        e.UnsupportedCombinationError,
        "output_form: got DIGEST of E4M3, want TENSOR; digests are of F32, F16 and BF16",
    ),
    # what a transport does not carry
    "not_over_tcp": RefusalText(
        e.UnsupportedCombinationError, "request: got {what} over TCP, want it in a message on the gRPC stream"
    ),
    "values_not_over_tcp": RefusalText(
        e.BadTensorSpellingError,
        "{name}: got typed or synthetic values over TCP, want raw bytes, or a message on the gRPC stream",
    ),
    "e4m3_on_device": RefusalText(
        e.OutputDtypeUnsupportedError, "output_dtype: got E4M3 in a device's memory, want F32, F16 or BF16"
    ),
    "offsets": RefusalText(
        e.MalformedMessageError,
        "tensors: got offsets outside of the session's memory, or no multiples of 16",
    ),
    "offsets_on_device": RefusalText(
        e.MalformedMessageError,
        "tensors: got offsets in a device's memory, want a session that has such memory, and a forward",
    ),
    "number_unprepared": RefusalText(
        e.MalformedMessageError, "call: got a number under which nothing was prepared, want one that was"
    ),
    "number_of_prepared": RefusalText(
        e.MalformedMessageError, "number of a prepared request: got {number}, want 1 to {most}"
    ),
    # admission
    "draining": RefusalText(e.DrainingError, "server: it drains and takes no new requests; ask another replica"),
    "came_late": RefusalText(
        e.DeadlineExceededError, "request: its deadline had passed when it came; want time left to compute it"
    ),
    "would_be_late": RefusalText(
        e.OverloadedError,
        "request: got {left} ms left of its time, want {want}, with what runs and waits before it; try again after"
        " retry_after_us, or another replica",
    ),
    "too_slow": RefusalText(
        e.OverloadedError,
        "request: got {left} ms left of its time, want {want}, which it takes alone; allow more, or another replica",
    ),
    "queue_full": RefusalText(
        e.QueueFullError,
        "queue: got {all} {unit} waiting, {own} of them this caller's, and {more} more, want at most {most} of one"
        " caller, and room for others; try again after retry_after_us, or another replica",
    ),
    "no_memory": RefusalText(
        e.QueueFullError, "output: got no memory for {bytes} bytes; try again later, or another replica"
    ),
    # in the queue
    "cancelled": RefusalText(e.RequestCancelledError, "request: cancelled by its caller"),
    "overtaken": RefusalText(
        e.OverloadedError,
        "request: got {left} us left of its time, want more: what was before it took longer than expected; try"
        " another replica",
    ),
    "expired": RefusalText(
        e.DeadlineExceededError,
        "request: its deadline passed while it waited {waited} ms in the queue; want a longer timeout, or another"
        " replica",
    ),
    # elements, which the batch looks at
    "expert_id": RefusalText(
        e.ExpertIdOutOfRangeError,
        "topk_ids[{row}, {column}] of layer {layer}: got {got}, want 0 to {most}, or -1 for a route that nobody"
        " computes here",
    ),
    "nonfinite_weight": RefusalText(
        e.NonFiniteWeightsError, "topk_weights[{row}, {column}]: got {got}, want a finite number"
    ),
    "nonfinite_hidden_state": RefusalText(
        e.NonFiniteHiddenStatesError,
        "hidden_states[{row}, {column}]: got {got}, want finite numbers: the server refuses others",
    ),
}
"""By the name of the check that fails."""

REASONS = ("", e.BackendFailedError.reason, *dict.fromkeys(text.error.reason for text in TEXTS.values()))
"""Reasons of the error table (expertd.errors) by the core's number (`enum Reason`); 0 = computed."""


def refusal(name: str, /, **values: object) -> e.ExpertdError:
    """The error of a check, with what its text tells."""
    error, text = TEXTS[name]
    return error(text.format(**values))


def header() -> str:
    """The table for C++."""
    lines = [
        "// Made by `python -m expertd_server.engine.refusal_texts` of that module and of expertd/errors.py:"
        " change those.",
        "#pragma once",
        "",
        "#include <cstdint>",
        "",
        "namespace expertd {",
        "",
        "enum Reason : uint32_t {",
        "  kComputed = 0,",
        *(f"  k{''.join(word.capitalize() for word in reason.split('_'))}," for reason in REASONS[1:]),
        "  kReasons",
        "};",
        "",
        "// By Reason: names in the error table.",
        f"constexpr const char* kReasonNames[{len(REASONS)}] = {{",
        *(f'    "{reason}",' for reason in REASONS),
        "};",
        "",
        "// By expertd.v1.DataType.",
        f"constexpr const char* kDtypeNames[{len(pb.DataType.values())}] = {{",
        *(f'    "{name.removeprefix("DATA_TYPE_")}",' for name, _ in sorted(pb.DataType.items(), key=lambda i: i[1])),
        "};",
        "",
        "// The check that fails.",
        "enum class Text : uint32_t {",
        *(f"  {name}," for name in TEXTS),
        "};",
        "",
        "// values: so many, each at a pair of braces of the text.",
        "struct RefusalText {",
        "  uint32_t reason, values;",
        "  const char* text;",
        "};",
        "",
        f"constexpr RefusalText kRefusalTexts[{len(TEXTS)}] = {{",
        *(_row(row) for row in TEXTS.values()),
        "};",
        "",
        "}  // namespace expertd",
        "",
    ]
    return "\n".join(lines)


def _row(row: RefusalText) -> str:
    text, values = re.subn(r"\{\w+\}", "{}", row.text)
    return f'    {{{REASONS.index(row.error.reason)}, {values}, "{text}"}},'


if __name__ == "__main__":
    HEADER.write_text(header())
    print(HEADER)
