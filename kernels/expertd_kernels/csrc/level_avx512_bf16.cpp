#define EXPERTD_AVX512_BF16
#include "simd_avx512.h"

#include "level_impl.h"

namespace expertd {

const Level kAvx512Bf16 = level<Avx512>("avx512_bf16", [] {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
});

}  // namespace expertd
