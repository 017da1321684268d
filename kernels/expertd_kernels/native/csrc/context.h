// What a process keeps for its calls: the level, the threads and the reused memory.
#pragma once
#include <cstdlib>
#include <mutex>
#include <new>

#include "crew.h"
#include "level.h"
#include "pool.h"

namespace expertd {

// Memory that only grows, aligned to 64 bytes, contents undefined after get().
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <class T>
  T* get(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = 0;
      data_ = std::aligned_alloc(64, bytes);
      if (!data_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

struct ThreadScratch {
  Buffer scales, zeros, tile, acc, row;
};

struct RowBuffers {
  Buffer data, scales, sums, starts;
};

// level: a name, or "" for the best that runs here; nullptr where it does not run.
const Level* find_level(const char* level);

}  // namespace expertd

struct expertd_context {
  expertd_context(const expertd::Level* l, int threads, const std::vector<std::vector<int>>& cpus)
      : level(l), pool(threads, cpus), crew(threads), scratch(threads) {}
  const expertd::Level* level;
  expertd::Pool pool;
  expertd::Crew crew;
  std::vector<expertd::ThreadScratch> scratch;
  expertd::Buffer routes, hidden;
  expertd::RowBuffers tokens, input, middle;
  std::mutex busy;  // one call at a time
  std::atomic<int> threads{crew.chosen()};  // the crew's number, for who asks meanwhile
};
