#include "check.h"

#include <cstdio>

#include "e4m3.h"

namespace expertd {
namespace {

bool is_integer(int64_t dtype) { return dtype == kI32 || dtype == kI64; }

std::string shape_text(const TensorFacts& t) {
  std::string out = "[";
  for (uint32_t i = 0; i < t.rank && i < kMostRank; ++i) out += (i ? ", " : "") + std::to_string(t.shape[i]);
  return out + "]";
}

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? char(c + 'a' - 'A') : c;
  return text;
}

enum Kind { kHidden, kIds, kWeights };
constexpr const char* kNames[] = {"hidden_states", "topk_ids", "topk_weights"};
constexpr const char* kWanted[] = {"F32 or F16 or BF16 or E4M3", "I32 or I64", "F32 or F16 or BF16"};

Refusal check_dtype(const TensorFacts& t, Kind kind) {
  const char* name = kNames[kind];
  if (t.rank > kMostRank) return refusal<Text::shape_too_long>(t.rank);
  if (t.dtype == kE4m3 && kind != kHidden) return refusal<Text::e4m3_elsewhere>(name, kWanted[kind]);
  if (t.scaled && t.dtype != kE4m3) return refusal<Text::scales_elsewhere>(name, dtype_text(t.dtype));
  const bool good = kind == kIds ? is_integer(t.dtype) : t.dtype > 0 && (is_float(uint32_t(t.dtype)) || t.dtype == kE4m3);
  return good ? Refusal{} : refusal<Text::dtype>(name, dtype_text(t.dtype), kWanted[kind]);
}

// The shape is right: so must be the number of elements, in whatever spelling.
Refusal check_elements(const TensorFacts& t, Kind kind) {
  const char* name = kNames[kind];
  const uint64_t count = t.shape[0] * t.shape[1];
  const bool integers = kind == kIds;
  switch (t.spelling) {
    case kRaw: {
      const uint64_t want = count * size_of(uint8_t(t.dtype));
      if (t.amount == want) return {};
      return refusal<Text::raw_bytes>(name, t.amount, want, shape_text(t), lower(dtype_text(t.dtype)));
    }
    case kSynthetic:
      return {};
    case kNone:
      return count ? refusal<Text::no_data>(name) : Refusal{};
    default:
      if ((t.spelling == kInts) != integers)
        return refusal<Text::typed_values>(name, dtype_text(t.dtype), integers ? "floats" : "ints", integers ? "ints" : "floats");
      if (t.amount != count) return refusal<Text::typed_count>(name, t.amount, count, shape_text(t));
      return {};
  }
}

Refusal check_scales(const TensorFacts& t) {
  const uint64_t M = t.shape[0], H = t.shape[1], want = e4m3::scales_bytes(M, H);
  if (t.spelling == kSynthetic) return refusal<Text::synthetic_e4m3>();
  if (!t.scaled) return want ? refusal<Text::missing_scales>(want / 4) : Refusal{};
  if (t.scale_block != e4m3::kBlock) return refusal<Text::scale_block>(t.scale_block, uint32_t(e4m3::kBlock));
  if (t.scales_twice) return refusal<Text::scales_twice>();
  if (t.scale_bytes == want) return {};
  const std::string shape = "[" + std::to_string(M) + ", " + std::to_string((H + e4m3::kBlock - 1) / e4m3::kBlock) + "]";
  return refusal<Text::scale_bytes>(t.scale_bytes, want, shape, uint32_t(e4m3::kBlock));
}

Refusal check_hidden(const TensorFacts& t, const LayerFacts& layer, uint32_t max_tokens) {
  if (!t.present) return refusal<Text::missing_hidden_states>();
  if (const Refusal bad = check_dtype(t, kHidden)) return bad;
  if (t.rank != 2 || t.shape[1] != layer.hidden_size) return refusal<Text::hidden_shape>(shape_text(t), layer.hidden_size);
  if (t.shape[0] > max_tokens) return refusal<Text::too_many_tokens>(t.shape[0], max_tokens);
  return {};
}

Refusal check_output(const RequestFacts& r) {
  constexpr int32_t kTensor = 1, kDigest = 2;
  const int32_t dtype = r.output_dtype;
  if (dtype && (dtype < 0 || !(is_float(uint32_t(dtype)) || dtype == kE4m3)))
    return refusal<Text::output_dtype>(dtype_text(dtype));
  if (r.output_form != 0 && r.output_form != kTensor && r.output_form != kDigest)
    return refusal<Text::output_form>(r.output_form);
  if (r.output_form == kDigest && dtype == kE4m3) return refusal<Text::digest_of_e4m3>();
  return {};
}

Refusal check_grouped(const RequestFacts& r) {
  if (r.ids.present || r.weights.present || r.weight_on_input) return refusal<Text::grouped_beside>();
  if (r.grouped_ids != r.grouped_counts) return refusal<Text::grouped_lengths>(r.grouped_ids, r.grouped_counts);
  if (r.grouped_each) {
    if (uint64_t(r.grouped_each) * r.grouped_ids != r.hidden.shape[0])
      return refusal<Text::grouped_each>(r.grouped_each, r.grouped_ids, r.hidden.shape[0]);
    return r.grouped_most > r.grouped_each ? refusal<Text::grouped_most>(r.grouped_most, r.grouped_each) : Refusal{};
  }
  if (r.grouped_rows != r.hidden.shape[0]) return refusal<Text::grouped_rows>(r.grouped_rows, r.hidden.shape[0]);
  return {};
}

Refusal check_routes(const RequestFacts& r, const LayerFacts& layer, uint32_t max_tokens) {
  const TensorFacts &ids = r.ids, &weights = r.weights;
  const uint64_t M = r.hidden.shape[0], k = ids.shape[1];
  if (!ids.present || !weights.present) return refusal<Text::missing_routes>(kNames[ids.present ? kWeights : kIds]);
  if (const Refusal bad = check_dtype(ids, kIds)) return bad;
  if (const Refusal bad = check_dtype(weights, kWeights)) return bad;
  if (ids.rank != 2 || ids.shape[0] != M || k < 1 || k > layer.num_experts)
    return refusal<Text::ids_shape>(shape_text(ids), M, layer.num_experts);
  if (weights.rank != 2 || weights.shape[0] != M || weights.shape[1] != k)
    return refusal<Text::weights_shape>(shape_text(weights), shape_text(ids));
  if (r.weight_on_input && k != 1) return refusal<Text::weight_on_input>(k);
  const uint64_t most = uint64_t(max_tokens) * layer.top_k;
  if (layer.top_k && M * k > most) return refusal<Text::too_many_routes>(M * k, k, M, most, max_tokens, layer.top_k);
  if (const Refusal bad = check_elements(ids, kIds)) return bad;
  if (ids.spelling == kSynthetic && !(r.zipf_exponent >= 0 && r.zipf_exponent <= 100))
    return refusal<Text::zipf_exponent>(double(r.zipf_exponent));
  return check_elements(weights, kWeights);
}

}  // namespace

