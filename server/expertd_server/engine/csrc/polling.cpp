// Who looks at the rings while the core's thread computes on a CPU.  A batch may take longer than a request in shared
// memory has: whether there is time for it is said at once, by a thread that borrows what is the core's meanwhile.
#include <sched.h>
#include <sys/epoll.h>

#include "core_class.h"

namespace expertd {
namespace {

constexpr double kLongNs = 1e6;  // a shorter batch is over before that thread has helped
constexpr int kLookMs = 5;

}  // namespace

// Before a batch of so many rows is computed here.
void Core::lend_to_poller(const LayerWork& work, uint32_t rows, uint32_t top_k) {
  const double expected = work.times.expect(rows, top_k);
  if (config_.device || (expected > 0 && expected < kLongNs) || driver_.load() != kOwn) return;
  lent_ = true;
  if (shm_connections_.empty()) return driver_.store(kComputing);  // for sweep() alone
  if (!poller_.joinable()) poller_ = std::thread(&Core::run_poller, this);
  for (auto& p : shm_connections_) p->sleeps(true);
  {
    const std::lock_guard<std::mutex> lock(poller_mutex_);
    driver_.store(kComputing);
  }
  computing_.notify_one();
  shm::ring(wake_);  // where it still waits for the bells of the batch before: what came since then rang none
}

// After it.
void Core::take_from_poller() {
  if (!lent_) return;
  lent_ = false;
  for (int computing = kComputing; !driver_.compare_exchange_weak(computing, kOwn); computing = kComputing) sched_yield();
  for (auto& p : shm_connections_) p->sleeps(false);
}

void Core::run_poller() {
  std::unique_lock<std::mutex> lock(poller_mutex_);
  while (!closing_) {
    computing_.wait(lock, [&] { return closing_ || driver_.load() == kComputing; });
    lock.unlock();
    epoll_event events[16];
    bool moved = false;
    for (int n = 0;; n = epoll_wait(epoll_, events, 16, moved ? 0 : kLookMs)) {
      int computing = kComputing;
      if (closing_.load()) break;  // nobody takes the connections back: the batch does not end, or nobody said that it has
      if (!driver_.compare_exchange_strong(computing, kBorrowed)) {
        if (computing == kBorrowed) continue;  // by a submitter, for a moment: look again
        break;  // the bells that rang are left to the core
      }
      take_bells(events, n);
      for (auto& p : shm_connections_) p->sleeps(true);  // each is rung for once, so again, and then the look
      moved = take_inbox();
      moved |= poll_ports();
      if (moved) answers_.flush();
      driver_.store(kComputing);
    }
    lock.lock();
  }
}

void Core::end_poller() {
  if (!poller_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(poller_mutex_);
    closing_ = true;
  }
  computing_.notify_one();
  poller_.join();
}

}  // namespace expertd
