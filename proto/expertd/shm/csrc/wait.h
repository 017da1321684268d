// Waiting: spin for a while, then sleep on an eventfd.
#pragma once

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

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

// Waits until the bell rings or timeout_ns are over (negative: for ever); takes its count.
inline void sleep_on(int bell, int64_t timeout_ns) {
  pollfd p{bell, POLLIN, 0};
  timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
  if (ppoll(&p, 1, timeout_ns < 0 ? nullptr : &t, nullptr) > 0) {
    uint64_t count;
    while (read(bell, &count, sizeof count) < 0 && errno == EINTR) {
    }
  }
}

}  // namespace expertd::shm
