#include "joined.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>

#include "batch.h"
#include "server_side.h"

namespace expertd {
namespace {

using shm::now_ns;

constexpr uint64_t kLookNs = 100'000'000;  // so often a device that does not answer is asked whether it still works
constexpr uint32_t kSpins = 20'000;        // of a thread before it sleeps, about 50 us
constexpr int kNotReady = 600;             // CUDA_ERROR_NOT_READY

struct Driver {
  int (*launch)(void* graph, void* stream) = nullptr;
  int (*query)(void* stream) = nullptr;
  int (*context_of)(void* stream, void** context) = nullptr;
  int (*push)(void* context) = nullptr;
  int (*pop)(void** context) = nullptr;
  bool there = true;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    const auto find = [&](auto& function, const char* name) {
      function = library ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name)) : nullptr;
      there &= function != nullptr;
    };
    find(launch, "cuGraphLaunch");
    find(query, "cuStreamQuery");
    find(context_of, "cuStreamGetCtx");
    find(push, "cuCtxPushCurrent_v2");
    find(pop, "cuCtxPopCurrent_v2");
  }
};

Driver& driver() {
  static Driver found;
  return found;
}

// The size that a batch of `rows` is given: engine/sizes.py says the same.
uint32_t padded(uint32_t rows) {
  const auto bits = [](uint32_t n) { return n ? 32u - uint32_t(__builtin_clz(n)) : 0u; };
  if (rows <= 64) return 1u << bits(rows - 1);
  const uint32_t step = 1u << (bits(rows - 1) - 2);
  return (rows + step - 1) / step * step;
}

// Whoever computes a batch may be a thread that never met this device.
template <class Work>
int on_device_of(void* stream, Work work) {
  Driver& d = driver();
  void *context = nullptr, *before = nullptr;
  if (int error = d.context_of(stream, &context)) return error;
  if (int error = d.push(context)) return error;
  const int error = work(d);
  d.pop(&before);
  return error;
}

inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline float widened(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
inline float widened(float v) { return v; }

inline void narrow(float v, float* to) { *to = v; }
// To nearest, ties to even; a NaN stays one.  Without a branch, so that compilers make vectors of it.
inline void narrow(float v, uint16_t* to) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  const uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  *to = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : near);
}

#if defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((optimize("O3")))
#else
#define FAST
#endif

template <class From>
FAST void add(float* __restrict to, const From* __restrict from, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) to[i] += widened(from[i]);
}

template <class From>
FAST void set(float* __restrict to, const From* __restrict from, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) to[i] = widened(from[i]);
}

template <class To>
FAST void round_to(To* __restrict to, const float* __restrict from, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) narrow(from[i], to + i);
}

}  // namespace

HostThread::HostThread() : thread_([this] { run(); }) {}

HostThread::~HostThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void HostThread::begin(const JoinedPart* part, const Call& call) {
  part_ = part;
  call_ = call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_.store(1, std::memory_order_release);
  }
  changed_.notify_all();
}

int32_t HostThread::end() {
  for (uint32_t i = 0; i < kSpins && state_.load(std::memory_order_acquire) != 2; ++i) rest();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return state_.load(std::memory_order_acquire) == 2; });
  state_.store(0, std::memory_order_relaxed);
  return error_;
}

void HostThread::run() {
  for (;;) {
    for (uint32_t i = 0; i < kSpins && state_.load(std::memory_order_acquire) != 1; ++i) rest();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || state_.load(std::memory_order_acquire) == 1; });
      if (ends_) return;
    }
    const uint64_t begin = now_ns();
    error_ = part_->call(part_->context, part_->experts, &call_);
    ns = now_ns() - begin;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_.store(2, std::memory_order_release);
    }
    changed_.notify_all();
  }
}

float* Space::sums(uint32_t part, uint64_t n) {
  Part& p = parts_[part];
  if (p.floats < n) {
    p.sums.reset(new float[n]);
    p.floats = n;
  }
  return p.sums.get();
}

int32_t* Space::slots(uint32_t part, uint64_t n) {
  Part& p = parts_[part];
  if (p.ints < n) {
    p.slots.reset(new int32_t[n]);
    p.ints = n;
  }
  return p.slots.get();
}

