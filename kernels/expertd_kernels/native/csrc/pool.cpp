#include "pool.h"

#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace expertd {
namespace {

constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the gap between two phases of a call

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin(int cpu) {
#if defined(__linux__)
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a CPU that is not ours: the thread stays unpinned
#else
  (void)cpu;
#endif
}

constexpr uint64_t bounds(uint32_t first, uint32_t end) { return uint64_t(first) << 32 | end; }

// Spins on `ready` for up to kSpin; true if it came true.
template <class Ready>
bool spin(const Ready& ready) {
  for (int i = 0; i < 64; i++) {
    if (ready()) return true;
    pause();
  }
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; i++) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

}  // namespace

Pool::Pool(int threads, const int32_t* cpus) : ranges_(threads), even_(threads + 1) {
  for (int t = 1; t < threads; t++) {
    const int cpu = cpus ? cpus[t] : -1;
    workers_.emplace_back([this, t, cpu] {
      pin(cpu);
      worker(t);
    });
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& t : workers_) t.join();
}

bool Pool::take(int thread, int& unit) {
  auto& range = ranges_[thread].bounds;
  uint64_t b = range.load(std::memory_order_acquire);
  while (uint32_t(b >> 32) < uint32_t(b)) {
    const uint32_t first = uint32_t(b >> 32);
    if (range.compare_exchange_weak(b, bounds(first + 1, uint32_t(b)), std::memory_order_acq_rel)) {
      unit = int(first);
      return true;
    }
  }
  return false;
}

// Moves the back half of the longest other range into this thread's own (empty) one.
bool Pool::steal(int thread) {
  for (;;) {
    int victim = -1;
    uint32_t most = 0;
    uint64_t seen = 0;
    for (int t = 0; t < threads(); t++) {
      const uint64_t b = ranges_[t].bounds.load(std::memory_order_acquire);
      const uint32_t first = uint32_t(b >> 32), end = uint32_t(b), left = first < end ? end - first : 0;
      if (t != thread && left > most) most = left, victim = t, seen = b;
    }
    if (victim < 0) return false;
    const uint32_t first = uint32_t(seen >> 32), end = uint32_t(seen), middle = end - (most + 1) / 2;
    if (ranges_[victim].bounds.compare_exchange_strong(seen, bounds(first, middle), std::memory_order_acq_rel)) {
      ranges_[thread].bounds.store(bounds(middle, end), std::memory_order_release);
      return true;
    }
  }
}

void Pool::drain(int thread) {
  do {
    int unit;
    while (take(thread, unit)) work_(context_, unit, thread);
  } while (steal(thread));
}

void Pool::run(int n, const int* start, Work work, void* context) {
  if (n <= 0) return;
  if (threads() == 1 || n == 1) {
    for (int i = 0; i < n; i++) work(context, i, 0);
    return;
  }
  work_ = work;
  context_ = context;
  for (int t = 0; t < threads(); t++) ranges_[t].bounds.store(bounds(start[t], start[t + 1]), std::memory_order_relaxed);
  entered_.store(0, std::memory_order_release);
  job_.fetch_add(1);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  drain(0);
  close();
}

// No unit is left to take: lets nobody in any more and waits for those who are inside their last unit.
void Pool::close() {
  for (;;) {
    int32_t none = 0;
    if (entered_.compare_exchange_strong(none, -1)) return;
    if (!spin([this] { return entered_.load(std::memory_order_acquire) == 0; })) std::this_thread::yield();
  }
}

bool Pool::wait_for_job(uint32_t seen) {
  const auto ready = [&] { return job_.load(std::memory_order_acquire) != seen || stop_.load(); };
  if (!spin(ready)) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_++;
    wake_.wait(lock, ready);
    sleepers_--;
  }
  return !stop_.load();
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  while (wait_for_job(seen)) {
    seen = job_.load(std::memory_order_acquire);
    int32_t inside = entered_.load(std::memory_order_acquire);
    while (inside >= 0 && !entered_.compare_exchange_weak(inside, inside + 1)) {
    }
    if (inside < 0) continue;  // that job is over
    drain(thread);
    entered_.fetch_sub(1);
  }
}

}  // namespace expertd
