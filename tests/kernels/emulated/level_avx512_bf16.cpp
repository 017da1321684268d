// Stands in for csrc/level_avx512_bf16.cpp: the same levels on emulated instructions and tiles, for processors without them.
#include "avx512.h"
#define EXPERTD_AVX512_BF16
#include "simd_avx512.h"

#include "level_impl.h"

#include "amx.h"

namespace expertd {

struct Emulated : Avx512 {
  static constexpr bool kRegister = false;
};
const Level kAvx512Vnni = level<Emulated>("avx512_vnni", false, [] { return true; });
const Level kAvx512Bf16 = level<Emulated>("avx512_bf16", true, [] { return true; });
const Level kAvx512Amx = level_with_tiles<Emulated, emulated::Tiles>("avx512_amx", 4, [] { return true; });

}  // namespace expertd
