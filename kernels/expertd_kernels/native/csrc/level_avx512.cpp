#include "simd_avx512.h"

#include "level_impl.h"

namespace expertd {

const Level kAvx512 = level<Avx512>("avx512", false, [] {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
});

}  // namespace expertd