Refusal check_request(const RequestFacts& r, const LayerFacts& layer, uint32_t max_tokens) {
  if (const Refusal bad = check_hidden(r.hidden, layer, max_tokens)) return bad;
  if (const Refusal bad = check_output(r)) return bad;
  if (const Refusal bad = r.grouped ? check_grouped(r) : check_routes(r, layer, max_tokens)) return bad;
  if (const Refusal bad = check_elements(r.hidden, kHidden)) return bad;
  return r.hidden.dtype == kE4m3 ? check_scales(r.hidden) : Refusal{};
}

std::string dtype_text(int64_t dtype) {
  constexpr int64_t kKnown = sizeof kDtypeNames / sizeof kDtypeNames[0];
  return dtype >= 0 && dtype < kKnown ? kDtypeNames[dtype] : std::to_string(dtype);
}

std::string value_text(double v) {
  char text[40];
  snprintf(text, sizeof text, "%g", v);
  return text;
}

std::string tenths(double v) {
  char text[40];
  snprintf(text, sizeof text, "%.1f", v);
  return text;
}

std::string fill(const char* text, std::initializer_list<std::string> values) {
  std::string out;
  auto next = values.begin();
  for (const char* c = text; *c; ++c) {
    if (c[0] == '{' && c[1] == '}' && next != values.end()) {
      out += *next++;
      ++c;
    } else {
      out += *c;
    }
  }
  return out;
}

}  // namespace expertd
