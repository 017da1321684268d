// What the core knows of a layer, and one batch slot's batch.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core.h"
#include "gather.h"
#include "queues.h"

namespace expertd {

constexpr double kSmoothing = 0.2;
// Weight of the newest batch in a moving average.

// CUDA graphs of one kind by the rows that they are for.
class Graphs {
 public:
  using Key = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;  // part, batch slot, top_k, router weight on input or H

  void add(const Key& key, uint32_t rows, void* exec) { found_[key][rows] = exec; }
  // (rows, exec) of the smallest that holds `rows`; exec null: none.
  std::pair<uint32_t, void*> at_least(const Key& key, uint32_t rows) const {
    const auto of = found_.find(key);
    if (of == found_.end()) return {0, nullptr};
    const auto at = of->second.lower_bound(rows);
    if (at == of->second.end()) return {0, nullptr};
    return {at->first, at->second};
  }
  void* exactly(const Key& key, uint32_t rows) const {
    const auto [found, exec] = at_least(key, rows);
    return found == rows ? exec : nullptr;
  }

 private:
  std::map<Key, std::map<uint32_t, void*>> found_;
};

struct Layer {
  LayerFacts facts{};
  std::vector<int32_t> slots;
  std::vector<Item*> queues[2];                          // by router_weight_on_input
  std::vector<std::pair<uint32_t, uint32_t>> backends;  // (rows up to, 0 = any; the caller's number for it)
  std::vector<std::string> names;                       // of `backends`
  Graphs graphs;
  LayerWork* work = nullptr;  // of all layers of this number; its times change on the core's thread alone

  uint32_t backend_at(uint32_t rows) const { return backends.empty() ? 0 : backends[place_of(rows)].second; }
  const char* name_at(uint32_t rows) const { return names.empty() ? "" : names[place_of(rows)].c_str(); }

 private:
  size_t place_of(uint32_t rows) const {
    size_t i = 0;
    while (i + 1 < backends.size() && backends[i].first && rows > backends[i].first) ++i;
    return i;
  }
};

struct BatchSlot {
  BatchSlotMemory memory{};
  std::vector<Item*> items;
  std::vector<Bad> bad;          // by item; of a device's batch what was found on the host
  std::vector<uint32_t> routes;  // on a CPU, by item
  Layer* layer = nullptr;
  uint32_t index = 0, tokens = 0, rows = 0, top_k = 0, router_weight_on_input = 0;
  uint64_t cut_ns = 0, launch_ns = 0, kernel_ns = 0, computed_ns = 0;
  bool in_place_out = false;
};

// What waits and what is under way, for admission and for callers that choose between replicas.
struct Busy {
  std::atomic<uint64_t> tokens{0}, requests{0};                      // waiting
  std::atomic<uint64_t> computing_tokens{0}, computing_requests{0};  // under way
  std::atomic<uint64_t> admitted{0}, batches{0}, served_tokens{0};
  std::atomic<float> token_ns{0};

  static void add(std::atomic<uint64_t>& to, uint64_t n) { to.fetch_add(n, std::memory_order_relaxed); }
  static void take(std::atomic<uint64_t>& from, uint64_t n) { from.fetch_sub(n, std::memory_order_relaxed); }
  static uint64_t now(const std::atomic<uint64_t>& of) { return of.load(std::memory_order_relaxed); }

  void enter(uint32_t n) {
    add(tokens, n);
    add(requests, 1);
  }
  void leave(uint32_t n) {
    take(tokens, n);
    take(requests, 1);
  }
  void begin(uint32_t n) {
    add(computing_tokens, n);
    add(computing_requests, 1);
    leave(n);
  }
  void end(uint32_t n) {
    take(computing_tokens, n);
    take(computing_requests, 1);
  }
  uint64_t all_tokens() const { return now(tokens) + now(computing_tokens); }
  uint64_t all_requests() const { return now(requests) + now(computing_requests); }

  uint32_t retry_after_us() const {
    const double us = double(now(tokens)) * double(token_ns.load(std::memory_order_relaxed)) / 1000;
    return uint32_t(us < 1 ? 1 : us > 1e9 ? 1e9 : us);
  }
  void saw(uint32_t n, uint64_t ns) {
    const double each = double(ns) / (n ? n : 1), before = double(token_ns.load(std::memory_order_relaxed));
    token_ns.store(float(before == 0 ? each : before + kSmoothing * (each - before)), std::memory_order_relaxed);
  }
};

}  // namespace expertd
