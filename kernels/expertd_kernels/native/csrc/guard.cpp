// Mapped files whose pages cannot be had any more: cut by somebody, or on a disk that fails.  The access ends in SIGBUS,
// which kills a process without a word.  Here the mapping is replaced by memory of zeros, the access is repeated, and
// whoever computes from the mapping asks before it hands over a result.
//
// SIGBUS has one handler per process, and other libraries install theirs (Python's faulthandler, abseil's in Ray).  So ours
// is put in force again whenever a mapping is added or asked for, which is after each batch.  In between, a handler that was
// installed over ours gets the signal first.  It reports a crash, restores ours and raises the signal again, without the
// address; then the last page of each mapping is tried, because a file that was cut always lacks that one.  That saves the
// process from faulthandler, but not from abseil, which sets an alarm that ends it three seconds later.
//
// Everything that the handler calls is async-signal-safe on the systems that we build for (mmap and rt_sigprocmask are bare
// system calls).

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

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

constexpr int kUnder = 8;
struct sigaction under[kUnder];  // handlers that were in force when ours was installed, oldest first
std::atomic<int> unders{0};

// A thread that calls handlers of `under`, and how many of them at once.  Not thread_local: the first access to such a
// variable may allocate, which a handler must not, and a library with static ones may not load.
struct Passing {
  std::atomic<long> thread{0};
  int depth = 0;
};
Passing passings[16];

// That of this thread.  Null: more threads than expected are in the handler.
Passing* passing_of(long thread) {
  for (Passing& p : passings)
    if (p.thread.load(std::memory_order_relaxed) == thread) return &p;
  for (Passing& p : passings) {
    long nobody = 0;
    if (p.thread.compare_exchange_strong(nobody, thread)) return &p;
  }
  return nullptr;
}

// What would have happened without us.  A handler may raise the signal again, which comes back here: then it is the next
// older one's turn.
void pass_on(int number, siginfo_t* info, void* context) {
  Passing* mine = passing_of(syscall(SYS_gettid));
  const int n = mine ? unders.load(std::memory_order_acquire) - 1 - mine->depth : -1;
  if (n >= 0 && (under[n].sa_handler != SIG_DFL && under[n].sa_handler != SIG_IGN)) {
    ++mine->depth;
    if (under[n].sa_flags & SA_SIGINFO)
      under[n].sa_sigaction(number, info, context);
    else
      under[n].sa_handler(number);
    if (--mine->depth == 0) mine->thread.store(0);
    return;
  }
  if (mine && mine->depth == 0) mine->thread.store(0);
  signal(number, SIG_DFL);  // a faulty access is repeated and ends the process
  if (info->si_code <= 0) raise(number);  // somebody sent it: once more, as there is no access to repeat
}

// Whether the memory at an address can be read.  The kernel copies the set before it refuses the unknown operation.
bool readable(uintptr_t at) {
  constexpr int kNoOperation = ~0;
  return syscall(SYS_rt_sigprocmask, kNoOperation, at & ~uintptr_t(7), nullptr, sizeof(uint64_t)) == 0 || errno != EFAULT;
}

// Zeros in the place of a mapping.  False: they cannot be had.
bool replace(Range& range) {
  void* start = reinterpret_cast<void*>(range.start.load(std::memory_order_acquire));
  range.lost.store(1, std::memory_order_release);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  return mmap(start, range.bytes.load(std::memory_order_relaxed), PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
}

// Replaces the mapping that holds an address.
bool replace_at(uintptr_t at) {
  const int most = used.load(std::memory_order_acquire);
  for (int i = 0; i < most; ++i) {
    const uintptr_t start = ranges[i].start.load(std::memory_order_acquire);
    if (start && at >= start && at - start < ranges[i].bytes.load(std::memory_order_relaxed)) return replace(ranges[i]);
  }
  return false;
}

// Replaces every mapping whose last page cannot be read.
bool replace_cut() {
  const int most = used.load(std::memory_order_acquire);
  bool any = false;
  for (int i = 0; i < most; ++i) {
    const uintptr_t start = ranges[i].start.load(std::memory_order_acquire);
    if (start && !readable(start + ranges[i].bytes.load(std::memory_order_relaxed) - 1)) any |= replace(ranges[i]);
  }
  return any;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int kept = errno;
  const bool raised = info->si_code == SI_TKILL && info->si_pid == getpid();
  const bool fault = info->si_code > 0;
  const bool mended = fault ? replace_at(reinterpret_cast<uintptr_t>(info->si_addr)) : raised && replace_cut();
  if (!mended) pass_on(number, info, context);
  errno = kept;
}

// Installs our handler where another one is in force.  False: it cannot be.
bool install() {
  struct sigaction now = {};
  if (sigaction(SIGBUS, nullptr, &now)) return false;
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return true;
  const int before = unders.load(std::memory_order_relaxed);
  int n = 0;
  while (n < before && under[n].sa_handler != now.sa_handler) ++n;  // whoever came after it is gone
  if (n == kUnder) --n;
  under[n] = now;
  unders.store(n + 1, std::memory_order_release);
  struct sigaction ours = {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // what a handler of `under` raises comes at once
  sigemptyset(&ours.sa_mask);
  return sigaction(SIGBUS, &ours, nullptr) == 0;
}

}  // namespace

extern "C" {

int32_t expertd_guard_add(void* start, int64_t bytes) {
  std::lock_guard<std::mutex> lock(taking);
  if (!start || bytes < 1 || !install()) return -1;
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

int32_t expertd_guard_lost(int32_t range) {
  const std::lock_guard<std::mutex> lock(taking);
  install();
  return ranges[range].lost.load(std::memory_order_acquire);
}

}  // extern "C"
