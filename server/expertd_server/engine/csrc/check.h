// The check of a request, one for all transports: what the request says of itself, compared with the layer that it is
// for.  Elements are looked at when a batch is gathered; memory, ids and bounds of a connection by its transport.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "core.h"
#include "refusal_texts.h"

namespace expertd {

constexpr uint32_t kMostRank = 8;  // expertd.common.bounds.MAX_RANK

// The field of Tensor.data that is set, by its number in the contract.
enum Spelling : uint32_t { kNone = 0, kRaw = 3, kFloats = 4, kInts = 5, kSynthetic = 6 };

// Of one Tensor.  engine/abi.py says the same to ctypes.
struct TensorFacts {
  uint32_t present;
  int32_t dtype;      // expertd.v1.DataType
  uint32_t spelling;  // Spelling
  uint32_t rank;
  uint64_t shape[kMostRank];  // of a longer one the first extents
  uint64_t amount;            // bytes where it is raw, numbers where they are typed
  uint32_t scaled;            // it carries block scales
  uint32_t scale_block;       // columns that share one
  uint64_t scale_bytes;       // of f32
  uint32_t scales_twice;      // as bytes and as numbers
  uint32_t spare;
};

// Of one ForwardRequest.
struct RequestFacts {
  uint32_t layer;
  int32_t output_dtype, output_form;
  uint32_t weight_on_input;
  uint32_t grouped;                    // rows come grouped by expert
  uint32_t grouped_ids, grouped_counts;  // so many expert_ids and row_counts
  uint32_t grouped_each, grouped_most;   // rows_per_expert; the largest of row_counts
  float zipf_exponent;                 // of synthetic topk_ids
  uint64_t grouped_rows;               // sum of row_counts
  TensorFacts hidden, ids, weights;
};

// Why not; reason 0: nothing is wrong.
struct Refusal {
  uint32_t reason = 0;
  std::string text;
  uint32_t retry_after_us = 0;  // 0 = waiting is no remedy

  explicit operator bool() const { return reason != 0; }
};

// What is refused, as an outcome.
inline void put(const Refusal& why, Outcome* o) {
  o->reason = why.reason;
  o->retry_after_us = why.retry_after_us;
  snprintf(o->text, sizeof o->text, "%s", why.text.c_str());
}

// The refusal of one check.  values: as many as its text tells, numbers or strings.
template <Text kText, class... Values>
Refusal refusal(const Values&... values);

Refusal check_request(const RequestFacts& r, const LayerFacts& layer, uint32_t max_tokens);

// The dtype of the output that a request without fault gets.
inline uint8_t output_dtype(const RequestFacts& r) {
  if (r.output_dtype) return uint8_t(r.output_dtype);
  return r.hidden.dtype == kE4m3 ? uint8_t(kBf16) : uint8_t(r.hidden.dtype);
}

// "F32", or the number of a dtype that is none.
std::string dtype_text(int64_t dtype);

// ---- how texts are filled

inline std::string value_text(const std::string& v) { return v; }
inline std::string value_text(const char* v) { return v; }
std::string value_text(double v);
template <class Number>
std::string value_text(Number v) {
  return std::to_string(v);
}

// With one digit behind the point.
std::string tenths(double v);

// `text` with each pair of braces replaced by the next value.
std::string fill(const char* text, std::initializer_list<std::string> values);

template <Text kText, class... Values>
Refusal refusal(const Values&... values) {
  constexpr const RefusalText& row = kRefusalTexts[uint32_t(kText)];
  static_assert(row.values == sizeof...(values), "the text tells other values");
  return {row.reason, fill(row.text, {value_text(values)...}), 0};
}

}  // namespace expertd
