// Stands in for csrc/level_avx512.cpp: the same level on emulated instructions, for processors without them.
#include "avx512.h"
#include "simd_avx512.h"

#include "level_impl.h"
#include "quick.h"

namespace expertd {

struct Emulated : Avx512 {
  static constexpr bool kRegister = false;
};
const Level kAvx512 = quick(level<Emulated>("avx512", kI16, false, [] { return true; }));

}  // namespace expertd
