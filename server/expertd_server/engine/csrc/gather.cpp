#include "gather.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace expertd {
namespace {

float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

uint16_t to_bf16(float f) {
  const uint32_t u = bits_of(f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const bool nan = (u & 0x7fffffff) > 0x7f800000;
  return uint16_t(nan ? (u >> 16) | 0x40 : rounded);
}

float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  const float small = float(rest) * 5.9604644775390625e-8f;  // 2^-24: subnormals
  const uint32_t wide = rest >= 0x7c00 ? (rest << 13) + 0x70000000u : (rest << 13) + 0x38000000u;
  return from_bits(sign | (rest < 0x400 ? bits_of(small) : wide));
}

uint16_t to_f16(float f) {
  const uint32_t u = bits_of(f), a = u & 0x7fffffff;
  const uint16_t sign = uint16_t((u >> 16) & 0x8000);
  if (a > 0x7f800000) return uint16_t(sign | 0x7e00 | ((a >> 13) & 0x3ff));
  if (a >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more round to infinity
  if (a < 0x38800000) {                                 // subnormal: adding 0.5 puts the bits where they belong
    const float r = from_bits(a) + 0.5f;
    return uint16_t(sign | (bits_of(r) - 0x3f000000));
  }
  return uint16_t(sign | ((a + 0xc8000fff + ((a >> 13) & 1)) >> 13));
}

template <class To, class From, class Convert>
void each(void* to, const void* from, uint64_t n, Convert convert) {
  auto* t = static_cast<To*>(to);
  auto* f = static_cast<const char*>(from);  // maybe at an odd address
  for (uint64_t i = 0; i < n; ++i) {
    From v;
    memcpy(&v, f + i * sizeof(From), sizeof v);
    t[i] = convert(v);
  }
}

// Whether some of n numbers is NaN or infinite.  exponent: its bits, all set in those; one more at their lowest, added to
// them, then carries into the sign's place: eight bytes at a time, and no lane reaches the next.
template <class Bits>
bool some_odd(const Bits* x, Bits exponent, uint64_t n) {
  constexpr uint64_t kLanes = sizeof(uint64_t) / sizeof(Bits);
  constexpr uint64_t kOnes = ~uint64_t(0) / Bits(~Bits(0));  // a 1 in each lane
  const uint64_t mask = kOnes * exponent, one = kOnes * Bits(exponent & -exponent), signs = kOnes << (8 * sizeof(Bits) - 1);
  uint64_t odd = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    uint64_t lanes;
    memcpy(&lanes, x + i, sizeof lanes);
    odd |= (lanes & mask) + one;
  }
  bool found = odd & signs;
  for (; i < n; ++i) found |= Bits(x[i] & exponent) == exponent;
  return found;
}

// exponent: as above.
template <class Bits, class Value>
void settle(Bits* x, Bits exponent, uint64_t rows, uint64_t columns, uint8_t policy, Bad* bad, Value value) {
  for (uint64_t r = 0; r < rows; ++r) {
    Bits* row = x + r * columns;
    if (!some_odd(row, exponent, columns)) continue;
    uint64_t c = 0;
    for (; c < columns; ++c) {
      if ((row[c] & exponent) != exponent) continue;
      if (policy == kRefuse) break;
      row[c] = 0;
    }
    if (policy != kRefuse) continue;
    const double found = value(row[c]);
    *bad = {true, false, uint32_t(r), uint32_t(c), std::isnan(found) ? NAN : found, true};  // NaN without a sign
    memset(x, 0, rows * columns * sizeof(Bits));
    return;
  }
}

float load_weight(const Forward& f, uint64_t i) {
  const auto* at = reinterpret_cast<const char*>(f.weights) + i * size_of(f.weights_dtype);
  if (f.weights_dtype == kF32) {
    float v;
    memcpy(&v, at, sizeof v);
    return v;
  }
  uint16_t v;
  memcpy(&v, at, sizeof v);
  return f.weights_dtype == kBf16 ? from_bits(uint32_t(v) << 16) : from_f16(v);
}

int64_t load_id(const Forward& f, uint64_t i) {
  const auto* at = reinterpret_cast<const char*>(f.ids) + i * size_of(f.ids_dtype);
  if (f.ids_dtype == kI64) {
    int64_t v;
    memcpy(&v, at, sizeof v);
    return v;
  }
  int32_t v;
  memcpy(&v, at, sizeof v);
  return v;
}

}  // namespace

