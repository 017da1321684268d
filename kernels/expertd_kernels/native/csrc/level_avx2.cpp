#include "simd_avx2.h"

#include "level_impl.h"
#include "processor.h"

namespace expertd {

const Level kAvx2 = level<Avx2>("avx2", kI16, false, [] { return processor().avx2; });

}  // namespace expertd
