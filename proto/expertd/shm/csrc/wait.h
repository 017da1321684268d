// Waiting: spin for a while, then sleep on an eventfd.
#pragma once

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace expertd::shm {

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void ring(int bell) {
  const uint64_t one = 1;
  while (write(bell, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

// After an entry was written: wakes the other side if it sleeps, or is about to.
inline void wake(Bell& other, int bell) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the entry, then the look at the sleep
  if (other.sleeps.load(std::memory_order_relaxed) && other.sleeps.exchange(0, std::memory_order_relaxed)) ring(bell);
}

inline bool readable(int fd) {
  pollfd p{fd, POLLIN, 0};
  return fd >= 0 && poll(&p, 1, 0) > 0;
}

// Waits until the bell rings, `other` is readable or timeout_ns are over (negative: for ever); takes the bell's count.
inline void sleep_on(int bell, int64_t timeout_ns, int other = -1) {
  pollfd p[2] = {{bell, POLLIN, 0}, {other, POLLIN, 0}};
  timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
  if (ppoll(p, other < 0 ? 1 : 2, timeout_ns < 0 ? nullptr : &t, nullptr) > 0 && p[0].revents) {
    uint64_t count;
    while (read(bell, &count, sizeof count) < 0 && errno == EINTR) {
    }
  }
}

}  // namespace expertd::shm
