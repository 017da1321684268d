#include "simd_portable.h"

#include "level_impl.h"

namespace expertd {

const Level kPortable = level<Portable>("portable", Portable::kBf16 ? kBf16 : kI16, Portable::kBf16, [] { return true; });

}  // namespace expertd
