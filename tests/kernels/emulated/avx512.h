// The AVX-512 instructions that csrc/simd_avx512.h uses, for processors without them: what each is defined to do, lane by lane, in plain
// C++. For tests only; the compiler makes AVX2 of it where it can. An instruction that simd_avx512.h newly uses has to be added here.
//
// With EXPERTD_SIMDE the implementations are those of SIMDe (SIMD Everywhere, MIT licence; not part of this repository), so that two
// independent readings of the manual check each other; what SIMDe lacks is taken from here.
//
// The dot product of bf16 pairs follows the manual to the letter: subnormal inputs and results count as zero, the odd pair is added first,
// and each addition is fused. (SIMDe's keeps subnormals.)
#pragma once
#ifdef EXPERTD_SIMDE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#endif
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Not inlined: the kernels unroll their loops, and would take minutes to compile. What stands here is optimized, all else is not.
#define EMULATED inline __attribute__((noinline))
#pragma GCC push_options
#pragma GCC optimize("O2")

namespace emulated {

typedef long long I512 __attribute__((vector_size(64), aligned(64)));
typedef float F512 __attribute__((vector_size(64), aligned(64)));
typedef short B512 __attribute__((vector_size(64), aligned(64)));

// A vector as an array of its lanes, and back.
template <class T>
struct Lanes {
  static constexpr int count = 64 / sizeof(T);
  T at[count];
  Lanes() = default;
  template <class V>
  explicit Lanes(const V& v) { static_assert(sizeof v == 64); __builtin_memcpy(at, &v, 64); }
  template <class V>
  V as() const { V v; __builtin_memcpy(&v, at, 64); return v; }
};

// One result of T for each lane of `a` (and `b`): f(a[i], b[i]).
template <class V, class T, class F>
inline V lanes1(const V& a, const F& f) {
  Lanes<T> x(a);
  for (T& v : x.at) v = f(v);
  return x.template as<V>();
}
template <class V, class T, class F>
inline V lanes2(const V& a, const V& b, const F& f) {
  Lanes<T> x(a), y(b);
  for (int i = 0; i < x.count; i++) x.at[i] = f(x.at[i], y.at[i]);
  return x.template as<V>();
}

EMULATED I512 mm512_loadu_si512(const void* p) { I512 v; __builtin_memcpy(&v, p, 64); return v; }
EMULATED F512 mm512_loadu_ps(const void* p) { F512 v; __builtin_memcpy(&v, p, 64); return v; }
EMULATED void mm512_storeu_si512(void* p, I512 v) { __builtin_memcpy(p, &v, 64); }
EMULATED void mm512_storeu_ps(void* p, F512 v) { __builtin_memcpy(p, &v, 64); }
EMULATED I512 mm512_castps_si512(F512 v) { return mm512_loadu_si512(&v); }
EMULATED F512 mm512_castsi512_ps(I512 v) { return mm512_loadu_ps(&v); }

EMULATED I512 mm512_set1_epi32(int32_t x) { return lanes1<I512, int32_t>(I512{}, [x](int32_t) { return x; }); }
EMULATED I512 mm512_set1_epi16(int16_t x) { return lanes1<I512, int16_t>(I512{}, [x](int16_t) { return x; }); }
EMULATED F512 mm512_set1_ps(float x) { return lanes1<F512, float>(F512{}, [x](float) { return x; }); }
template <class... X>
EMULATED F512 mm512_setr_ps(X... x) {
  const float v[16] = {x...};
  return mm512_loadu_ps(v);
}
EMULATED I512 mm512_broadcast_i32x4(__m128i v) {
  I512 x;
  for (int i = 0; i < 4; i++) __builtin_memcpy(reinterpret_cast<char*>(&x) + 16 * i, &v, 16);
  return x;
}
EMULATED I512 mm512_broadcast_i64x4(__m256i v) {
  I512 x;
  for (int i = 0; i < 2; i++) __builtin_memcpy(reinterpret_cast<char*>(&x) + 32 * i, &v, 32);
  return x;
}

EMULATED I512 mm512_and_si512(I512 a, I512 b) { return a & b; }
EMULATED I512 mm512_or_si512(I512 a, I512 b) { return a | b; }
EMULATED I512 mm512_add_epi32(I512 a, I512 b) { return lanes2<I512, uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; }); }
EMULATED I512 mm512_add_epi16(I512 a, I512 b) { return lanes2<I512, uint16_t>(a, b, [](int x, int y) { return uint16_t(x + y); }); }
EMULATED I512 mm512_add_epi8(I512 a, I512 b) { return lanes2<I512, uint8_t>(a, b, [](int x, int y) { return uint8_t(x + y); }); }
EMULATED I512 mm512_min_epu8(I512 a, I512 b) { return lanes2<I512, uint8_t>(a, b, [](uint8_t x, uint8_t y) { return x < y ? x : y; }); }
EMULATED I512 mm512_max_epi32(I512 a, I512 b) { return lanes2<I512, int32_t>(a, b, [](int32_t x, int32_t y) { return x > y ? x : y; }); }
// Shifts by more than the lane's width give zero, or the sign.
EMULATED I512 mm512_slli_epi32(I512 a, unsigned n) { return lanes1<I512, uint32_t>(a, [n](uint32_t x) { return n > 31 ? 0 : x << n; }); }
EMULATED I512 mm512_srli_epi32(I512 a, unsigned n) { return lanes1<I512, uint32_t>(a, [n](uint32_t x) { return n > 31 ? 0 : x >> n; }); }
EMULATED I512 mm512_srai_epi32(I512 a, unsigned n) { return lanes1<I512, int32_t>(a, [n](int32_t x) { return x >> (n > 31 ? 31 : n); }); }
EMULATED I512 mm512_slli_epi16(I512 a, unsigned n) { return lanes1<I512, uint16_t>(a, [n](uint32_t x) { return uint16_t(n > 15 ? 0 : x << n); }); }
EMULATED I512 mm512_srai_epi16(I512 a, unsigned n) { return lanes1<I512, uint16_t>(a, [n](uint32_t x) { return uint16_t(int16_t(x) >> (n > 15 ? 15 : n)); }); }
EMULATED I512 mm512_srli_epi16(I512 a, unsigned n) { return lanes1<I512, uint16_t>(a, [n](uint32_t x) { return uint16_t(n > 15 ? 0 : x >> n); }); }

