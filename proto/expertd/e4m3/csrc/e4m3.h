// Rows of e4m3 with an f32 scale for 128 columns: made of f32, f16 or bf16, and widened again.  Header only, so that the
// engine's core has it, too.  The twins in numpy and torch (expertd_client/requests/e4m3.py) give the same bits.
//
//   scale = max(largest magnitude / 448, 1e-12); NaN where a value of the block is NaN or infinite
//   code  = value * (1 / scale), to nearest even
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")  // what clang does at O2: loops become vectors
#endif

namespace expertd::e4m3 {

#define EXPERTD_INLINE inline __attribute__((always_inline))

constexpr int64_t kBlock = 128;  // columns
constexpr int64_t kPiece = 16;   // of a block, the largest magnitude of which is found side by side
constexpr float kMost = 448.0f, kLeastScale = 1e-12f;

inline int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

// Where codes and scales lie in one piece of memory: bytes from the first code to the scales, of these, and of both.
inline uint64_t scales_at(uint64_t rows, uint64_t columns) { return (rows * columns + 3) / 4 * 4; }
inline uint64_t scales_bytes(uint64_t rows, uint64_t columns) {
  constexpr uint64_t kColumns = kBlock;
  return rows * ((columns + kColumns - 1) / kColumns) * sizeof(float);
}
inline uint64_t bytes_of(uint64_t rows, uint64_t columns) { return scales_at(rows, columns) + scales_bytes(rows, columns); }

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

EXPERTD_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

EXPERTD_INLINE float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// `a` where `which`, else `b`, without a branch: one around floating-point operations would keep a loop from becoming
// vectors.
EXPERTD_INLINE uint32_t choose(bool which, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - uint32_t(which);
  return (a & mask) | (b & ~mask);
}

EXPERTD_INLINE float to_f32(float x) { return x; }
EXPERTD_INLINE float to_f32(Bf16 x) { return of_bits(uint32_t(x.bits) << 16); }
EXPERTD_INLINE float to_f32(F16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  const uint32_t small = bits_of(float(int32_t(rest)) * 5.9604644775390625e-8f);  // 2^-24: subnormals
  const uint32_t wide = (rest << 13) + choose(rest >= 0x7c00, 0x70000000u, 0x38000000u);
  return of_bits(sign | choose(rest < 0x400, small, wide));
}

EXPERTD_INLINE void put(float x, float* to) { *to = x; }
EXPERTD_INLINE void put(float x, Bf16* to) {  // to nearest even; a NaN stays one
  const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = uint16_t(choose((bits & 0x7fffffff) > 0x7f800000, (bits >> 16) | 0x40, rounded));
}

// Of a finite number of at most 448 (and what its scaling adds in rounding).
EXPERTD_INLINE uint32_t code_of(float x) {
  const uint32_t bits = bits_of(x), a = bits & 0x7fffffff;
  const uint32_t normal = ((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - (120u << 3);
  const uint32_t small = bits_of(of_bits(a) + 16384.0f) - 0x46800000u;  // its last place is 2^-9
  return choose(a < 0x3c800000, small, normal) | ((bits >> 24) & 0x80);
}

EXPERTD_INLINE float value_of(uint32_t code) {
  const uint32_t a = code & 0x7f, sign = (code & 0x80) << 24;
  const uint32_t normal = (a << 20) + (120u << 23);
  const uint32_t small = bits_of(float(int32_t(a)) * 0.001953125f);  // 2^-9
  return of_bits(sign | choose(a == 0x7f, 0x7fc00000u, choose(a < 8, small, normal)));
}

template <class From>
EXPERTD_INLINE void quantize_block(const From* from, int64_t n, uint8_t* codes, float* scale) {
  float x[kBlock];
  uint32_t most[kPiece] = {};
  for (int64_t i = n; i < kBlock; ++i) x[i] = 0;
  for (int64_t i = 0; i < n; ++i) x[i] = to_f32(from[i]);
  for (int64_t i = 0; i < kBlock; i += kPiece)
    for (int64_t j = 0; j < kPiece; ++j) {
      const uint32_t a = bits_of(x[i + j]) & 0x7fffffff;  // magnitudes have the order of their bits
      most[j] = most[j] < a ? a : most[j];
    }
  uint32_t largest = 0;
  for (int64_t j = 0; j < kPiece; ++j) largest = largest < most[j] ? most[j] : largest;
  float s = of_bits(largest) / kMost;
  if (s < kLeastScale) s = kLeastScale;
  const bool finite = largest < 0x7f800000;
  s = finite ? s : of_bits(0x7fc00000u);
  memcpy(scale, &s, sizeof s);
  const float inverse = finite ? 1.0f / s : 0.0f;
  const uint32_t kept = finite ? 0xff : 0;
  for (int64_t i = 0; i < n; ++i) codes[i] = uint8_t(code_of(x[i] * inverse) & kept);
}

// stride: bytes from one row to the next.
template <class From>
EXPERTD_INLINE void quantize_rows(const char* from, int64_t rows, int64_t columns, int64_t stride, uint8_t* codes,
                                  float* scales) {
  const int64_t blocks = blocks_of(columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b * kBlock, n = columns - first < kBlock ? columns - first : kBlock;
      const From* row = reinterpret_cast<const From*>(from + r * stride);
      uint8_t* to = codes + r * columns + first;
      n == kBlock ? quantize_block(row + first, kBlock, to, scales + r * blocks + b)
                  : quantize_block(row + first, n, to, scales + r * blocks + b);
    }
}

template <class To>
EXPERTD_INLINE void widen_block(const uint8_t* codes, float scale, int64_t n, To* to) {
  for (int64_t i = 0; i < n; ++i) put(value_of(codes[i]) * scale, to + i);
}

template <class To>
EXPERTD_INLINE void widen_rows(const uint8_t* codes, const char* scales, int64_t rows, int64_t columns, To* to) {
  const int64_t blocks = blocks_of(columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b * kBlock, n = columns - first < kBlock ? columns - first : kBlock;
      float scale;
      memcpy(&scale, scales + (r * blocks + b) * int64_t(sizeof scale), sizeof scale);  // maybe at an odd address
      const uint8_t* from = codes + r * columns + first;
      To* out = to + r * columns + first;
      n == kBlock ? widen_block(from, scale, kBlock, out) : widen_block(from, scale, n, out);
    }
}

enum Kind { kOfF32 = 1, kOfF16 = 2, kOfBf16 = 3 };  // expertd.v1.DataType

EXPERTD_INLINE void quantize_any(const void* from, int kind, int64_t rows, int64_t columns, int64_t stride, uint8_t* codes,
                                 float* scales) {
  const auto* at = static_cast<const char*>(from);
  if (kind == kOfF32)
    quantize_rows<float>(at, rows, columns, stride, codes, scales);
  else if (kind == kOfF16)
    quantize_rows<F16>(at, rows, columns, stride, codes, scales);
  else
    quantize_rows<Bf16>(at, rows, columns, stride, codes, scales);
}

EXPERTD_INLINE void widen_any(const void* codes, const void* scales, int64_t rows, int64_t columns, void* to, int kind) {
  const auto* from = static_cast<const uint8_t*>(codes);
  const auto* by = static_cast<const char*>(scales);
  if (kind == kOfF32)
    widen_rows(from, by, rows, columns, static_cast<float*>(to));
  else
    widen_rows(from, by, rows, columns, static_cast<Bf16*>(to));
}

#if defined(__x86_64__)
#define EXPERTD_LEVEL(name, instructions)                                                                              \
  __attribute__((target(instructions))) inline void quantize_##name(const void* from, int kind, int64_t rows,         \
                                                                    int64_t columns, int64_t stride, uint8_t* codes, \
                                                                    float* scales) {                                  \
    quantize_any(from, kind, rows, columns, stride, codes, scales);                                                   \
  }                                                                                                                    \
  __attribute__((target(instructions))) inline void widen_##name(const void* codes, const void* scales, int64_t rows, \
                                                                 int64_t columns, void* to, int kind) {               \
    widen_any(codes, scales, rows, columns, to, kind);                                                                \
  }
EXPERTD_LEVEL(avx2, "avx2")
EXPERTD_LEVEL(avx512, "avx2,avx512f,avx512bw,avx512dq,avx512vl")
#undef EXPERTD_LEVEL

// 2: AVX-512, 1: AVX2, 0: neither; the processor has it, and the system keeps its registers.
inline int level() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if ((low & 0xe6) == 0xe6 && (b & kAvx512) == kAvx512) return 2;
  return (b & (1u << 5)) ? 1 : 0;
}
#endif

// [rows, columns] of `kind`, a row every `stride` bytes -> codes [rows, columns], scales [rows, blocks_of(columns)].
inline void quantize(const void* from, int kind, int64_t rows, int64_t columns, int64_t stride, uint8_t* codes,
                     float* scales) {
#if defined(__x86_64__)
  static const int best = level();
  if (best == 2) return quantize_avx512(from, kind, rows, columns, stride, codes, scales);
  if (best == 1) return quantize_avx2(from, kind, rows, columns, stride, codes, scales);
#endif
  quantize_any(from, kind, rows, columns, stride, codes, scales);
}

// The way back, to [rows, columns] of kOfF32 or kOfBf16; scales: at any address.
inline void widen(const void* codes, const void* scales, int64_t rows, int64_t columns, void* to, int kind) {
#if defined(__x86_64__)
  static const int best = level();
  if (best == 2) return widen_avx512(codes, scales, rows, columns, to, kind);
  if (best == 1) return widen_avx2(codes, scales, rows, columns, to, kind);
#endif
  widen_any(codes, scales, rows, columns, to, kind);
}

}  // namespace expertd::e4m3

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