void load_floats(void* to, uint8_t to_dtype, const void* from, uint8_t from_dtype, const float* scales, uint64_t rows,
                 uint64_t columns) {
  const uint64_t n = rows * columns;
  if (from_dtype == to_dtype) {
    memcpy(to, from, n * size_of(to_dtype));
  } else if (from_dtype == kE4m3) {
    e4m3::widen(from, scales, int64_t(rows), int64_t(columns), to, to_dtype);
  } else if (to_dtype == kBf16) {
    if (from_dtype == kF32)
      each<uint16_t, float>(to, from, n, to_bf16);
    else
      each<uint16_t, uint16_t>(to, from, n, [](uint16_t v) { return to_bf16(from_f16(v)); });
  } else if (from_dtype == kBf16) {
    each<float, uint16_t>(to, from, n, [](uint16_t v) { return from_bits(uint32_t(v) << 16); });
  } else {
    each<float, uint16_t>(to, from, n, from_f16);
  }
}

void store_floats(void* to, uint8_t to_dtype, const void* from, uint8_t from_dtype, uint64_t rows, uint64_t columns) {
  const uint64_t n = rows * columns;
  if (from_dtype == to_dtype) {
    memcpy(to, from, n * size_of(to_dtype));
  } else if (to_dtype == kE4m3) {
    auto* codes = static_cast<uint8_t*>(to);
    e4m3::quantize(from, from_dtype, int64_t(rows), int64_t(columns), int64_t(columns * size_of(from_dtype)), codes,
                   reinterpret_cast<float*>(codes + e4m3::scales_at(rows, columns)));
  } else if (from_dtype == kBf16) {
    const auto wide = [](uint16_t v) { return from_bits(uint32_t(v) << 16); };
    if (to_dtype == kF32)
      each<float, uint16_t>(to, from, n, wide);
    else
      each<uint16_t, uint16_t>(to, from, n, [&](uint16_t v) { return to_f16(wide(v)); });
  } else if (to_dtype == kBf16) {
    each<uint16_t, float>(to, from, n, to_bf16);
  } else {
    each<uint16_t, float>(to, from, n, to_f16);
  }
}

void settle_floats(void* x, uint8_t dtype, uint64_t rows, uint64_t columns, uint8_t policy, Bad* bad) {
  if (policy == kPass) return;
  if (dtype == kF32)
    settle(static_cast<uint32_t*>(x), 0x7f800000u, rows, columns, policy, bad, [](uint32_t v) { return from_bits(v); });
  else
    settle(static_cast<uint16_t*>(x), uint16_t(0x7f80), rows, columns, policy, bad,
           [](uint16_t v) { return from_bits(uint32_t(v) << 16); });
}

uint32_t load_routes(const Forward& f, const LayerFacts& layer, uint32_t wide, int32_t* slots, float* weights,
                     uint64_t* counts, uint8_t policy, Bad* bad) {
  const uint32_t k = f.top_k;
  uint32_t routes = 0;
  for (uint32_t r = 0; r < f.tokens && !bad->any; ++r) {
    int32_t* s = slots + uint64_t(r) * wide;
    float* w = weights + uint64_t(r) * wide;
    for (uint32_t j = 0; j < wide; ++j) {
      if (j >= k) {
        s[j] = -1;
        w[j] = 0;
        continue;
      }
      const int64_t id = load_id(f, uint64_t(r) * k + j);
      float weight = f.weights ? load_weight(f, uint64_t(r) * k + j) : 1.0f;
      if (policy == kZero && !std::isfinite(weight)) weight = 0;
      const bool wrong = id < -1 || id >= int64_t(layer.num_experts);
      if (wrong || !std::isfinite(weight)) {
        *bad = {true, !wrong, r, j, wrong ? double(id) : double(weight)};
        break;
      }
      s[j] = layer.slots[id < 0 ? layer.num_experts : uint32_t(id)];
      w[j] = weight;
      routes += s[j] >= 0;
    }
  }
  if (bad->any) {
    for (uint64_t i = 0; i < uint64_t(f.tokens) * wide; ++i) {
      slots[i] = -1;
      weights[i] = 0;
    }
    return 0;
  }
  if (counts)
    for (uint64_t i = 0; i < uint64_t(f.tokens) * wide; ++i)
      if (slots[i] >= 0) ++counts[slots[i]];
  return routes;
}

double bad_value(const Forward& f, const LayerFacts& layer, const Bad& bad) {
  if (f.on_device || (bad.weight && !f.weights)) return 0;
  const uint64_t i = uint64_t(bad.row) * f.top_k + bad.column;
  if (bad.weight) {
    const double weight = load_weight(f, i);
    return std::isfinite(weight) ? 0 : weight;
  }
  const int64_t id = load_id(f, i);
  return id < -1 || id >= int64_t(layer.num_experts) ? double(id) : 0;
}

void load_ids(const Forward& f, int32_t* ids, float* weights, uint8_t policy) {
  for (uint64_t i = 0; i < uint64_t(f.tokens) * f.top_k; ++i) {
    const int64_t id = load_id(f, i);
    ids[i] = id == int32_t(id) ? int32_t(id) : std::numeric_limits<int32_t>::min();
    weights[i] = f.weights ? load_weight(f, i) : 1.0f;
    if (policy == kZero && !std::isfinite(weights[i])) weights[i] = 0;
  }
}

}  // namespace expertd
