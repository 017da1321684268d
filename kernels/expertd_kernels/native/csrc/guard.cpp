// Mapped files whose pages cannot be had any more: cut by somebody, or on a disk that fails.  The access ends in SIGBUS,
// which kills a process without a word.  Here the mapping is replaced by memory of zeros, the access is repeated, and
// whoever computes from the mapping asks before it hands over a result.
//
// Everything that the handler calls is async-signal-safe on the systems that we build for (mmap is a bare system call).

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

#include "abi.h"

namespace {

struct Range {
  std::atomic<uintptr_t> start{0};  // 0 = free
  std::atomic<uint64_t> bytes{0};
  std::atomic<int32_t> lost{0};
};

constexpr int kRanges = 4096;
Range ranges[kRanges];
std::atomic<int> used{0};  // ranges from here on were never taken
std::mutex taking;
struct sigaction before;

// What would have happened without us.
void pass_on(int number, siginfo_t* info, void* context) {
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    signal(number, SIG_DFL);  // a faulty access is repeated and ends the process
    if (info->si_code <= 0) raise(number);  // somebody sent it: once more, as there is no access to repeat
  }
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int kept = errno;
  const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
  const int most = used.load(std::memory_order_acquire);
  for (int i = 0; info->si_code > 0 && i < most; ++i) {
    const uintptr_t start = ranges[i].start.load(std::memory_order_acquire);
    const uint64_t bytes = ranges[i].bytes.load(std::memory_order_relaxed);
    if (!start || at < start || at - start >= bytes) continue;
    ranges[i].lost.store(1, std::memory_order_release);
    void* zeros = mmap(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (zeros == MAP_FAILED) break;
    errno = kept;
    return;
  }
  pass_on(number, info, context);
  errno = kept;
}

}  // namespace

extern "C" {

int32_t expertd_guard_add(void* start, int64_t bytes) {
  std::lock_guard<std::mutex> lock(taking);
  static bool installed = false;
  if (!start || bytes < 1) return -1;
  if (!installed) {
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, &ours, &before)) return -1;
    installed = true;
  }
  for (int i = 0; i < kRanges; ++i) {
    if (ranges[i].start.load(std::memory_order_relaxed)) continue;
    ranges[i].lost.store(0, std::memory_order_relaxed);
    ranges[i].bytes.store(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
    ranges[i].start.store(reinterpret_cast<uintptr_t>(start), std::memory_order_release);
    if (i >= used.load(std::memory_order_relaxed)) used.store(i + 1, std::memory_order_release);
    return i;
  }
  return -1;
}

void expertd_guard_remove(int32_t range) {
  std::lock_guard<std::mutex> lock(taking);
  ranges[range].start.store(0, std::memory_order_release);
}

int32_t expertd_guard_lost(int32_t range) { return ranges[range].lost.load(std::memory_order_acquire); }

}  // extern "C"
