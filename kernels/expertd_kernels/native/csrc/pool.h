// Threads that share one list of units of work.
//
// Each thread starts on one long contiguous range of units, takes them from its front, and when it has none left steals the back
// half of another's range. The caller works too. A call ends when all units are done: a worker that the system has put aside
// holds nobody up unless it is inside a unit. Waiting spins for some microseconds, then sleeps.
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
  // cpus: one a thread to pin the workers 1..threads-1 to, or nullptr.
  Pool(int threads, const int32_t* cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(ranges_.size()); }

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
  struct alignas(128) Range {
    std::atomic<uint64_t> bounds{0};  // first unit << 32 | end
  };
  void worker(int thread);
  void drain(int thread);
  bool take(int thread, int& unit);
  bool steal(int thread);
  bool wait_for_job(uint32_t seen);
  void close();

  std::vector<Range> ranges_;
  std::vector<int> even_;
  std::vector<std::thread> workers_;
  Work work_ = nullptr;
  void* context_ = nullptr;
  std::atomic<uint32_t> job_{0};       // number of the latest job
  std::atomic<int32_t> entered_{-1};   // workers inside the job; -1 = no job open
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace expertd
