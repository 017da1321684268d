#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif

namespace expertd {
namespace {

#if defined(__x86_64__)
constexpr bool has(uint64_t word, uint64_t bits) { return (word & bits) == bits; }
constexpr uint64_t bit(int n) { return uint64_t(1) << n; }

// Registers that the system saves when it changes processes.
uint64_t saved_registers() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

Processor ask() {
  Processor p;
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return p;
  p.slow_subnormals = b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
  constexpr uint64_t kFma = bit(12), kOsXsave = bit(27);
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, kFma | kOsXsave)) return p;
  constexpr uint64_t kYmm = bit(1) | bit(2), kZmm = kYmm | bit(5) | bit(6) | bit(7);
  const uint64_t saved = saved_registers();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(saved, kYmm)) return p;
  constexpr uint64_t kAvx2 = bit(5), kF = bit(16), kDq = bit(17), kBw = bit(30), kVl = bit(31), kVnni = bit(11), kVbmi = bit(1), kBf16 = bit(5);
  p.avx2 = has(b, kAvx2);
  p.avx512 = p.avx2 && has(saved, kZmm) && has(b, kF | kDq | kBw | kVl);
  p.avx512_vnni = p.avx512 && has(c, kVnni);
  p.avx512_vbmi = p.avx512 && has(c, kVbmi);
  p.avx512_bf16 = p.avx512_vnni && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, kBf16);
  return p;
}
#else
Processor ask() { return {}; }
#endif

}  // namespace

const Processor& processor() {
  static const Processor found = ask();
  return found;
}

}  // namespace expertd
