// Waiting: spin for a while, then sleep on a descriptor.  Two kinds:
//
//   an eventfd      for threads of this process; no other process has it.  ring(), sleep_on()
//   a socket        to the other process.  Each end belongs to one process.  ring_peer(), hear_peer()
//
// A descriptor that two processes have is of one open file: each can make it blocking for both, and fill it.  Nothing here
// waits in a read or a write, whatever the flags of a socket say.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
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

// Whether to try what does not always pay: after each time in vain it rests, twice as often as the time before.
class Trial {
 public:
  // Whether to try it this time; then paid().
  bool worth() {
    const uint32_t left = rests_.load(std::memory_order_relaxed);
    if (left) rests_.store(left - 1, std::memory_order_relaxed);
    return !left;
  }
  void paid(bool did) {
    const uint32_t next = did ? 1 : next_.load(std::memory_order_relaxed);
    if (!did) rests_.store(next, std::memory_order_relaxed);
    next_.store(did ? 1 : next < kMostRests ? 2 * next : kMostRests, std::memory_order_relaxed);
  }

 private:
  static constexpr uint32_t kMostRests = 64;
  std::atomic<uint32_t> rests_{0}, next_{1};  // left; after the next time in vain
};

inline void ring(int bell) {
  const uint64_t one = 1;
  while (write(bell, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

// A socket that is full is readable at the other end already.
inline void ring_peer(int bell) { (void)send(bell, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL); }

// Takes what the other process rang.  One call: who rings for ever does not keep us.  False: it closed its end.
inline bool hear_peer(int bell) {
  char rings[4096];
  return recv(bell, rings, sizeof rings, MSG_DONTWAIT) != 0;
}

// After an entry was written: wakes the other side if it sleeps, or is about to.
inline void wake(Bell& other, int bell) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the entry, then the look at the sleep
  if (other.sleeps.load(std::memory_order_relaxed) && other.sleeps.exchange(0, std::memory_order_relaxed)) ring_peer(bell);
}

// Takes an eventfd's count.
inline void hear(int bell) {
  uint64_t count;
  while (read(bell, &count, sizeof count) < 0 && errno == EINTR) {
  }
}

// Waits until the eventfd rings, the other process closed its end of `peer` (-1: no socket) or timeout_ns are over
// (negative: for ever); takes the eventfd's count.  True: the other process closed its end.
inline bool sleep_on(int bell, int64_t timeout_ns, int peer = -1) {
  pollfd p[2] = {{bell, POLLIN, 0}, {peer, POLLRDHUP, 0}};
  timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
  if (ppoll(p, peer < 0 ? 1 : 2, timeout_ns < 0 ? nullptr : &t, nullptr) <= 0) return false;
  if (p[0].revents) hear(bell);
  return p[1].revents != 0;
}

// The same for a socket: waits until the other process rings, and takes what it rang.
inline bool sleep_on_peer(int bell, int64_t timeout_ns) {
  pollfd p{bell, POLLIN | POLLRDHUP, 0};
  timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
  return ppoll(&p, 1, timeout_ns < 0 ? nullptr : &t, nullptr) > 0 && !hear_peer(bell);
}

// Whether the other process closed its end.
inline bool hung_up(int bell) {
  pollfd p{bell, POLLRDHUP, 0};
  return poll(&p, 1, 0) > 0;
}

}  // namespace expertd::shm
