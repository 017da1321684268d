// 8 lanes of AVX2 with FMA.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace expertd {

struct Avx2 {
  static constexpr bool kRegister = true;  // a vector fits a register
  static constexpr bool kBf16 = false;
  static constexpr bool kBytes = false;
  // Rows of activations in a tile: of one block, with f32; of two blocks, with f32. Sums must fit the registers.
  static constexpr int W = 8, kTile1 = 5, kTile1F = 6, kTile2 = 2, kTile2F = 2, kChains = 1, kAhead = 32 << 10;
  using I = __m256i;
  using F = __m256;

  static I loadi(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F loadf(const float* p) { return _mm256_loadu_ps(p); }
  static void storef(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void storei(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static I bcasti(int32_t x) { return _mm256_set1_epi32(x); }
  static F bcastf(float x) { return _mm256_set1_ps(x); }
  static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
  static I andi(I a, I b) { return _mm256_and_si256(a, b); }
  static I ori(I a, I b) { return _mm256_or_si256(a, b); }
  template <int N> static I sll(I a) { return N ? _mm256_slli_epi32(a, N) : a; }
  template <int N> static I srl(I a) { return N ? _mm256_srli_epi32(a, N) : a; }
  template <int N> static I sra(I a) { return N ? _mm256_srai_epi32(a, N) : a; }
  template <int N> static I srl16(I a) { return N ? _mm256_srli_epi16(a, N) : a; }
  template <int N> static I sll16(I a) { return _mm256_slli_epi16(a, N); }
  template <int N> static I sra16(I a) { return _mm256_srai_epi16(a, N); }
  static I dot16(I acc, I w, I x) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(w, x));
    asm("" : "+x"(acc));  // or the compiler adds products of different steps first, and spills them
    return acc;
  }
  static I dot8(I acc, I u, I s) {  // sums of two bytes each, in 16 bits: eight fit, of 15 * 127
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(u, s));
    asm("" : "+x"(acc));  // as in dot16
    return acc;
  }
  static I sum8(I acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }  // of the 16-bit sums of a lane
  static F cvt(I a) { return _mm256_cvtepi32_ps(a); }
  static F cast(I a) { return _mm256_castsi256_ps(a); }
  static I bits(F a) { return _mm256_castps_si256(a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static I maxi(I a, I b) { return _mm256_max_epi32(a, b); }
  static I add8(I a, I b) { return _mm256_add_epi8(a, b); }  // each byte
  static I min8(I a, I b) { return _mm256_min_epu8(a, b); }  // each byte, unsigned
  static I table8(const uint8_t* t) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t))); }
  static I lookup8(I table, I index) { return _mm256_shuffle_epi8(table, index); }  // each byte 0..15
  static I e2m1_table() {  // 2 * value + 12
    alignas(32) static constexpr uint8_t table[32] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                      12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return loadi(table);
  }
  static F e2m1_twice(I code) {
    const F table = _mm256_setr_ps(0.f, 1.f, 2.f, 3.f, 4.f, 6.f, 8.f, 12.f);
    const F sign = cast(_mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31));
    return _mm256_or_ps(_mm256_permutevar8x32_ps(table, code), sign);
  }
  static I load_u16(const uint8_t* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static I load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  // Far ahead, into the second-level cache: on Zen 3 one row of int4 reads 15 to 17 GB/s so, and 10 to 16 with 1 KiB into the first.
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};

}  // namespace expertd