EMULATED I512 mm512_cvtepu8_epi32(__m128i v) {
  uint8_t from[16];
  Lanes<int32_t> to;
  __builtin_memcpy(from, &v, 16);
  for (int i = 0; i < 16; i++) to.at[i] = from[i];
  return to.as<I512>();
}
EMULATED I512 mm512_cvtepu16_epi32(__m256i v) {
  uint16_t from[16];
  Lanes<int32_t> to;
  __builtin_memcpy(from, &v, 32);
  for (int i = 0; i < 16; i++) to.at[i] = from[i];
  return to.as<I512>();
}
EMULATED F512 mm512_cvtepi32_ps(I512 a) {
  const Lanes<int32_t> x(a);
  Lanes<float> to;
  for (int i = 0; i < 16; i++) to.at[i] = float(x.at[i]);
  return to.as<F512>();
}

EMULATED F512 mm512_add_ps(F512 a, F512 b) { return a + b; }
EMULATED F512 mm512_sub_ps(F512 a, F512 b) { return a - b; }
EMULATED F512 mm512_mul_ps(F512 a, F512 b) { return a * b; }
EMULATED F512 mm512_div_ps(F512 a, F512 b) { return a / b; }
EMULATED F512 mm512_fmadd_ps(F512 a, F512 b, F512 c) {
  const Lanes<float> x(a), y(b);
  Lanes<float> z(c);
  for (int i = 0; i < 16; i++) z.at[i] = __builtin_fmaf(x.at[i], y.at[i], z.at[i]);
  return z.as<F512>();
}
// The second operand where either is NaN, or both are zero.
EMULATED F512 mm512_min_ps(F512 a, F512 b) { return lanes2<F512, float>(a, b, [](float x, float y) { return x < y ? x : y; }); }
EMULATED F512 mm512_max_ps(F512 a, F512 b) { return lanes2<F512, float>(a, b, [](float x, float y) { return x > y ? x : y; }); }

// Pairs of signed 16-bit products, added; madd wraps only for four times -2^15.
EMULATED I512 pairs16(I512 acc, I512 a, I512 b) {
  const Lanes<int16_t> x(a), y(b);
  Lanes<uint32_t> sum(acc);
  for (int i = 0; i < 16; i++) sum.at[i] += uint32_t(x.at[2 * i] * y.at[2 * i]) + uint32_t(x.at[2 * i + 1] * y.at[2 * i + 1]);
  return sum.as<I512>();
}
EMULATED I512 mm512_madd_epi16(I512 a, I512 b) { return pairs16(I512{}, a, b); }
EMULATED I512 mm512_dpwssd_epi32(I512 acc, I512 a, I512 b) { return pairs16(acc, a, b); }
// Unsigned times signed bytes: pairs, saturated to 16 bits; fours, added to 32 bits.
EMULATED I512 mm512_maddubs_epi16(I512 a, I512 b) {
  const Lanes<uint8_t> x(a);
  const Lanes<int8_t> y(b);
  Lanes<int16_t> to;
  for (int i = 0; i < 32; i++) {
    const int sum = x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1];
    to.at[i] = int16_t(sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum);
  }
  return to.as<I512>();
}
EMULATED I512 mm512_dpbusd_epi32(I512 acc, I512 a, I512 b) {
  const Lanes<uint8_t> x(a);
  const Lanes<int8_t> y(b);
  Lanes<uint32_t> sum(acc);
  for (int i = 0; i < 64; i++) sum.at[i / 4] += uint32_t(x.at[i] * y.at[i]);
  return sum.as<I512>();
}

