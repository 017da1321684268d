// ForwardRequest and ForwardResponse, read: the fields with where their bytes lie, nothing copied.
//
// What a reader does not take is read by the generated classes of protobuf, whose verdict counts: `good` is false of
// broken bytes, but also of what is legal and unusual (a tensor given twice, groups, hundreds of fields).
#pragma once

#include <cstdint>

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

// What a message is or, of a stream's, what it holds where it is of kind 1 and alone.  False: it holds something else.
inline bool body(const uint8_t* at, uint64_t bytes, bool stream, Fields* out) {
  Fields f(at, bytes);
  if (!stream) return *out = f, true;
  if (!f.next() || f.number != 1 || f.kind != 2 || !f.empty()) return false;
  return *out = f.inside(), true;
}

}  // namespace expertd::wire
