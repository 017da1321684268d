// 16 lanes of AVX-512 (F, BW, VL, DQ); with VNNI and BF16 where the including file defines EXPERTD_AVX512_BF16.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace expertd {
namespace {  // this file is compiled twice, with and without BF16: the two must not be taken for one

struct Avx512 {
  static constexpr bool kRegister = true;  // a vector fits a register
#ifdef EXPERTD_AVX512_BF16
  static constexpr bool kBf16 = true;
  static constexpr bool kBytes = true;  // dot_bytes() is there
#else
  static constexpr bool kBf16 = false;
  static constexpr bool kBytes = false;
#endif
  static constexpr int W = 16, kTile1 = 4, kTile1F = 4, kTile2 = 12, kTile2F = 12, kChains = 8, kAhead = 4096;
  using I = __m512i;
  using F = __m512;

  static I loadi(const void* p) { return _mm512_loadu_si512(p); }
  static F loadf(const float* p) { return _mm512_loadu_ps(p); }
  static void storef(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void storei(void* p, I v) { _mm512_storeu_si512(p, v); }
  static I bcasti(int32_t x) { return _mm512_set1_epi32(x); }
  static F bcastf(float x) { return _mm512_set1_ps(x); }
  static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
  static I andi(I a, I b) { return _mm512_and_si512(a, b); }
  static I ori(I a, I b) { return _mm512_or_si512(a, b); }
  template <int N> static I sll(I a) { return N ? _mm512_slli_epi32(a, N) : a; }
  template <int N> static I srl(I a) { return N ? _mm512_srli_epi32(a, N) : a; }
  template <int N> static I sra(I a) { return N ? _mm512_srai_epi32(a, N) : a; }
  template <int N> static I srl16(I a) { return N ? _mm512_srli_epi16(a, N) : a; }
  template <int N> static I sll16(I a) { return _mm512_slli_epi16(a, N); }
  template <int N> static I sra16(I a) { return _mm512_srai_epi16(a, N); }
  static I dot16(I acc, I w, I x) {
#ifdef EXPERTD_AVX512_BF16
    return _mm512_dpwssd_epi32(acc, w, x);
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(w, x));
#endif
  }
  static I dot8(I acc, I u, I s) {
#ifdef EXPERTD_AVX512_BF16
    return _mm512_dpbusd_epi32(acc, u, s);
#else
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(u, s));
#endif
  }
  static I sum8(I acc) {  // of the 16-bit sums of a lane
#ifdef EXPERTD_AVX512_BF16
    return acc;
#else
    return _mm512_madd_epi16(acc, _mm512_set1_epi16(1));
#endif
  }
#ifdef EXPERTD_AVX512_BF16
  // Sums += unsigned bytes x the four signed ones at x. As assembly: from the intrinsics g++ keeps sums on the stack and loads all
  // broadcasts first, half of the speed from three rows on.
  static inline __attribute__((always_inline)) void dot_bytes(I (&s)[2], const I (&u)[2], const int32_t* x) {
    I t;
    asm("vpbroadcastd %5, %2\n\tvpdpbusd %2, %3, %0\n\tvpdpbusd %2, %4, %1" : "+v"(s[0]), "+v"(s[1]), "=&v"(t) : "v"(u[0]), "v"(u[1]), "m"(*x));
  }
  static inline __attribute__((always_inline)) void dot_bytes(I (&s)[1], const I (&u)[1], const int32_t* x) {
    I t;
    asm("vpbroadcastd %3, %1\n\tvpdpbusd %1, %2, %0" : "+v"(s[0]), "=&v"(t) : "v"(u[0]), "m"(*x));
  }
  // The compiler would rather read memory again for each use; a line that is still on its way is then asked for three times.
  static inline __attribute__((always_inline)) I load_once(const void* p) {
    I a = loadi(p);
    asm("" : "+v"(a));
    return a;
  }
  static void even_and_odd(const int32_t* p, I& even, I& odd) {  // of 32 numbers
    const I numbers = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I a = loadi(p), b = loadi(p + W);
    even = _mm512_permutex2var_epi32(a, numbers, b);
    odd = _mm512_permutex2var_epi32(a, addi(numbers, bcasti(1)), b);
  }
  static void store_low_bytes(void* p, I v) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }  // of each lane
  static I subi(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I lookup6(I table, I index) {  // the low 6 bits of each byte. As assembly: only levels that ask for VBMI may have it
    I t;
    asm("vpermb %1, %2, %0" : "=v"(t) : "v"(table), "v"(index));
    return t;
  }
  // Into the second-level cache. Inlined at once: the compiler takes a function that only fetches for one without effect, and drops its calls.
  static inline __attribute__((always_inline)) void prefetch2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  static F dot_bf16(F acc, I a, I b) { return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)); }
  static I add16(I a, I b) { return _mm512_add_epi16(a, b); }  // each 16-bit half
  static I table16(const uint16_t* t) { return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(t))); }
  static I lookup16(I table, I index) { return _mm512_permutexvar_epi16(index, table); }
  static I e4m3_to_bf16(I bytes) {  // each 16-bit half: 0..255. Numbers below 2^-6 come from a table: bf16 subnormals would count as zero
    static constexpr uint16_t kSmall[16] = {0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
    const I magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7F)), sign = _mm512_and_si512(bytes, _mm512_set1_epi16(0x80));
    const I normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const I value = _mm512_mask_permutexvar_epi16(normal, small, magnitude, table16(kSmall));
    return _mm512_or_si512(value, _mm512_slli_epi16(sign, 8));
  }
#endif
  static F cvt(I a) { return _mm512_cvtepi32_ps(a); }
  static F cast(I a) { return _mm512_castsi512_ps(a); }
  static I bits(F a) { return _mm512_castps_si512(a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static I maxi(I a, I b) { return _mm512_max_epi32(a, b); }
  static I add8(I a, I b) { return _mm512_add_epi8(a, b); }  // each byte
  static I min8(I a, I b) { return _mm512_min_epu8(a, b); }  // each byte, unsigned
  static I table8(const uint8_t* t) { return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t))); }
  static I lookup8(I table, I index) { return _mm512_shuffle_epi8(table, index); }  // each byte 0..15
  static I e2m1_table() {  // 2 * value + 12
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  }
  static F e2m1_twice(I code) {
    const F table = _mm512_setr_ps(0.f, 1.f, 2.f, 3.f, 4.f, 6.f, 8.f, 12.f, -0.f, -1.f, -2.f, -3.f, -4.f, -6.f, -8.f, -12.f);
    return _mm512_permutexvar_ps(code, table);
  }
  static I load_u16(const uint8_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
};

}  // namespace
}  // namespace expertd
