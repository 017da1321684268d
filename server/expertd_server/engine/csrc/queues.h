// Which requests run next: a pure choice among those that wait.  tests/server/engine/rules.cpp drives it on a clock of
// its own.
#pragma once

#include <cstdint>
#include <algorithm>
#include <vector>

#include "accounts.h"
#include "core.h"

namespace expertd {

class ShmConnection;
struct Work;

struct Item {
  Forward f{};
  Account* account = nullptr;  // while it waits
  uint64_t handle = 0;   // of an inline request
  uint64_t foreseen_ns = 0;  // when it was expected to be computed, when it came; 0 = not known
  uint64_t weights_version = 0;  // of the layer that it waits for
  ShmConnection* connection = nullptr;  // of one that came through a session in shared memory, with its own id there
  uint64_t id = 0;
  Work* work = nullptr;  // of one that came over TCP: its outcome goes there
  bool cancelled = false, taken = false;
  bool called = false;  // by the session's device: its answer is a word, no completion
};

// A request without a deadline is as urgent as one whose deadline is so long after its arrival.
constexpr uint64_t kSlackNs = 100000000;

inline uint64_t urgency(const Forward& f) {
  const uint64_t usual = f.arrival_ns + kSlackNs;
  return f.deadline_ns && f.deadline_ns < usual ? f.deadline_ns : usual;
}

inline bool expired(const Forward& f, uint64_t now) { return f.deadline_ns && now >= f.deadline_ns; }

// Callers that were just answered together come back one by one.  Were the first of them computed alone, 8 callers in a
// closed loop would alternate between batches of 1 and of 7 for ever.  So for a part of the last batch's time as many
// requests as it had are waited for; whenever that was in vain the part is halved, so callers that do not come back cost
// next to nothing.
class Patience {
 public:
  void batch_ended(uint64_t now, uint64_t service_ns, uint64_t requests) {
    end_ns_ = now;
    service_ns_ = service_ns;
    requests_ = requests;
  }
  // Until when to wait although `waiting` requests could be computed; 0 = no longer.
  uint64_t until(float part, uint64_t waiting) const {
    return waiting >= requests_ ? 0 : end_ns_ + uint64_t(double(part) * trust_ * double(service_ns_));
  }
  void waited(uint64_t came) {
    constexpr double kLeast = 1.0 / 16;  // enough to notice when they come back again
    trust_ = came >= requests_ ? std::min(1.0, 2 * trust_) : std::max(kLeast, trust_ / 2);
  }

 private:
  uint64_t end_ns_ = 0, service_ns_ = 0, requests_ = 0;
  double trust_ = 1;
};

struct Cut {
  std::vector<Item*> run, dropped;  // dropped: cancelled, expired, or doomed
  uint32_t tokens = 0;
};

constexpr double kLongBatchNs = 1e6;
constexpr double kSavesLittle = 0.95;  // of the time that a request takes alone

// What a batch may be.
struct Bounds {
  uint64_t now;
  uint32_t max_tokens;
  uint32_t top_k;           // rows have as many routes together as max_tokens of so many each; 0 = any number
  const BatchTimes* times;  // what it takes; null: nobody asks
  double before_ns, after_ns;  // until it can begin; from its end to its callers
  const BatchTimes* apart;  // a long batch grows only where this says that it saves time; null: it grows
};

// Whether `f` would be late even if it were computed now and alone.
inline bool doomed(const Forward& f, const Bounds& b) {
  return b.times && f.deadline_ns &&
         double(b.now) + b.before_ns + b.times->expect(f.tokens, f.top_k) + b.after_ns > double(f.deadline_ns);
}

// What a batch of a layer with top_k may be now.
inline Bounds bounds_of(const Config& config, Accounts& accounts, const LayerWork& work, uint32_t top_k, uint64_t now) {
  Bounds b{now, config.max_tokens, top_k, nullptr, 0, 0, accounts.shared(now) ? &work.times : nullptr};
  if (!config.refuse_late) return b;
  accounts.forecast([&](const Forecast& f) {
    if (f.fresh(now)) b.times = &work.times;
    b.before_ns = f.running_ns(now);
    b.after_ns = f.way_out_ns(now, 1);
  });
  return b;
}

// The layer with the most urgent request, where urgency is put off by what its client was served more than others; flag:
// in which of its two queues.  Null: nothing waits.
template <class Layer>
Layer* most_urgent(const std::vector<Layer*>& layers, Accounts& accounts, uint32_t* flag) {
  uint64_t least = ~uint64_t(0), first = ~uint64_t(0);
  for (const Layer* l : layers)
    for (const auto& queue : l->queues)
      for (const Item* item : queue) least = std::min(least, accounts.share(*item->account));
  if (least != ~uint64_t(0)) accounts.settle(least);
  Layer* layer = nullptr;
  for (Layer* l : layers)
    for (uint32_t i : {0u, 1u})
      for (const Item* item : l->queues[i])
        if (const uint64_t u = urgency(item->f) + accounts.lag_ns(*item->account); u < first) {
          first = u;
          layer = l;
          *flag = i;
        }
  return layer;
}

// Takes the next batch out of `queue`, in which all fit together but for their number: everything where it is one batch
// and none of it would be late, in order of arrival; else turn by turn from the caller served least so far, of each its
// most urgent request, until one does not fit, or makes those that were taken late.  One that only would be late itself
// waits for another turn.  The first is taken whatever its size.
//
// A batch that runs is not interrupted: whoever comes meanwhile waits for its end.  So while several callers are served, a
// batch does not grow beyond kLongBatchNs by requests that take about as long alone, afterwards (decision 177).
void cut(std::vector<Item*>& queue, const Bounds& bounds, Accounts& accounts, Cut& out);

}  // namespace expertd
