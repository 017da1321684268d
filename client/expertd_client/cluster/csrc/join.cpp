// Partial sums of servers, added up: the twin of _join in join.py, which says what it does and gives the same bits.
//
// A block of columns of one token stays in registers and in the first cache while all servers' rows are added to it, so
// each answer is read once and the sum is written once.
#include "join.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // what clang does at O2: loops whose length is not known become vectors, too
#endif

using expertd::cluster::Job;
using expertd::cluster::Part;

namespace {

constexpr int64_t BLOCK = 1024;  // columns; their f32 sums are 4 KiB

struct Bf16 {
  uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))

INLINE float load(float x) { return x; }

INLINE float load(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

INLINE void store(float x, float* to) { *to = x; }

INLINE void store(float x, Bf16* to) {  // to nearest even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

template <typename In>
INLINE void set(float* sum, const In* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = load(from[i]);
}

template <typename In>
INLINE void add(float* sum, const In* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += load(from[i]);
}

template <typename Out>
INLINE void put(Out* to, const float* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(sum[i], to + i);
}

template <typename In, typename Out>
INLINE void add_up(const Job& job) {
  float sum[BLOCK];
  for (int64_t token = 0; token < job.tokens; ++token) {
    int64_t found = 0;
    for (int64_t n = 0; n < job.count; ++n) {
      Part& part = job.parts[n];
      if (part.at < part.count && (!part.rows || part.rows[part.at] == token))
        job.parts[found++].mine = static_cast<const In*>(part.values) + part.at++ * job.hidden;
    }
    Out* to = reinterpret_cast<Out*>(static_cast<char*>(job.out) + token * job.stride);
    for (int64_t first = 0; first < job.hidden; first += BLOCK) {
      const int64_t n = job.hidden - first < BLOCK ? job.hidden - first : BLOCK;
      if (found == 0) std::memset(sum, 0, static_cast<size_t>(n) * 4);
      for (int64_t m = 0; m < found; ++m) {
        const In* from = static_cast<const In*>(job.parts[m].mine) + first;
        if (m == 0)
          set(sum, from, n);
        else
          add(sum, from, n);
      }
      if (job.scale)
        for (int64_t i = 0; i < n; ++i) sum[i] *= job.scale[token];
      put(to + first, sum, n);
    }
  }
}

INLINE void any(const Job& job, int in_bf16, int out_bf16) {
  if (in_bf16)
    out_bf16 ? add_up<Bf16, Bf16>(job) : add_up<Bf16, float>(job);
  else
    out_bf16 ? add_up<float, Bf16>(job) : add_up<float, float>(job);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void with_avx2(const Job& job, int in_bf16, int out_bf16) { any(job, in_bf16, out_bf16); }

bool has_avx2() {  // the processor has it, and the system keeps its registers
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 5));
}
#endif

}  // namespace

void expertd::cluster::join(const Job& job, int in_bf16, int out_bf16) {
#if defined(__x86_64__)
  static const bool wide = has_avx2();
  if (wide) return with_avx2(job, in_bf16, out_bf16);
#endif
  any(job, in_bf16, out_bf16);
}

// parts: [count] of Part.
extern "C" __attribute__((visibility("default"))) void expertd_cluster_join(
    void* parts, int64_t count, int in_bf16, int64_t tokens, int64_t hidden, const float* scale, void* out,
    int out_bf16, int64_t stride) {
  expertd::cluster::join({static_cast<Part*>(parts), count, tokens, hidden, scale, out, stride}, in_bf16, out_bf16);
}
