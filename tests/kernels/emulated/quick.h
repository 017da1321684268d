// An emulated level is not timed: its speed says nothing, and would take seconds.
#pragma once
#include "level.h"

namespace expertd {
namespace {

constexpr Level quick(Level level) {
  level.peak = [](int, double) { return 1.0; };
  return level;
}

}  // namespace
}  // namespace expertd
