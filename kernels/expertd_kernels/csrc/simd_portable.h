// 8 lanes in plain C++ (compiler vector extensions): SSE2, NEON or scalar code, whatever the target has.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace expertd {

struct Portable {
  static constexpr bool kRegister = false;  // a vector may take more than one register
  static constexpr int W = 8, kTile1 = 4, kTile2 = 2, kTile2F = 2, kChains = 1, kAhead = 0;
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
  static I dot16(I acc, I w, I x) {  // acc + low half * low half + high half * high half, signed
    const I wl = sll<16>(w), xl = sll<16>(x);
    return acc + sra<16>(wl) * sra<16>(xl) + sra<16>(w) * sra<16>(x);
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
  static I e2m1_bytes(I nibbles) {  // each byte 0..15 -> 2 * value + 12
    static constexpr uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    uint8_t b[32];
    std::memcpy(b, &nibbles, 32);
    for (auto& x : b) x = table[x];
    return loadi(b);
  }
  static F e2m1_twice(I code) {  // each lane 0..15 -> 2 * value
    return cvt(andi(e2m1_bytes(code), bcasti(255)) - bcasti(12));
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
