#include "context.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "processor.h"

#ifndef EXPERTD_SOURCES
#define EXPERTD_SOURCES "unknown"
#endif

namespace expertd {
namespace {

#if defined(__x86_64__) && !defined(EXPERTD_NO_AVX512) && !defined(EXPERTD_ONLY_PORTABLE)
// Levels with VNNI, best first: processors with the same flags differ by five in what their products take. A Xeon
// of 2023 does a quarter as many dot products of bf16 as multiply-adds of f32; Zen 5 does twice as many as of bytes, Zen 4 as many.
std::vector<const Level*> by_products() {
  if (!kAvx512Bf16.runs()) return {&kAvx512BytesAhead, &kAvx512Vnni};  // each where it runs: VNNI without BF16, or neither
  double bf16 = 0, f32 = 0, bytes = 0;  // instructions a second, of the fastest of some short times
  for (int i = 0; i < 12; i++) {
    bf16 = std::max(bf16, kAvx512Bf16.peak(EXPERTD_PEAK_BF16, 1e-4) / 64);
    f32 = std::max(f32, kAvx512Bf16.peak(EXPERTD_PEAK_F32, 1e-4) / 32);
    bytes = std::max(bytes, kAvx512Bf16.peak(EXPERTD_PEAK_INT8, 1e-4) / 128);
  }
  if (bf16 < 0.7 * f32) return {&kAvx512BytesAhead, &kAvx512Vnni, &kAvx512Bytes, &kAvx512Bf16};
  if (3 * bf16 > 4 * bytes) return {&kAvx512Bf16, &kAvx512Bytes, &kAvx512Vnni, &kAvx512BytesAhead};  // four products of bf16 for three of bytes
  return {&kAvx512Bytes, &kAvx512Bf16, &kAvx512Vnni, &kAvx512BytesAhead};
}
#endif

// Levels of this architecture, best first.
std::vector<const Level*> known() {
#if defined(EXPERTD_ONLY_PORTABLE)
  return {&kPortable};
#elif defined(__x86_64__) && defined(EXPERTD_NO_AVX512)
  return {&kAvx2, &kPortable};
#elif defined(__x86_64__)
  static const std::vector<const Level*> found = [] {
    std::vector<const Level*> levels{&kAvx512Amx};
    for (const Level* l : by_products()) levels.push_back(l);
    levels.insert(levels.end(), {&kAvx512, &kAvx2, &kPortable});
    return levels;
  }();
  return found;
#else
  return {&kPortable};
#endif
}

}  // namespace

const Level* find_level(const char* name) {
  for (const Level* l : known())
    if (l->runs() && (!*name || !std::strcmp(name, l->name))) return l;
  return nullptr;
}

}  // namespace expertd

using namespace expertd;

extern "C" {

int32_t expertd_cpu_abi(void) { return EXPERTD_CPU_ABI; }

const char* expertd_cpu_sources(void) { return EXPERTD_SOURCES; }

const char* expertd_cpu_levels(void) {
  static const std::string names = [] {
    std::string s;
    for (const Level* l : known())
      if (l->runs()) s += (s.empty() ? "" : ",") + std::string(l->name);
    return s;
  }();
  return names.c_str();
}

int32_t expertd_cpu_create(const char* level, int32_t threads, const int32_t* cpus, const int32_t* ends, expertd_context** out) {
  if (!level || !out || threads < 1 || threads > 1024 || (cpus && !ends)) return EXPERTD_BAD_ARGUMENT;
  const Level* l = find_level(level);
  if (!l) return EXPERTD_NO_LEVEL;
  try {
    std::vector<std::vector<int>> sets;
    for (int t = 0; cpus && t < threads; t++) sets.emplace_back(cpus + (t ? ends[t - 1] : 0), cpus + ends[t]);
    *out = new expertd_context(l, threads, sets);
  } catch (const std::exception&) {
    return EXPERTD_NO_MEMORY;
  }
  return EXPERTD_OK;
}

void expertd_cpu_destroy(expertd_context* context) { delete context; }

const char* expertd_cpu_level(const expertd_context* context) { return context->level->name; }

int32_t expertd_cpu_threads(const expertd_context* context) { return context->threads.load(); }

double expertd_cpu_read_gb_s(expertd_context* context, const uint8_t* data, int64_t bytes) {
  std::lock_guard<std::mutex> lock(context->busy);
  constexpr int64_t kPart = 1 << 20;  // a unit; each thread reads one long range of them
  const int n = int(bytes / kPart);
  std::atomic<uint64_t> sum{0};
  const auto start = std::chrono::steady_clock::now();
  context->pool.run_even(n, [&](int unit, int) { sum += context->level->read(data + unit * kPart, kPart, true); });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return n * double(kPart) / seconds / 1e9 + double(sum.load() & 1) * 1e-12;  // the sum must not be optimized away
}

double expertd_cpu_peak(expertd_context* context, int32_t kind, double seconds) {
  std::lock_guard<std::mutex> lock(context->busy);
  std::vector<double> rates(context->pool.threads(), 0.0);
  context->pool.run_even(context->pool.threads(), [&](int unit, int) { rates[unit] = context->level->peak(kind, seconds); });
  double total = 0;
  for (double r : rates) total += r;
  return total / 1e9;
}

}  // extern "C"