inline float bf16(uint16_t h) {  // subnormals are zero
  const uint32_t u = uint32_t(h & 0x7F80 ? h : h & 0x8000) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
inline float flushed(float f) { return __builtin_fabsf(f) < 0x1p-126f ? __builtin_copysignf(0.0f, f) : f; }
EMULATED F512 mm512_dpbf16_ps(F512 acc, B512 a, B512 b) {
  const Lanes<uint16_t> x(a), y(b);
  Lanes<float> sum(acc);
  for (int i = 0; i < 16; i++) {
    const float odd = flushed(__builtin_fmaf(bf16(x.at[2 * i + 1]), bf16(y.at[2 * i + 1]), flushed(sum.at[i])));
    sum.at[i] = flushed(__builtin_fmaf(bf16(x.at[2 * i]), bf16(y.at[2 * i]), odd));
  }
  return sum.as<F512>();
}

EMULATED I512 mm512_shuffle_epi8(I512 a, I512 index) {  // within 16 bytes
  const Lanes<uint8_t> from(a);
  Lanes<uint8_t> to(index);
  for (int i = 0; i < 64; i++) to.at[i] = to.at[i] & 0x80 ? 0 : from.at[i / 16 * 16 + (to.at[i] & 15)];
  return to.as<I512>();
}
EMULATED I512 mm512_permutexvar_epi16(I512 index, I512 a) {
  const Lanes<uint16_t> from(a);
  return lanes1<I512, uint16_t>(index, [&](uint16_t i) { return from.at[i & 31]; });
}
EMULATED F512 mm512_permutexvar_ps(I512 index, F512 a) {
  const Lanes<float> from(a);
  const Lanes<uint32_t> i(index);
  Lanes<float> to;
  for (int n = 0; n < 16; n++) to.at[n] = from.at[i.at[n] & 15];
  return to.as<F512>();
}
EMULATED I512 mm512_mask_permutexvar_epi16(I512 src, __mmask32 k, I512 index, I512 a) {
  Lanes<uint16_t> to(src);
  const Lanes<uint16_t> moved(mm512_permutexvar_epi16(index, a));
  for (int i = 0; i < 32; i++)
    if (k >> i & 1) to.at[i] = moved.at[i];
  return to.as<I512>();
}
template <class V>
EMULATED __mmask32 mm512_cmplt_epu16_mask(const V& a, const V& b) {
  const Lanes<uint16_t> x(a), y(b);
  __mmask32 k = 0;
  for (int i = 0; i < 32; i++) k |= __mmask32(x.at[i] < y.at[i]) << i;
  return k;
}

}  // namespace emulated
#pragma GCC pop_options

