// The way out: completions of sessions in shared memory, outcomes of inline requests, records of batches.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "check.h"
#include "core.h"
#include "layer.h"
#include "queues.h"

namespace expertd {

// Who gets the outcomes of requests that are no Python's.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void outcome(Work* work, const Outcome& o) = 0;  // any thread
};

const char* reason_name(uint32_t reason);

class Answers {
 public:
  explicit Answers(const Busy& busy);
  ~Answers();

  // ---- any thread
  uint32_t outcomes(Outcome* out, uint32_t most);
  uint32_t records(BatchRecord* out, uint32_t most);
  uint32_t traces(TraceRecord* out, uint32_t most);
  int bell() const { return bell_; }  // rings when there are outcomes
  // Adds up what sessions of a channel were answered, by Reason, since the last call.
  void answered(uint64_t* counts);
  void count(uint32_t reason) { answered_[reason].fetch_add(1, std::memory_order_relaxed); }

  // ---- before there is a request of a Work
  void sink(Sink* sink) { sink_ = sink; }

  // ---- the core's thread
  Item* new_item();
  void give_back(Item* item) { pool_.push_back(item); }
  // The item is given back by both.
  void answer(Item* item, const BatchSlot* batch_slot, uint32_t routes, uint64_t waited_ns);
  void refuse(Item* item, const Refusal& why);
  void refuse_bad(Item* item, const LayerFacts& layer, const Bad& bad);
  void session_gone(uint64_t handle);
  // All of a batch is answered, which took so long: what is held of it is told so.
  void delivered(uint32_t deliver_ns);
  // Of a traced request that was refused before the core had it.  From any thread.
  void refused_outside(const Forward& f, uint32_t reason);
  void record(const BatchRecord& r) { held_records_.push_back(r); }
  // The outcome of `handle` is to go there, and not to outcomes(); null: none is.
  void await(uint64_t handle, Outcome* there) {
    awaited_handle_ = handle;
    awaited_ = there;
  }
  // Shows outcomes and records to the other threads: a batch is on record before anybody learns its outcome.
  void flush();

 private:
  void keep(const BatchRecord& r);
  void trace(const Item* item, const BatchSlot* batch_slot, uint32_t reason, uint64_t waited_ns);
  static TraceRecord trace_of(const Forward& f, uint32_t reason, uint32_t transport);
  void post(const Item* item, const Outcome& o) {
    if (item->work)
      sink_->outcome(item->work, o);
    else if (awaited_ && item->handle == awaited_handle_)
      *awaited_ = o;
    else
      held_.push_back(o);
  }

  const Busy& busy_;
  Sink* sink_ = nullptr;
  std::vector<std::unique_ptr<Item>> items_;  // all, also those that wait or are computed
  std::vector<Item*> pool_;
  int bell_;
  std::mutex mutex_;  // outbox_, records_
  std::vector<Outcome> outbox_;
  std::vector<BatchRecord> records_;
  std::vector<TraceRecord> traces_;
  std::map<std::array<uint64_t, 4>, size_t> kinds_;  // places in records_ of those that others may be added to
  uint64_t awaited_handle_ = 0;
  Outcome* awaited_ = nullptr;
  std::vector<Outcome> held_;  // of the core's thread, as held_records_
  std::vector<BatchRecord> held_records_;
  std::vector<TraceRecord> held_traces_;
  std::atomic<uint64_t> answered_[kReasons] = {};
};

}  // namespace expertd
