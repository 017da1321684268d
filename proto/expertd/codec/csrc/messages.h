// ForwardRequest and ForwardResponse, read: the fields with where their bytes lie, nothing copied.  write.h writes them.
//
// What a reader does not take is read by the generated classes of protobuf, whose verdict counts: `good` is false of
// broken bytes, but also of what is legal and unusual (a tensor given twice, groups, hundreds of fields).
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "wire.h"

namespace expertd::wire {

// The bytes of a message in a message.
struct Part {
  const uint8_t* at = nullptr;
  uint64_t bytes = 0;

  explicit operator bool() const { return at != nullptr; }
  Fields fields() const { return Fields(at, bytes); }
};

struct Request {
  uint64_t id = 0, timeout_us = 0, sent_us = 0, weights_version = 0;
  uint32_t layer = 0;
  int32_t output_dtype = 0, output_form = 0;
  bool weight_on_input = false, good = true;
  Tensor hidden, ids, weights;
  Part grouped, traceparent;

  explicit Request(Fields f) {
    while (f.next()) {
      if (f.kind == 0) {
        if (f.number == 1) id = f.value;
        if (f.number == 2) layer = uint32_t(f.value);
        if (f.number == 7) timeout_us = f.value;
        if (f.number == 8) output_dtype = int32_t(f.value);
        if (f.number == 9) output_form = int32_t(f.value);
        if (f.number == 11) weight_on_input = f.value != 0;
        if (f.number == 12) sent_us = f.value;
        if (f.number == 13) weights_version = f.value;
      } else if (f.kind == 2) {
        if (f.number == 3) good &= hidden.read(f.inside());
        if (f.number == 4) good &= ids.read(f.inside());
        if (f.number == 5) good &= weights.read(f.inside());
        if (f.number == 6) good &= !grouped, grouped = {f.data, f.bytes};
        if (f.number == 10) good &= !traceparent, traceparent = {f.data, f.bytes};
      }
    }
    good &= f.good;
  }
};

struct Response {
  uint64_t id = 0, routes_computed = 0, placement_epoch = 0, weights_version = 0;
  bool good = true;
  Tensor output;
  Part digest, timing, load;

  Response() = default;
  explicit Response(Fields f) {
    while (f.next()) {
      if (f.kind == 0) {
        if (f.number == 1) id = f.value;
        if (f.number == 4) routes_computed = f.value;
        if (f.number == 7) placement_epoch = f.value;
        if (f.number == 8) weights_version = f.value;
      } else if (f.kind == 2) {
        if (f.number == 2) good &= output.read(f.inside());
        if (f.number == 3) once(&digest, f);
        if (f.number == 5) once(&timing, f);
        if (f.number == 6) once(&load, f);
      }
    }
    good &= f.good;
  }

 private:
  void once(Part* part, const Fields& f) {
    if (*part) good = false;
    *part = {f.data, f.bytes};
  }
};

// How long a request took, and how busy the server is: what an answer may hold.
struct Timing {
  uint64_t decode_ns = 0, queue_ns = 0, copy_in_ns = 0, kernel_ns = 0, copy_out_ns = 0, arrival_ns = 0;
  uint32_t batch_tokens = 0, batch_requests = 0;
  std::string_view backend;

  Timing() = default;
  explicit Timing(Fields f) {
    while (f.next()) {
      if (f.number == 1) decode_ns = f.value;
      if (f.number == 2) queue_ns = f.value;
      if (f.number == 3) copy_in_ns = f.value;
      if (f.number == 4) kernel_ns = f.value;
      if (f.number == 5) copy_out_ns = f.value;
      if (f.number == 7) batch_tokens = uint32_t(f.value);
      if (f.number == 8) batch_requests = uint32_t(f.value);
      if (f.number == 9 && f.kind == 2) backend = f.text();
      if (f.number == 10) arrival_ns = f.value;
    }
  }
};

struct Load {
  uint32_t queued_tokens = 0, queued_requests = 0;
  float token_ns = 0;
  bool draining = false;

  Load() = default;
  explicit Load(Fields f) {
    while (f.next()) {
      if (f.number == 1) queued_tokens = uint32_t(f.value);
      if (f.number == 2) queued_requests = uint32_t(f.value);
      if (f.number == 3 && f.kind == 5) memcpy(&token_ns, &f.value, sizeof token_ns);
      if (f.number == 4) draining = f.value != 0;
    }
  }
};

// A request that failed.
struct RequestError {
  uint64_t id = 0, retry_after_us = 0;
  uint32_t code = 0;
  std::string_view reason, text;
  bool retryable = false, good = true;

  RequestError() = default;
  explicit RequestError(Fields f) {
    while (f.next()) {
      if (f.number == 1 && f.kind == 0) id = f.value;
      if (f.number == 2 && f.kind == 0) code = uint32_t(f.value);
      if (f.number == 3 && f.kind == 2) reason = f.text();
      if (f.number == 4 && f.kind == 2) text = f.text();
      if (f.number == 5 && f.kind == 0) retryable = f.value != 0;
      if (f.number == 6 && f.kind == 0) retry_after_us = f.value;
    }
    good = f.good;
  }
};

// What a message is or, of a stream's, what it holds where it is of kind 1 and alone.  False: it holds something else.
inline bool body(const uint8_t* at, uint64_t bytes, bool stream, Fields* out) {
  Fields f(at, bytes);
  if (!stream) return *out = f, true;
  if (!f.next() || f.number != 1 || f.kind != 2 || !f.empty()) return false;
  return *out = f.inside(), true;
}

}  // namespace expertd::wire
