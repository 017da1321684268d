#include "pool.h"

#include <algorithm>
#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace expertd {
namespace {

constexpr int kSpinUs = 60;  // longer than the gap between two phases of a call

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin(const std::vector<int>& cpus) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  if (CPU_COUNT(&set)) pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // CPUs that are not ours: the thread may use any
#else
  (void)cpus;
#endif
}

constexpr uint64_t bounds(uint32_t first, uint32_t end) { return uint64_t(first) << 32 | end; }

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); }

// Spins on `ready` for up to `us` microseconds; true if it came true.
template <class Ready>
bool spin(int us, const Ready& ready) {
  const auto until = Clock::now() + std::chrono::microseconds(us);
  do {
    for (int i = 0; i < 64; i++) {
      if (ready()) return true;
      pause();
    }
  } while (Clock::now() < until);
  return false;
}

}  // namespace

Pool::Pool(int threads, const std::vector<std::vector<int>>& cpus) : seats_(threads), even_(threads + 1), active_(0) {
  for (int t = 0; t < threads; t++) {  // threads of the same CPUs are of one node
    const auto first = std::find(cpus.begin(), cpus.end(), t < int(cpus.size()) ? cpus[t] : std::vector<int>());
    node_of_.push_back(int(first - cpus.begin()));
  }
  use(threads);
  for (int t = 1; t < threads; t++) {
    workers_.emplace_back([this, t, own = t < int(cpus.size()) ? cpus[t] : std::vector<int>()] {
      pin(own);
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
  called_.notify_all();
  for (auto& t : workers_) t.join();
}

void Pool::use(int threads) {
  if (threads == active_) return;
  std::vector<int> order;
  for (int t = 1; t < most(); t++) order.push_back(t);
  std::stable_sort(order.begin(), order.end(), [this](int a, int b) { return seats_[a].late_us < seats_[b].late_us; });
  order.resize(threads - 1);
  std::sort(order.begin(), order.end());  // neighbours of a memory node keep neighbouring ranges
  {
    std::lock_guard<std::mutex> lock(mutex_);
    active_ = threads;
    for (int t = 1; t < most(); t++) seats_[t].number = -1;
    seats_[0].number = 0;
    for (int i = 0; i < int(order.size()); i++) seats_[order[i]].number = i + 1, seats_[i + 1].node = node_of_[order[i]];
    seats_[0].node = node_of_[0];
  }
  called_.notify_all();
  wake_.notify_all();  // who sleeps there and takes no part any more goes to the others
}

double Pool::late_us() {
  const double us = late_us_;
  late_us_ = 0;
  return us;
}

bool Pool::take(int thread, int& unit) {
  auto& range = seats_[thread].bounds;
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

// Moves the back half of the longest other range into this thread's own (empty) one: of its memory node, else of any.
bool Pool::steal(int thread) {
  for (;;) {
    int victim = -1;
    uint32_t most = 0;
    uint64_t seen = 0;
    bool near = false;
    for (int t = 0; t < threads(); t++) {
      const uint64_t b = seats_[t].bounds.load(std::memory_order_acquire);
      const uint32_t first = uint32_t(b >> 32), end = uint32_t(b), left = first < end ? end - first : 0;
      const bool same = seats_[t].node == seats_[thread].node;
      if (t != thread && left && (same > near || (same == near && left > most))) most = left, victim = t, seen = b, near = same;
    }
    if (victim < 0) return false;
    const uint32_t first = uint32_t(seen >> 32), end = uint32_t(seen), middle = end - (most + 1) / 2;
    if (seats_[victim].bounds.compare_exchange_strong(seen, bounds(first, middle), std::memory_order_acq_rel)) {
      seats_[thread].bounds.store(bounds(middle, end), std::memory_order_release);
      return true;
    }
  }
}

// Returns how many units the thread has done.
int Pool::drain(int thread) {
  int done = 0;
  do {
    for (int unit; take(thread, unit); done++) work_(context_, unit, thread);
  } while (steal(thread));
  return done;
}

void Pool::run(int n, const int* start, Work work, void* context) {
  if (n <= 0) return;
  if (threads() == 1 || n == 1) {
    for (int i = 0; i < n; i++) work(context, i, 0);
    return;
  }
  work_ = work;
  context_ = context;
  for (int t = 0; t < threads(); t++) seats_[t].bounds.store(bounds(start[t], start[t + 1]), std::memory_order_relaxed);
  entered_.store(0, std::memory_order_release);
  job_.fetch_add(1);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  const auto begin = Clock::now();
  const int done = drain(0);
  close(microseconds_since(begin) / std::max(1, done));
}

// Lets nobody in any more, if nobody is inside.
bool Pool::shut() {
  int32_t none = 0;
  return entered_.compare_exchange_strong(none, -1);
}

// No unit is left to take: waits for those who are inside their last unit.
void Pool::close(double unit_us) {
  const auto start = Clock::now();
  if (spin(kSpinUs, [this] { return shut(); })) return;
  std::unique_lock<std::mutex> lock(mutex_);
  last_ = 0;
  closing_ = true;
  left_.wait(lock, [this] { return shut(); });
  closing_ = false;
  const double late = std::max(0.0, microseconds_since(start) - 2 * unit_us);
  late_us_ += late;
  for (Seat& seat : seats_) seat.late_us *= 0.99;
  if (last_) seats_[last_].late_us += late;
}

bool Pool::wait_for_job(int seat, uint32_t seen, int& patience_us) {
  const auto& number = seats_[seat].number;
  const auto ready = [&] { return job_.load() != seen || stop_.load(); };
  const bool more = more_.load(std::memory_order_relaxed);
  if (number >= 0 && spin(more ? kSpinUs : patience_us, ready)) {
    if (!more) patience_us = kSpinUs;
    return !stop_.load();
  }
  if (!more) patience_us = std::max(2, patience_us / 2);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_.load()) {
    if (number < 0) {
      called_.wait(lock, [&] { return number >= 0 || stop_.load(); });
      continue;
    }
    if (ready()) break;
    sleepers_++;
    wake_.wait(lock, [&] { return ready() || number < 0; });
    sleepers_--;
  }
  return !stop_.load();
}

void Pool::worker(int seat) {
  uint32_t seen = 0;
  int patience_us = kSpinUs;
  while (wait_for_job(seat, seen, patience_us)) {
    seen = job_.load(std::memory_order_acquire);
    int32_t inside = entered_.load(std::memory_order_acquire);
    while (inside >= 0 && !entered_.compare_exchange_weak(inside, inside + 1)) {
    }
    if (inside < 0) continue;  // that job is over
    const int number = seats_[seat].number.load(std::memory_order_acquire);
    if (number >= 0) drain(number);
    if (entered_.fetch_sub(1) == 1 && closing_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      last_ = seat;
      left_.notify_one();
    }
  }
}

}  // namespace expertd