#ifdef EXPERTD_SIMDE
#undef __m512i
#undef __m512
#undef __m512bh
#define __m512i simde__m512i
#define __m512 simde__m512
#define __m512bh simde__m512bh
#undef _mm512_cmplt_epu16_mask
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_srai_epi16
#undef _mm512_srai_epi32
#undef _mm512_madd_epi16  // names the masked form in SIMDe 0.7
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#define _mm512_cmplt_epu16_mask emulated::mm512_cmplt_epu16_mask
#define _mm512_cvtepi32_ps(a) (simde__m512)(emulated::mm512_cvtepi32_ps((emulated::I512)(a)))
#define _mm512_cvtepu16_epi32(a) (simde__m512i)(emulated::mm512_cvtepu16_epi32(a))
#define _mm512_cvtepu8_epi32(a) (simde__m512i)(emulated::mm512_cvtepu8_epi32(a))
#define _mm512_srai_epi16(a, n) (simde__m512i)(emulated::mm512_srai_epi16((emulated::I512)(a), n))
#define _mm512_srai_epi32(a, n) (simde__m512i)(emulated::mm512_srai_epi32((emulated::I512)(a), n))
#else
// Without optimization the compiler's own are macros.
#undef _mm512_add_epi8
#undef _mm512_min_epu8
#undef _mm512_add_epi16
#undef _mm512_add_epi32
#undef _mm512_add_ps
#undef _mm512_and_si512
#undef _mm512_broadcast_i32x4
#undef _mm512_broadcast_i64x4
#undef _mm512_castps_si512
#undef _mm512_castsi512_ps
#undef _mm512_cmplt_epu16_mask
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_div_ps
#undef _mm512_dpbf16_ps
#undef _mm512_dpbusd_epi32
#undef _mm512_dpwssd_epi32
#undef _mm512_fmadd_ps
#undef _mm512_loadu_ps
#undef _mm512_loadu_si512
#undef _mm512_madd_epi16
#undef _mm512_maddubs_epi16
#undef _mm512_mask_permutexvar_epi16
#undef _mm512_max_epi32
#undef _mm512_max_ps
#undef _mm512_min_ps
#undef _mm512_mul_ps
#undef _mm512_or_si512
#undef _mm512_permutexvar_epi16
#undef _mm512_permutexvar_ps
#undef _mm512_set1_epi16
#undef _mm512_set1_epi32
#undef _mm512_set1_ps
#undef _mm512_setr_ps
#undef _mm512_shuffle_epi8
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srai_epi16
#undef _mm512_srai_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _mm512_storeu_ps
#undef _mm512_storeu_si512
#undef _mm512_sub_ps
#define __m512i emulated::I512
#define __m512 emulated::F512
#define __m512bh emulated::B512
#define _mm512_add_epi8 emulated::mm512_add_epi8
#define _mm512_min_epu8 emulated::mm512_min_epu8
#define _mm512_add_epi16 emulated::mm512_add_epi16
#define _mm512_add_epi32 emulated::mm512_add_epi32
#define _mm512_add_ps emulated::mm512_add_ps
#define _mm512_and_si512 emulated::mm512_and_si512
#define _mm512_broadcast_i32x4 emulated::mm512_broadcast_i32x4
#define _mm512_broadcast_i64x4 emulated::mm512_broadcast_i64x4
#define _mm512_castps_si512 emulated::mm512_castps_si512
#define _mm512_castsi512_ps emulated::mm512_castsi512_ps
#define _mm512_cmplt_epu16_mask emulated::mm512_cmplt_epu16_mask
#define _mm512_cvtepi32_ps emulated::mm512_cvtepi32_ps
#define _mm512_cvtepu16_epi32 emulated::mm512_cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::mm512_cvtepu8_epi32
#define _mm512_div_ps emulated::mm512_div_ps
#define _mm512_dpbf16_ps emulated::mm512_dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::mm512_dpbusd_epi32
#define _mm512_dpwssd_epi32 emulated::mm512_dpwssd_epi32
#define _mm512_fmadd_ps emulated::mm512_fmadd_ps
#define _mm512_loadu_ps emulated::mm512_loadu_ps
#define _mm512_loadu_si512 emulated::mm512_loadu_si512
#define _mm512_madd_epi16 emulated::mm512_madd_epi16
#define _mm512_maddubs_epi16 emulated::mm512_maddubs_epi16
#define _mm512_mask_permutexvar_epi16 emulated::mm512_mask_permutexvar_epi16
#define _mm512_max_epi32 emulated::mm512_max_epi32
#define _mm512_max_ps emulated::mm512_max_ps
#define _mm512_min_ps emulated::mm512_min_ps
#define _mm512_mul_ps emulated::mm512_mul_ps
#define _mm512_or_si512 emulated::mm512_or_si512
#define _mm512_permutexvar_epi16 emulated::mm512_permutexvar_epi16
#define _mm512_permutexvar_ps emulated::mm512_permutexvar_ps
#define _mm512_set1_epi16 emulated::mm512_set1_epi16
#define _mm512_set1_epi32 emulated::mm512_set1_epi32
#define _mm512_set1_ps emulated::mm512_set1_ps
#define _mm512_setr_ps emulated::mm512_setr_ps
#define _mm512_shuffle_epi8 emulated::mm512_shuffle_epi8
#define _mm512_slli_epi16 emulated::mm512_slli_epi16
#define _mm512_slli_epi32 emulated::mm512_slli_epi32
#define _mm512_srai_epi16 emulated::mm512_srai_epi16
#define _mm512_srai_epi32 emulated::mm512_srai_epi32
#define _mm512_srli_epi16 emulated::mm512_srli_epi16
#define _mm512_srli_epi32 emulated::mm512_srli_epi32
#define _mm512_storeu_ps emulated::mm512_storeu_ps
#define _mm512_storeu_si512 emulated::mm512_storeu_si512
#define _mm512_sub_ps emulated::mm512_sub_ps
#endif
