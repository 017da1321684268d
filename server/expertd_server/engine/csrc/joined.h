// A layer whose experts are shared among devices and this host's processors: one call for all of them.
//
//   Space    what all such layers of a server use in turns: memory for sums, a thread for each further part on the host
//   Joined   one layer: its parts, and the graphs of those on devices
//
// A device's part is a CUDA graph that begins at pinned memory and ends there with a word; it is launched first.  The last
// part on the host is computed by the caller, others by threads of their own, at the same time.  Sums are f32, rounded once.
// engine/joined.py says the same to ctypes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core.h"
#include "layer.h"

namespace expertd {

// slots: [held + 1] int32, of each of the layer's slots the part's own, -1 = another part's; the last stands for -1.
struct JoinedPart {
  int32_t (*call)(void* context, const void* experts, const Call*);  // on the host; null: a device's
  void* context;
  const void* experts;
  const int32_t* slots;
  // Of a device, all but the last two pinned memory: table [rows, kWords], one word, then [rows, H] of the compute dtype,
  // [routes] ids and weights, and [rows, H] of the compute dtype.
  uint64_t* table;
  uint32_t* done;
  void* hidden;
  int32_t* ids;
  float* weights;
  void* out;
  uint64_t device_slots;  // `slots`, on the device
  void* stream;
  uint64_t rows, routes;  // that there is room for
};

// What the parts of a server did so far; a device's time is from its launch until the host saw its word.
struct PartTimes {
  std::atomic<uint64_t> calls{0}, routes{0}, ns{0};

  void add(uint64_t more_routes, uint64_t more_ns) {
    calls.fetch_add(1, std::memory_order_relaxed);
    routes.fetch_add(more_routes, std::memory_order_relaxed);
    ns.fetch_add(more_ns, std::memory_order_relaxed);
  }
};

class HostThread {
 public:
  HostThread();
  ~HostThread();
  void begin(const JoinedPart* part, const Call& call);
  int32_t end();  // what the part returned
  uint64_t ns = 0;

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  const JoinedPart* part_ = nullptr;
  Call call_{};
  std::atomic<uint32_t> state_{0};  // 0 idle, 1 to be computed, 2 computed
  int32_t error_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

class Space {
 public:
  explicit Space(uint32_t parts) : parts_(parts) {}
  float* sums(uint32_t part, uint64_t n);
  int32_t* slots(uint32_t part, uint64_t n);
  HostThread& thread(uint32_t part);
  PartTimes& times(uint32_t part) { return parts_[part].times; }
  uint32_t size() const { return uint32_t(parts_.size()); }

 private:
  struct Part {
    std::unique_ptr<float[]> sums;
    std::unique_ptr<int32_t[]> slots;
    std::unique_ptr<HostThread> thread;
    uint64_t floats = 0, ints = 0;
    PartTimes times;
  };
  std::vector<Part> parts_;
};

class Joined {
 public:
  Joined(Space* space, uint32_t hidden_size, uint32_t held, bool wide)
      : space_(*space), H_(hidden_size), held_(held), wide_(wide), parts_(space->size()), graphs_(space->size()) {}
  void part(uint32_t index, const JoinedPart& part) { parts_[index] = part; }
  void graph(uint32_t part, uint32_t rows, uint32_t top_k, uint32_t on_input, void* exec) {
    graphs_[part].add({kWhole, 0, top_k, on_input}, rows, exec);
  }
  void clear(uint32_t part) { graphs_[part] = Graphs(); }
  // 0 = computed.  Else nothing was written: the owner computes it without us.
  int32_t call(const Call& c);

 private:
  struct Under {  // a part with something to do
    uint32_t index;
    uint64_t routes;
    Call call;      // of a part on the host, and where each part's sums are
    void* exec;     // of a device: its graph, and the rows that it is for
    uint32_t rows;
    uint64_t begin_ns, ns;
  };
  bool plan(const Call& c, std::vector<Under>* devices, std::vector<Under>* hosts);
  bool launch(const Call& c, Under& u);
  bool wait(Under& u);
  bool compute(std::vector<Under>& hosts);
  void sum(const std::vector<Under>& parts, const Call& c) const;

  Space& space_;
  const uint32_t H_, held_;
  const bool wide_;
  std::vector<JoinedPart> parts_;
  std::vector<Graphs> graphs_;
};

}  // namespace expertd
