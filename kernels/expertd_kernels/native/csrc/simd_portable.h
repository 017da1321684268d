// 8 lanes in plain C++ (compiler vector extensions): SSE2, NEON or scalar code, whatever the target has.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef EXPERTD_PORTABLE_BF16
#define EXPERTD_PORTABLE_BF16 false
#endif

namespace expertd {

struct Portable {
  static constexpr bool kRegister = false;  // a vector may take more than one register
  static constexpr bool kBf16 = EXPERTD_PORTABLE_BF16;  // off: f32 is faster; on: to test the kernels of levels that have it
  static constexpr bool kBytes = false;
  static constexpr int W = 8, kTile1 = 4, kTile1F = 4, kTile2 = 2, kTile2F = 2, kChains = 1, kAhead = 0;
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(32)));
  typedef float F __attribute__((vector_size(32)));

  static I loadi(const void* p) { I v; std::memcpy(&v, p, sizeof v); return v; }
  static F loadf(const float* p) { F v; std::memcpy(&v, p, sizeof v); return v; }
  static void storef(float* p, F v) { std::memcpy(p, &v, sizeof v); }
  static void storei(void* p, I v) { std::memcpy(p, &v, sizeof v); }
  static I bcasti(int32_t x) { return I{x, x, x, x, x, x, x, x}; }
  static F bcastf(float x) { return F{x, x, x, x, x, x, x, x}; }
  static I addi(I a, I b) { return a + b; }
  static I andi(I a, I b) { return a & b; }
  static I ori(I a, I b) { return a | b; }
  template <int N> static I sll(I a) { return (I)((U)a << N); }
  template <int N> static I srl(I a) { return (I)((U)a >> N); }
  template <int N> static I sra(I a) { return a >> N; }
  template <int N> static I srl16(I a) {  // each 16-bit half
    return (I)(((U)a >> N) & (U)bcasti(int32_t((0xFFFFu >> N) * 0x10001u)));
  }
  template <int N> static I sll16(I a) { return (I)((U)a << N & (U)bcasti(int32_t((0xFFFFu << N & 0xFFFFu) * 0x10001u))); }
  template <int N> static I sra16(I a) {  // each 16-bit half, with its sign
    typedef int16_t H __attribute__((vector_size(32)));
    return (I)((H)a >> N);
  }
  static I dot16(I acc, I w, I x) {  // acc + low half * low half + high half * high half, signed
    const I wl = sll<16>(w), xl = sll<16>(x);
    return acc + sra<16>(wl) * sra<16>(xl) + sra<16>(w) * sra<16>(x);
  }
  static F dot_bf16(F acc, I a, I b) {  // as dot16, bf16 halves
    const I high = bcasti(int32_t(0xFFFF0000u));
    return acc + (F)sll<16>(a) * (F)sll<16>(b) + (F)(a & high) * (F)(b & high);
  }
  static I dot8(I acc, I u, I s) {  // acc + sum of four unsigned * signed bytes
    for (int i = 0; i < 4; i++) acc += (I)((U)u >> (8 * i) & (U)bcasti(255)) * (I)((I)((U)s << (24 - 8 * i)) >> 24);
    return acc;
  }
  static I sum8(I acc) { return acc; }
  static I table16(const uint16_t* t) { return loadi(t); }
  static I lookup16(I table, I index) {  // each 16-bit half: table[index & 15]
    uint16_t t[16], i[16];
    std::memcpy(t, &table, 32);
    std::memcpy(i, &index, 32);
    for (auto& x : i) x = t[x & 15];
    return loadi(i);
  }
  static I e4m3_to_bf16(I bytes) {  // each 16-bit half: 0..255
    uint16_t h[16];
    std::memcpy(h, &bytes, 32);
    for (auto& x : h) {
      const uint32_t bits = uint32_t(x & 0x7F) << 20;
      float f;
      std::memcpy(&f, &bits, 4);
      f *= 0x1p120f;
      uint32_t u;
      std::memcpy(&u, &f, 4);
      x = uint16_t(u >> 16 | (x & 0x80) << 8);
    }
    return loadi(h);
  }
  static F cvt(I a) { return __builtin_convertvector(a, F); }
  static F cast(I a) { return (F)a; }
  static I bits(F a) { return (I)a; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F min(F a, F b) { return a < b ? a : b; }  // b where either is NaN
  static F max(F a, F b) { return a > b ? a : b; }
  static I maxi(I a, I b) { return a > b ? a : b; }
  typedef uint8_t Bytes __attribute__((vector_size(32)));
  static I add8(I a, I b) { return (I)((Bytes)a + (Bytes)b); }  // each byte
  static I min8(I a, I b) { return (I)((Bytes)a < (Bytes)b ? (Bytes)a : (Bytes)b); }  // each byte, unsigned
  static I table8(const uint8_t* t) {
    uint8_t twice[32];
    std::memcpy(twice, t, 16);
    std::memcpy(twice + 16, t, 16);
    return loadi(twice);
  }
  static I lookup8(I table, I index) {  // each byte 0..15
    uint8_t t[32], b[32];
    std::memcpy(t, &table, 32);
    std::memcpy(b, &index, 32);
    for (auto& x : b) x = t[x];
    return loadi(b);
  }
  static I e2m1_table() {  // 2 * value + 12
    static constexpr uint8_t table[32] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return loadi(table);
  }
  static F e2m1_twice(I code) {  // each lane 0..15 -> 2 * value
    return cvt(andi(lookup8(e2m1_table(), code), bcasti(255)) - bcasti(12));
  }
  static I load_u16(const uint8_t* p) {
    uint16_t h[8];
    std::memcpy(h, p, sizeof h);
    return I{h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
  }
  static I load_u8(const uint8_t* p) { return I{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]}; }
  static void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
};

}  // namespace expertd
