#include "context.h"

#include <chrono>
#include <cstring>
#include <string>

#include "processor.h"

#ifndef EXPERTD_SOURCES
#define EXPERTD_SOURCES "unknown"
#endif

namespace expertd {
namespace {

// Levels of this architecture, best first.
std::vector<const Level*> known() {
#if defined(EXPERTD_ONLY_PORTABLE)
  return {&kPortable};
#elif defined(__x86_64__) && defined(EXPERTD_NO_AVX512)
  return {&kAvx2, &kPortable};
#elif defined(__x86_64__)
  const bool amd = processor().amd;
  return {&kAvx512Amx, amd ? &kAvx512Bf16 : &kAvx512Vnni, amd ? &kAvx512Vnni : &kAvx512Bf16, &kAvx512, &kAvx2, &kPortable};
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

int32_t expertd_cpu_create(const char* level, int32_t threads, const int32_t* cpus, expertd_context** out) {
  if (!level || !out || threads < 1 || threads > 1024) return EXPERTD_BAD_ARGUMENT;
  const Level* l = find_level(level);
  if (!l) return EXPERTD_NO_LEVEL;
  try {
    *out = new expertd_context(l, threads, cpus);
  } catch (const std::exception&) {
    return EXPERTD_NO_MEMORY;
  }
  return EXPERTD_OK;
}

void expertd_cpu_destroy(expertd_context* context) { delete context; }

const char* expertd_cpu_level(const expertd_context* context) { return context->level->name; }

double expertd_cpu_read_gb_s(expertd_context* context, const uint8_t* data, int64_t bytes) {
  std::lock_guard<std::mutex> lock(context->busy);
  constexpr int64_t kPart = 1 << 20;  // a unit; each thread reads one long range of them
  const int n = int(bytes / kPart);
  std::atomic<uint64_t> sum{0};
  const auto start = std::chrono::steady_clock::now();
  context->pool.run_even(n, [&](int unit, int) { sum += context->level->read(data + unit * kPart, kPart); });
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
