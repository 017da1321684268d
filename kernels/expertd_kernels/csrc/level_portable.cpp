#include "simd_portable.h"

#include "level_impl.h"

namespace expertd {

const Level kPortable = level<Portable>("portable", [] { return true; });

}  // namespace expertd
