// Threads that share one list of units of work.
//
// Each thread starts on one long contiguous range of units, takes them from its front, and when it has none left steals the back
// half of another's range, of one of its memory node if there is any. The caller works too. A call ends when all units are done: a worker that the system has put aside
// holds nobody up unless it is inside a unit.
//
// Waiting spins, then sleeps: a caller that sleeps leaves its core to the worker that it waits for, where the two may share it. Between
// calls a worker spins as long as has paid: half as long after each time in vain, as long as ever after a call that came in time.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace expertd {

class Pool {
 public:
  // cpus[t]: CPUs that worker t may run on (1 .. threads - 1); none = any.
  Pool(int threads, const std::vector<std::vector<int>>& cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int most() const { return int(seats_.size()); }
  int threads() const { return active_; }  // that take part in run()

  // How many threads take part from now on, 1 .. most(): those that were seldom late. Not while a job runs.
  void use(int threads);
  // Whether another job follows soon after the next ones.
  void expect_more(bool more) { more_.store(more, std::memory_order_relaxed); }
  // Microseconds that run() has waited for workers that took more than two units' time for their last one, since this was last asked.
  double late_us();

  // work(context, unit, thread) for each unit 0..n-1, any order. start[t] is the first unit of thread t's range
  // (threads() + 1 ascending numbers from 0 to n). One caller at a time.
  using Work = void (*)(void* context, int unit, int thread);
  void run(int n, const int* start, Work work, void* context);

  template <class F>
  void run(int n, const int* start, F& f) {
    run(n, start, [](void* context, int unit, int thread) { (*static_cast<F*>(context))(unit, thread); }, &f);
  }
  template <class F>
  void run_even(int n, F&& f) {
    for (int t = 0; t <= threads(); t++) even_[t] = int(int64_t(n) * t / threads());
    run(n, even_.data(), f);
  }

 private:
  struct alignas(128) Seat {             // of one thread
    std::atomic<uint64_t> bounds{0};     // of thread number t's range: first unit << 32 | end
    int node = 0;                        // of thread number t
    std::atomic<int> number{-1};         // in run(): 0 .. threads() - 1; -1 = takes no part
    double late_us = 0;                  // that the caller waited for it alone, fading
  };
  void worker(int seat);
  int drain(int thread);
  bool take(int thread, int& unit);
  bool steal(int thread);
  bool wait_for_job(int seat, uint32_t seen, int& patience_us);
  void close(double unit_us);
  bool shut();

  std::vector<Seat> seats_;
  std::vector<int> node_of_;  // [seat] memory node, numbered as they come
  std::vector<int> even_;
  std::vector<std::thread> workers_;
  int active_;
  Work work_ = nullptr;
  void* context_ = nullptr;
  double late_us_ = 0;
  int last_ = 0;  // the worker that left the job last while the caller slept; 0 = unknown
  std::atomic<uint32_t> job_{0};       // number of the latest job
  std::atomic<int32_t> entered_{-1};   // workers inside the job; -1 = no job open
  std::atomic<bool> stop_{false}, more_{false};
  std::atomic<bool> closing_{false};   // the caller sleeps until entered_ is 0
  std::atomic<int> sleepers_{0};       // of those that take part
  std::mutex mutex_;
  std::condition_variable wake_, called_, left_;  // for a job; to take part again; entered_ became 0
};

}  // namespace expertd
