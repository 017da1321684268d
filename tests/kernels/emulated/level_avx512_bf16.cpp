// Stands in for csrc/level_avx512_bf16.cpp: the same levels on emulated instructions and tiles, for processors without them.
#include "avx512.h"
#define EXPERTD_AVX512_BF16
#include "simd_avx512.h"

#include "level_impl.h"
#include "quick.h"

#include "amx.h"

namespace expertd {

struct Emulated : Avx512 {
  static constexpr bool kRegister = false;
  template <int N>
  static void dot_bytes(I (&sums)[N], const I (&codes)[N], const int32_t* x) {
    for (int i = 0; i < N; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], codes[i], bcasti(*x));
  }
  static I load_once(const void* p) { return loadi(p); }
  static void even_and_odd(const int32_t* p, I& even, I& odd) {
    int32_t lanes[2][16];
    for (int i = 0; i < 32; i++) lanes[i % 2][i / 2] = p[i];
    even = loadi(lanes[0]), odd = loadi(lanes[1]);
  }
  static I subi(I a, I b) {
    int32_t x[16], y[16];
    storei(x, a), storei(y, b);
    for (int i = 0; i < 16; i++) x[i] -= y[i];
    return loadi(x);
  }
  static void store_low_bytes(void* p, I v) {
    int32_t lanes[16];
    storei(lanes, v);
    for (int i = 0; i < 16; i++) static_cast<uint8_t*>(p)[i] = uint8_t(lanes[i]);
  }
  static I lookup6(I table, I index) {
    uint8_t t[64], b[64];
    storei(t, table), storei(b, index);
    for (uint8_t& x : b) x = t[x & 63];
    return loadi(b);
  }
};
const Level kAvx512Vnni = quick(level<Emulated>("avx512_vnni", kI16, false, [] { return true; }));
const Level kAvx512Bf16 = quick(level<Emulated>("avx512_bf16", kBf16, true, [] { return true; }));
const Level kAvx512Bytes = quick(level<Emulated>("avx512_bytes", kBytes, true, [] { return true; }));
const Level kAvx512BytesAhead = quick(level<Emulated>("avx512_bytes_ahead", kBytes, false, [] { return true; }, true));
const Level kAvx512Amx = quick(level_with_tiles<Emulated, emulated::Tiles>("avx512_amx", 4, [] { return true; }));

}  // namespace expertd