HostThread& Space::thread(uint32_t part) {
  Part& p = parts_[part];
  if (!p.thread) p.thread = std::make_unique<HostThread>();
  return *p.thread;
}

bool Joined::launch(const Call& c, Under& u) {
  JoinedPart& p = parts_[u.index];
  const uint64_t m = uint64_t(c.m), k = uint64_t(c.top_k), element = wide_ ? 4 : 2, row = H_ * element;
  memcpy(p.hidden, c.x, m * row);
  memcpy(p.ids, c.slots, m * k * sizeof *p.ids);
  memcpy(p.weights, c.weights, m * k * sizeof *p.weights);
  const uint64_t dtype = wide_ ? kF32 : kBf16;
  const uint64_t info = dtype | uint64_t(kI32) << 4 | uint64_t(kF32) << 8 | dtype << 12 | k << 16 | uint64_t(held_) << 32;
  for (uint64_t i = 0; i < m; ++i) {
    uint64_t* line = p.table + i * kWords;
    line[0] = uint64_t(p.hidden) + i * row;
    line[1] = uint64_t(p.ids + i * k);
    line[2] = uint64_t(p.weights + i * k);
    line[3] = uint64_t(p.out) + i * row;
    line[4] = info;
    line[5] = 0;
    line[6] = p.device_slots;
    line[7] = 0;
  }
  for (uint64_t i = m; i < u.rows; ++i) p.table[i * kWords + 4] = 0;
  *static_cast<volatile uint32_t*>(p.done) = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  u.begin_ns = now_ns();
  return on_device_of(p.stream, [&](Driver& d) { return d.launch(u.exec, p.stream); }) == 0;
}

bool Joined::wait(Under& u) {
  const JoinedPart& p = parts_[u.index];
  const auto done = [&] { return *static_cast<volatile uint32_t*>(p.done) != 0; };
  uint64_t look = now_ns() + kLookNs;
  for (uint32_t i = 1; !done(); ++i) {
    rest();
    if (i % 1024 || now_ns() < look) continue;
    const int state = on_device_of(p.stream, [&](Driver& d) { return d.query(p.stream); });
    if (state != kNotReady && !done()) return false;
    look = now_ns() + kLookNs;
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  u.ns = now_ns() - u.begin_ns;
  return true;
}

void Joined::sum(const std::vector<Under>& parts, const Call& c) const {
  constexpr uint64_t kPiece = 2048;
  float sums[kPiece];
  const uint64_t n = uint64_t(c.m) * H_;
  for (uint64_t at = 0; at < n; at += kPiece) {
    const uint64_t some = std::min(kPiece, n - at);
    if (parts.empty()) std::fill_n(sums, some, 0.0f);
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto take = [&](const auto* from) { i ? add(sums, from + at, some) : set(sums, from + at, some); };
      if (parts[i].call.out_f32)
        take(static_cast<const float*>(parts[i].call.out));
      else
        take(static_cast<const uint16_t*>(parts[i].call.out));
    }
    if (wide_)
      round_to(static_cast<float*>(c.out) + at, sums, some);
    else
      round_to(static_cast<uint16_t*>(c.out) + at, sums, some);
  }
}

// Who has something to do for these routes, with the memory that it needs.  False: a device has no graph for so many rows.
bool Joined::plan(const Call& c, std::vector<Under>* devices, std::vector<Under>* hosts) {
  const uint64_t n = uint64_t(c.m) * uint64_t(c.top_k);
  for (uint32_t i = 0; i < parts_.size(); ++i) {
    const JoinedPart& p = parts_[i];
    if (!p.slots) continue;
    Under u{};
    u.index = i;
    int32_t* slots = space_.slots(i, n);
    for (uint64_t r = 0; r < n; ++r) u.routes += (slots[r] = c.slots[r] < 0 ? -1 : p.slots[c.slots[r]]) >= 0;
    if (!u.routes) continue;
    u.call = c;
    if (p.call) {
      u.call.slots = slots;
      hosts->push_back(u);
      continue;
    }
    const Graphs::Key key{kWhole, 0, uint32_t(c.top_k), uint32_t(c.weight_on_input)};
    u.rows = padded(uint32_t(c.m));
    u.exec = graphs_[i].exactly(key, u.rows);
    if (!u.exec || u.rows > p.rows || n > p.routes || !driver().there) return false;
    u.call.out = p.out;
    devices->push_back(u);
  }
  if (!devices->empty() || hosts->size() > 1)
    for (Under& u : *hosts) {
      u.call.out = space_.sums(u.index, uint64_t(c.m) * H_);
      u.call.out_f32 = 1;
    }
  return true;
}

