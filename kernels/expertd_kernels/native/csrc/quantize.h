// Unquantized weights -> codes and scales, with a small search of each scale: the rules and the bits of weights/quantize.py.
//
// Every step is one that IEEE 754 defines, in f32: a quotient is a division, no product and sum are fused (-ffp-contract=off), and squared
// errors are summed as whole numbers. quantize.cpp and level_avx2_quantize.cpp compile this for the two kinds of registers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "abi.h"

namespace expertd {

// What is to be rounded, checked already.
using Rounding = expertd_rounding;

// scratch: 4 * block floats, 32-byte aligned.
using RoundRows = void (*)(const Rounding&, int64_t first, int64_t end, float* scratch);
extern const RoundRows kRoundRowsAvx2;

namespace {

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Floats all(float x) { return Floats{x, x, x, x, x, x, x, x}; }
inline Ints bits_of(Floats x) { return (Ints)x; }  // the same bits
inline Floats floats_of(Ints x) { return (Floats)x; }
inline Floats lesser(Floats a, Floats b) { return a < b ? a : b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats magnitude(Floats x) { return floats_of(bits_of(x) & 0x7FFFFFFF); }
// Whole numbers, ties to even, of what is below 2^22: 1.5 * 2^23 is added and taken away.
inline Floats whole(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

inline Floats load(const float* at) {
  Floats x;
  std::memcpy(&x, at, sizeof x);
  return x;
}
inline void store(float* at, Floats x) { std::memcpy(at, &x, sizeof x); }

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float power(int e) { return float_of(e > -127 ? uint32_t(e + 127) << 23 : 1u << 22); }  // 2^e, -127 to 127

// A stored scale: its bits, and what it is as f32.
struct Scale {
  uint32_t bits;
  float value;
};

inline Scale bf16(float x) {
  const uint32_t b = bits_of(x), rounded = (b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000u;
  return {rounded >> 16, float_of(rounded)};
}

// A float of fewer bits: `mantissa` stored bits, exponents from 1 - `bias` on; |x| must not be above the largest number.
inline Scale shorter(float x, int mantissa, int bias) {
  const uint32_t b = bits_of(x), sign = b & 0x80000000u, size = b ^ sign;
  const float step = power(1 - bias - mantissa), a = float_of(size);  // of subnormal numbers
  uint32_t bits;
  float value;
  if (a < power(1 - bias)) {
    const float n = ((a / step) + 12582912.0f) - 12582912.0f;
    bits = uint32_t(n), value = n * step;
  } else {
    const int drop = 23 - mantissa;
    const uint32_t rounded = (size + (1u << (drop - 1)) - 1 + ((size >> drop) & 1)) >> drop << drop;
    bits = (rounded >> drop) - (uint32_t(127 - bias) << mantissa), value = float_of(rounded);
  }
  return {bits | sign >> (32 - (mantissa == 10 ? 16 : 8)), float_of(bits_of(value) | sign)};
}

// A block of zeros, or so small that its scale underflows, gets 1.
inline Scale stored(float x, int type) {
  Scale s{bits_of(x), x};
  if (type == EXPERTD_SCALE_F16) s = shorter(std::min(std::max(x, -65504.0f), 65504.0f), 10, 15);
  if (type == EXPERTD_SCALE_BF16) s = bf16(x);
  if (s.value != 0.0f) return s;
  return type == EXPERTD_SCALE_F16 ? Scale{0x3C00, 1.0f} : type == EXPERTD_SCALE_BF16 ? Scale{0x3F80, 1.0f} : Scale{0x3F800000, 1.0f};
}

inline int scale_bytes(int type) { return type == EXPERTD_SCALE_F32 ? 4 : type == EXPERTD_SCALE_F16 || type == EXPERTD_SCALE_BF16 ? 2 : 1; }

// Nearest e2m1 numbers of |x|, ties to the even code, at most 6, with the sign of x.
inline Floats e2m1(Floats x) {
  const Floats a = lesser(magnitude(x), all(6.0f));
  const Floats step = larger(lesser(floats_of(bits_of(a) & 0x7F800000) * 0.5f, all(2.0f)), all(0.5f));
  return floats_of(bits_of(whole(a / step) * step) | (bits_of(x) & INT32_MIN));
}

// Nearest e4m3 numbers, ties to even, at most 448.
inline Floats e4m3(Floats x) {
  const Floats a = lesser(magnitude(x), all(448.0f));
  const Floats step = larger(floats_of(bits_of(a) & 0x7F800000) * 0.125f, all(0x1p-9f));
  return floats_of(bits_of(whole(a / step) * step) | (bits_of(x) & INT32_MIN));
}

// One block: its weights as f32, the same in units in which errors are whole numbers of 11 bits, and the numbers of the best try so far.
struct Block {
  int64_t n;
  const float* b;
  float *units, *best, *now;
  float low, high, largest, unit;
  int64_t least = -1;
  Scale scale{0, 1.0f};
  float zero = 0.0f;

  Block(const Rounding& r, const uint8_t* row, int64_t block, float* scratch) : n(r.block), units(scratch + n), best(units + n), now(best + n) {
    if (r.source == EXPERTD_F32) {
      b = reinterpret_cast<const float*>(row) + block * n;
    } else {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(row) + block * n;
      for (int64_t i = 0; i < n; i++) {
        const uint32_t wide = uint32_t(from[i]) << 16;
        std::memcpy(scratch + i, &wide, 4);
      }
      b = scratch;
    }
    Floats l = load(b), h = l;
    for (int64_t i = kLanes; i < n; i += kLanes) l = lesser(load(b + i), l), h = larger(load(b + i), h);
    low = l[0], high = h[0];
    for (int i = 1; i < kLanes; i++) low = std::min(low, l[i]), high = std::max(high, h[i]);
    largest = std::max(-low, high);
    if (!(largest > 0.0f)) largest = 0.0f;
    unit = power(std::min(11 - (int(bits_of(largest) >> 23) - 126), 126));
    for (int64_t i = 0; i < n; i += kLanes) store(units + i, load(b + i) * unit);
  }

  // Numbers of b / s, which stand for (number - minus) * s; kept where their squared error is the least yet.
  template <class Grid>
  void attempt(Scale s, bool only, const Grid& grid, float minus = 0.0f) {
    const float in_units = s.value * unit;
    int64_t error = 0;
    constexpr int64_t kRun = 64 * kLanes;  // squares are below 2^25: 64 of them fit 32 bits
    for (int64_t first = 0; first < n; first += kRun) {
      Ints sum{};
      const int64_t end = std::min(n, first + kRun);
      for (int64_t i = first; i < end; i += kLanes) {
        const Floats x = grid(load(b + i) / s.value);
        store(now + i, x);
        const Floats e = whole((x - minus) * in_units - load(units + i));
        sum += __builtin_convertvector(e * e, Ints);
      }
      if (only) continue;
      for (int i = 0; i < kLanes; i++) error += sum[i];
    }
    if (least >= 0 && error >= least) return;
    least = error, scale = s, zero = minus;
    std::swap(best, now);
  }

  void nibbles(uint8_t* codes) const {
    for (int64_t i = 0; i < n; i += kLanes) {
      const Ints c = __builtin_convertvector(load(best + i), Ints);
      for (int j = 0; j < kLanes; j += 2) codes[(i + j) / 2] = uint8_t(c[j] | c[j + 1] << 4);
    }
  }
};

inline void int4(const Rounding& r, Block& k) {
  const float extreme = k.high >= -k.low ? -k.high : -k.low;  // the sign of a scale that gives the extreme weight code -8
  for (int t = 0; t < r.count; t++)
    k.attempt(stored(extreme / r.tries[t], r.scale_type), r.count == 1, [](Floats x) { return larger(lesser(whole(x), all(7.0f)), all(-8.0f)); });
  for (int64_t i = 0; i < k.n; i += kLanes) store(k.best + i, load(k.best + i) + 8.0f);
}

inline void int4_zeros(const Rounding& r, Block& k) {
  const float low = std::min(k.low, 0.0f), high = std::max(k.high, 0.0f);
  for (int t = 0; t < r.count; t++) {
    const Scale s = stored((high / 15.0f - low / 15.0f) * r.tries[t], r.scale_type);
    const float quotient = 0.0f - low * r.tries[t] / s.value;
    const float zero = std::min(std::max((quotient + 12582912.0f) - 12582912.0f, 0.0f), 15.0f);
    k.attempt(s, false, [&](Floats x) { return larger(lesser(whole(x) + zero, all(15.0f)), all(0.0f)); }, zero);
  }
}

inline void e2m1_codes(Block& k) {
  for (int64_t i = 0; i < k.n; i += kLanes) {
    const Floats x = load(k.best + i), a = magnitude(x);
    const Floats code = a < 2.0f ? a * 2.0f : a < 4.0f ? a + 2.0f : a * 0.5f + 4.0f;
    store(k.best + i, x < 0.0f ? code + 8.0f : code);
  }
}

inline void mxfp4(const Rounding&, Block& k) {
  int floor = std::max(int(bits_of(k.largest) >> 23) - 129, -127);
  if (k.largest == 0.0f) floor = 0;
  for (int e : {floor, std::min(floor + 1, 127)}) k.attempt({uint32_t(e + 127), power(e)}, false, e2m1);
  e2m1_codes(k);
}

inline void nvfp4(const Rounding& r, Block& k, float second) {
  for (int t = 0; t < r.count; t++) {
    Scale s{0x38, 1.0f};  // of a block of zeros
    if (k.largest != 0.0f) s = shorter(std::min(std::max(k.largest / r.tries[t] / second, 0x1p-9f), 448.0f), 3, 7);
    k.attempt({s.bits, s.value * second}, false, e2m1);
  }
  e2m1_codes(k);
}

inline void float8(const Rounding& r, Block& k, uint8_t* codes) {
  const float a = k.largest / 448.0f;
  for (int t = 0; t < r.count; t++) k.attempt(stored(a * r.tries[t], r.scale_type), r.count == 1, e4m3);
  for (int64_t i = 0; i < k.n; i++) codes[i] = uint8_t(shorter(k.best[i], 3, 7).bits);
}

inline void round_rows(const Rounding& r, int64_t first, int64_t end, float* scratch) {
  const int64_t blocks = r.columns / r.block, wide = r.source == EXPERTD_F32 ? 4 : 2;
  const int64_t code_bytes = r.kind == EXPERTD_ROUND_E4M3 ? r.columns : r.columns / 2;
  const int bytes = scale_bytes(r.scale_type);
  for (int64_t row = first; row < end; row++) {
    for (int64_t c = 0; c < blocks; c++) {
      Block k(r, r.weights + row * r.columns * wide, c, scratch);
      uint8_t* codes = r.codes + row * code_bytes + c * code_bytes / blocks;
      switch (r.kind) {
        case EXPERTD_ROUND_INT4: int4(r, k); break;
        case EXPERTD_ROUND_INT4_ZEROS: int4_zeros(r, k); break;
        case EXPERTD_ROUND_MXFP4: mxfp4(r, k); break;
        case EXPERTD_ROUND_NVFP4: nvfp4(r, k, r.second[row / r.rows_of_part]); break;
        default: float8(r, k, codes);
      }
      if (r.kind != EXPERTD_ROUND_E4M3) k.nibbles(codes);
      std::memcpy(r.scales + (row * blocks + c) * bytes, &k.scale.bits, bytes);  // little-endian, as all that is served
      if (r.zeros) r.zeros[row * blocks + c] = uint8_t(k.zero);
    }
  }
}

}  // namespace
}  // namespace expertd
