// The way out: completions of sessions in shared memory, outcomes of inline requests, records of batches.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "core.h"
#include "layer.h"
#include "lines.h"

namespace expertd {

class Answers {
 public:
  explicit Answers(const Busy& busy);
  ~Answers();

  // ---- any thread
  uint32_t outcomes(Outcome* out, uint32_t most);
  uint32_t records(BatchRecord* out, uint32_t most);
  int bell() const { return bell_; }  // rings when there are outcomes
  // Adds up what sessions in shared memory were answered, by Reason, since the last call.
  void answered(uint64_t* counts);

  // ---- the core's thread
  Item* new_item();
  void give_back(Item* item) { pool_.push_back(item); }
  // The item is given back by both.
  void answer(Item* item, const Lane* lane, uint32_t routes, uint64_t waited_ns);
  void refuse(Item* item, uint32_t reason, uint32_t retry_after_us, const char* format, ...)
      __attribute__((format(printf, 5, 6)));
  void refuse_bad(Item* item, const LayerFacts& layer, const Bad& bad);
  void session_gone(uint64_t handle);
  void record(const BatchRecord& r) { held_records_.push_back(r); }
  // Shows outcomes and records to the other threads: a batch is on record before anybody learns its outcome.
  void flush();

 private:
  void keep(const BatchRecord& r);
  void post(const Outcome& o) { held_.push_back(o); }

  const Busy& busy_;
  std::vector<Item*> pool_;
  int bell_;
  std::mutex mutex_;  // outbox_, records_
  std::vector<Outcome> outbox_;
  std::vector<BatchRecord> records_;
  std::map<std::array<uint64_t, 4>, size_t> kinds_;  // places in records_ of those that others may be added to
  std::vector<Outcome> held_;  // of the core's thread, as held_records_
  std::vector<BatchRecord> held_records_;
  std::atomic<uint64_t> answered_[kReasons] = {};
};

}  // namespace expertd
