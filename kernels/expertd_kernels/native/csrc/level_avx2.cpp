#include "simd_avx2.h"

#include "level_impl.h"

namespace expertd {

const Level kAvx2 = level<Avx2>("avx2", false, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); });

}  // namespace expertd