// All of them at once; the last by this thread.
bool Joined::compute(std::vector<Under>& hosts) {
  bool good = true;
  for (size_t i = 0; i + 1 < hosts.size(); ++i) space_.thread(hosts[i].index).begin(&parts_[hosts[i].index], hosts[i].call);
  if (!hosts.empty()) {
    Under& u = hosts.back();
    const JoinedPart& p = parts_[u.index];
    const uint64_t begin = now_ns();
    good = p.call(p.context, p.experts, &u.call) == 0;
    u.ns = now_ns() - begin;
  }
  for (size_t i = 0; i + 1 < hosts.size(); ++i) {
    HostThread& t = space_.thread(hosts[i].index);
    good &= t.end() == 0;
    hosts[i].ns = t.ns;
  }
  return good;
}

int32_t Joined::call(const Call& c) try {
  constexpr int32_t kWithoutUs = 1;
  if (bool(c.x_f32) != wide_ || bool(c.out_f32) != wide_ || c.x_stride != int64_t(H_)) return kWithoutUs;
  std::vector<Under> devices, hosts;
  devices.reserve(parts_.size());
  hosts.reserve(parts_.size());
  if (!plan(c, &devices, &hosts)) return kWithoutUs;
  for (uint32_t i = 0; i + 1 < hosts.size(); ++i) space_.thread(hosts[i].index);  // they are there before anything runs
  bool good = true;
  size_t launched = 0;
  while (good && launched < devices.size()) {
    good = launch(c, devices[launched]);
    launched += good;
  }
  if (good) good = compute(hosts);
  for (size_t i = 0; i < launched; ++i) good &= wait(devices[i]);
  if (!good) return kWithoutUs;
  const bool alone = devices.empty() && hosts.size() == 1;
  devices.insert(devices.end(), hosts.begin(), hosts.end());
  for (const Under& u : devices) space_.times(u.index).add(u.routes, u.ns);
  if (!alone) sum(devices, c);
  return 0;
} catch (const std::bad_alloc&) {
  return 2;
}

}  // namespace expertd

#define API extern "C" __attribute__((visibility("default")))

using expertd::Joined;
using expertd::Space;

API Space* expertd_joined_space(uint32_t parts) { return new Space(parts); }
API void expertd_joined_space_free(Space* s) { delete s; }
// out: calls, routes and nanoseconds of each part
API void expertd_joined_times(Space* s, uint64_t* out) {
  for (uint32_t i = 0; i < s->size(); ++i) {
    const auto& t = s->times(i);
    for (const auto* n : {&t.calls, &t.routes, &t.ns}) *out++ = n->load(std::memory_order_relaxed);
  }
}
API Joined* expertd_joined(Space* s, uint32_t hidden_size, uint32_t held, uint32_t wide) {
  return new Joined(s, hidden_size, held, wide);
}
API void expertd_joined_free(Joined* j) { delete j; }
API void expertd_joined_part(Joined* j, uint32_t index, const expertd::JoinedPart* p) { j->part(index, *p); }
API void expertd_joined_graph(Joined* j, uint32_t part, uint32_t rows, uint32_t top_k, uint32_t on_input, void* exec) {
  j->graph(part, rows, top_k, on_input, exec);
}
API void expertd_joined_clear(Joined* j, uint32_t part) { j->clear(part); }
API int32_t expertd_joined_call(void* joined, const void*, const expertd::Call* c) { return static_cast<Joined*>(joined)->call(*c); }
