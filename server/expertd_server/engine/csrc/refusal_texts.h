// Made by `python -m expertd_server.engine.refusal_texts` of that module and of expertd/errors.py: change those.
#pragma once

#include <cstdint>

namespace expertd {

// By Reason: names in the error table.
constexpr const char* kReasonNames[25] = {
    "",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "QUEUE_FULL",
    "DRAINING",
    "LAYER_NOT_HELD",
    "TOO_MANY_TOKENS",
    "BAD_SHAPE",
    "BAD_DTYPE",
    "MALFORMED_MESSAGE",
    "EXPERT_ID_OUT_OF_RANGE",
    "NON_FINITE_WEIGHTS",
    "UNSUPPORTED_COMBINATION",
    "BACKEND_FAILED",
    "OVERLOADED",
    "MISSING_REQUEST_ID",
    "DUPLICATE_REQUEST_ID",
    "TOO_MANY_REQUESTS_IN_FLIGHT",
    "BAD_BYTE_COUNT",
    "BAD_TENSOR_SPELLING",
    "OUTPUT_DTYPE_UNSUPPORTED",
    "SCALES_UNSUPPORTED",
    "NON_FINITE_HIDDEN_STATES",
    "OUTPUT_FORM_UNKNOWN",
    "WEIGHTS_VERSION_NOT_HELD",
};

// By expertd.v1.DataType.
constexpr const char* kDtypeNames[7] = {
    "UNSPECIFIED",
    "F32",
    "F16",
    "BF16",
    "E4M3",
    "I32",
    "I64",
};

// The check that fails.
enum class Text : uint32_t {
  malformed,
  no_kind,
  missing_request_id,
  duplicate_request_id,
  too_many_in_flight,
  unread_bytes,
  layer_not_held,
  version_not_held,
  missing_hidden_states,
  hidden_shape,
  too_many_tokens,
  synthetic_e4m3,
  missing_scales,
  scale_block,
  scales_twice,
  scale_bytes,
  shape_too_long,
  e4m3_elsewhere,
  scales_elsewhere,
  dtype,
  raw_bytes,
  no_data,
  typed_values,
  typed_count,
  zipf_exponent,
  missing_routes,
  ids_shape,
  weights_shape,
  too_many_routes,
  weight_on_input,
  grouped_beside,
  grouped_lengths,
  grouped_rows,
  output_dtype,
  output_form,
  digest_of_e4m3,
  not_over_tcp,
  values_not_over_tcp,
  e4m3_on_device,
  offsets,
  offsets_on_device,
  expert_id,
  nonfinite_weight,
  nonfinite_hidden_state,
};

// values: so many, each at a pair of braces of the text.
struct RefusalText {
  uint32_t reason, values;
  const char* text;
};

constexpr RefusalText kRefusalTexts[44] = {
    {9, 1, "message: got bytes that are no {}, want a serialized protobuf message"},
    {9, 1, "message: got nothing that this connection takes, want {}"},
    {15, 0, "request_id: got 0, want a number that is unique among those in flight"},
    {16, 1, "request_id: got {}, want one that is not in flight on this connection"},
    {17, 3, "connection: got {} requests in flight, {} answers unread, and one more, want at most {} together; wait for an answer first"},
    {17, 4, "answers: got {} bytes of this connection that are not read, of {} in all, and {} more, want at most {} of one connection, and room for others; read answers first"},
    {5, 2, "layer: got {}, want one of those held here: {}; Describe lists them"},
    {24, 2, "weights_version: got {}, want one that is held here: {}, or none; ask another replica"},
    {9, 0, "hidden_states: absent, want a Tensor [M, H]"},
    {7, 2, "hidden_states: got {}, want [M, {}]"},
    {6, 2, "hidden_states: got {} tokens, want at most {}; split the batch"},
    {19, 0, "hidden_states: E4M3: got synthetic, want raw or floats; the server draws F32, F16 and BF16"},
    {19, 1, "hidden_states: E4M3: got no scales, want {} of them"},
    {7, 2, "hidden_states.scales.block: got {}, want {}"},
    {19, 0, "hidden_states.scales: got raw and floats, want one of them"},
    {18, 4, "hidden_states.scales: got {} bytes, want {}: f32 {}, one for {} columns"},
    {7, 1, "Tensor.shape: got {} extents, want at most 8 extents"},
    {21, 2, "{}: got E4M3, want {}: hidden_states alone take it"},
    {21, 2, "{}: got block scales with {} elements, want them with E4M3 alone"},
    {8, 3, "{}.dtype: got {}, want {}"},
    {18, 5, "{}.raw: got {} bytes, want {} for {} {}"},
    {19, 1, "{}: has no data, want raw, typed values or synthetic"},
    {19, 4, "{}: typed values of {}: got {}, want {}, raw or synthetic"},
    {18, 4, "{}: typed values: got {}, want {} for {}"},
    {19, 1, "topk_ids.zipf_exponent: got {}, want 0 to 100"},
    {9, 1, "{}: absent, want topk_ids and topk_weights [M, top_k], or grouped"},
    {7, 3, "topk_ids: got {}, want [{}, top_k] with top_k from 1 to {}"},
    {7, 2, "topk_weights: got {}, want the shape of topk_ids, {}"},
    {6, 6, "topk_ids: got {} routes, {} for each of {} tokens, want at most {}, as {} tokens with the model's {} have; split the batch"},
    {12, 1, "router_weight_on_input: got top_k {}, want top_k 1; with more routes a token has no single input weight"},
    {12, 0, "grouped: given together with topk_ids, topk_weights or router_weight_on_input; want rows grouped by expert, whose weight is 1, or routes"},
    {7, 2, "grouped: got {} expert_ids and {} row_counts, want as many of each"},
    {7, 2, "grouped.row_counts: got {} rows, want the {} of hidden_states"},
    {20, 1, "output_dtype: got {}, want F32, F16, BF16, E4M3 or 0"},
    {23, 1, "output_form: got {}, want TENSOR (1, or 0) or DIGEST (2)"},
    {12, 0, "output_form: got DIGEST of E4M3, want TENSOR; digests are of F32, F16 and BF16"},
    {12, 1, "request: got {} over TCP, want it in a message on the gRPC stream"},
    {19, 1, "{}: got typed or synthetic values over TCP, want raw bytes, or a message on the gRPC stream"},
    {20, 0, "output_dtype: got E4M3 in a device's memory, want F32, F16 or BF16"},
    {9, 0, "tensors: got offsets outside of the session's memory, or no multiples of 16"},
    {9, 0, "tensors: got offsets in a device's memory, want a session that has such memory, and a forward"},
    {10, 5, "topk_ids[{}, {}] of layer {}: got {}, want 0 to {}, or -1 for a route that nobody computes here"},
    {11, 3, "topk_weights[{}, {}]: got {}, want a finite number"},
    {22, 3, "hidden_states[{}, {}]: got {}, want finite numbers: the server refuses others"},
};

}  // namespace expertd
