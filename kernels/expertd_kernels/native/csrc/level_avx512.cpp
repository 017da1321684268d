#include "simd_avx512.h"

#include "level_impl.h"
#include "processor.h"

namespace expertd {

const Level kAvx512 = level<Avx512>("avx512", kI16, false, [] { return processor().avx512; });

}  // namespace expertd
