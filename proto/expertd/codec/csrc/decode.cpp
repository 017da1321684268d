// The readers for Python (expertd/codec/decode.py): where in a message its fields lie.
#include <algorithm>
#include <cstdint>

#include "messages.h"
#include "request_form.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd::wire;

namespace {

// Places are counted from the beginning of the message; where an end is 0 there is nothing.
struct Range {
  uint64_t begin, end;
};

struct TensorRead {
  uint32_t present, rank;
  int32_t dtype;
  uint32_t spelling;  // number of the field of Tensor.data
  uint64_t shape[Tensor::kMostRank];
  Range data;
  uint32_t scaled, block;
  Range scales, scale_floats;
};

struct RequestRead {
  uint64_t id, timeout_us, sent_us, weights_version;
  uint32_t layer;
  int32_t output_dtype, output_form;
  uint32_t weight_on_input;
  Range traceparent, grouped;
  TensorRead hidden, ids, weights;
};

// What of a request decides how long it may take; tokens, top_k: 1 where they are not found.
struct HeadRead {
  uint64_t id, timeout_us, sent_us;
  uint32_t layer, tokens, top_k, spare;
};

struct ResponseRead {
  uint64_t id, routes_computed, placement_epoch, weights_version;
  Range digest, timing, load;
  TensorRead output;
};

Range range(const uint8_t* at, uint64_t bytes, const uint8_t* from) {
  if (!at) return {};
  const auto begin = uint64_t(at - from);
  return {begin, begin + bytes};
}
Range range(const Part& part, const uint8_t* from) { return range(part.at, part.bytes, from); }

// False: the generated classes are to read it.
bool put(const Tensor& t, const uint8_t* from, TensorRead* to) {
  *to = TensorRead{};
  to->present = t.there;
  to->rank = t.rank;
  to->dtype = t.dtype;
  to->spelling = t.spelling;
  std::copy(t.shape, t.shape + Tensor::kMostRank, to->shape);
  to->data = range(t.data, t.data_bytes, from);
  to->scaled = t.has_scales;
  to->block = t.block;
  to->scales = range(t.scales, t.scales_bytes, from);
  to->scale_floats = range(t.scale_floats, t.scale_floats_bytes, from);
  return !t.twice;
}

// An answer as nearly all are: raw elements of [rows, columns] without scales, with Timing and Load.
struct RawAnswer {
  uint64_t id, routes_computed, dtype, rows, columns, weights_version;
  Range output, timing, load;
};

}  // namespace

// Of the structs, for the test that holds library.py to them.
API void expertd_codec_sizes(uint64_t* out) {
  out[0] = sizeof(RequestRead);
  out[1] = sizeof(ResponseRead);
  out[2] = sizeof(HeadRead);
  out[3] = sizeof(RawAnswer);
  out[4] = sizeof(RequestForm);
}

// stream: it is a stream's message.  0: the generated classes are to read it.
API int expertd_codec_read_request(const uint8_t* at, uint64_t n, int stream, RequestRead* out) {
  Fields f;
  if (!body(at, n, stream, &f)) return 0;
  const Request r(f);
  if (!r.good) return 0;
  out->id = r.id;
  out->timeout_us = r.timeout_us;
  out->sent_us = r.sent_us;
  out->weights_version = r.weights_version;
  out->layer = r.layer;
  out->output_dtype = r.output_dtype;
  out->output_form = r.output_form;
  out->weight_on_input = r.weight_on_input;
  out->traceparent = range(r.traceparent, at);
  out->grouped = range(r.grouped, at);
  return put(r.hidden, at, &out->hidden) && put(r.ids, at, &out->ids) && put(r.weights, at, &out->weights);
}

API int expertd_codec_read_response(const uint8_t* at, uint64_t n, int stream, ResponseRead* out) {
  Fields f;
  if (!body(at, n, stream, &f)) return 0;
  const Response r(f);
  if (!r.good) return 0;
  out->id = r.id;
  out->routes_computed = r.routes_computed;
  out->placement_epoch = r.placement_epoch;
  out->weights_version = r.weights_version;
  out->digest = range(r.digest, at);
  out->timing = range(r.timing, at);
  out->load = range(r.load, at);
  return put(r.output, at, &out->output);
}

// Of a stream's message.  0: it holds no such answer.
API int expertd_codec_read_answer(const uint8_t* at, uint64_t n, RawAnswer* out) {
  Fields f;
  if (!body(at, n, true, &f)) return 0;
  const Response r(f);
  const Tensor& t = r.output;
  const bool raw = t.raw && !t.odd && !t.twice && !t.has_scales && t.rank == 2 && t.dtype >= 0;
  if (!r.good || !raw || !r.timing || !r.load || r.digest || r.placement_epoch) return 0;
  *out = {r.id, r.routes_computed, uint64_t(t.dtype), t.shape[0], t.shape[1], r.weights_version,
          range(t.raw, t.bytes, at), range(r.timing, at), range(r.load, at)};
  return 1;
}

// Whatever its tensors are; what is wrong elsewhere is not seen.
API int expertd_codec_read_head(const uint8_t* at, uint64_t n, HeadRead* out) {
  Fields f;
  if (!body(at, n, true, &f)) return 0;
  const Request r(f);
  if (!r.good) return 0;
  *out = {r.id, r.timeout_us, r.sent_us, r.layer, 1, 1, 0};
  if (r.hidden.rank) out->tokens = uint32_t(r.hidden.shape[0]);
  if (r.ids.rank > 1) out->top_k = uint32_t(r.ids.shape[1]);
  return 1;
}

// The request_id of a ForwardRequest or CancelRequest, as far as it can be read in broken bytes; 0: it is not found.
API uint64_t expertd_codec_request_id(const uint8_t* at, uint64_t n, int stream) {
  Fields f(at, n);
  uint64_t tag = 0x0a, size = 0;
  if (stream && (!f.varint(&tag) || !f.varint(&size))) return 0;
  if (tag != 0x0a && tag != 0x12) return 0;
  while (f.next())
    if (f.number == 1 && f.kind == 0) return f.value;
  return 0;
}
