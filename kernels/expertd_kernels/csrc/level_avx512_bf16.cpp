#define EXPERTD_AVX512_BF16
#include "simd_avx512.h"

#include "level_impl.h"

namespace expertd {
namespace {

bool runs() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

}  // namespace

// The same instructions; which dot product is faster is the maker's affair. On a Xeon with AMX (2023) vpdpwssd does 2.5 times the
// multiply-adds of vdpbf16ps; on Zen 5 vdpbf16ps does twice those of the integer ones.
const Level kAvx512Vnni = level<Avx512>("avx512_vnni", false, runs);
const Level kAvx512Bf16 = level<Avx512>("avx512_bf16", true, runs);

}  // namespace expertd
