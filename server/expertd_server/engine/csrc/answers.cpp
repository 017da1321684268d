#include "answers.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>

#include "server_side.h"

namespace expertd {
namespace {

constexpr size_t kSingleRecords = 256, kMostRecords = 65536, kMostTraces = 16384;
// So many batches that nobody has asked for are told one by one, later ones added to what they are like; of more than
// kMostRecords kinds some are missed.

uint64_t bound_of(uint64_t ns) {
  return uint64_t(std::lower_bound(kWaitBoundsNs, kWaitBoundsNs + kWaitBounds, ns) - kWaitBoundsNs);
}

// Equal for batches that are alike.
std::array<uint64_t, 4> kind_of(const BatchRecord& r) {
  return {uint64_t(r.generation) << 32 | r.backend, uint64_t(r.tokens) << 32 | r.requests,
          bound_of(r.collect_ns) << 16 | bound_of(r.kernel_ns) << 8 | bound_of(r.deliver_ns), r.failed};
}

void add(BatchRecord* to, const BatchRecord& r) {
  to->batches += r.batches;
  for (uint32_t i = 0; i <= kWaitBounds; ++i) to->waits[i] += r.waits[i];
  to->routes += r.routes;
  to->queue_ns += r.queue_ns;
  to->collect_ns += r.collect_ns;
  to->kernel_ns += r.kernel_ns;
  to->deliver_ns += r.deliver_ns;
}

void publish(const Item* item, shm::Completion& c, bool refused) {
  if (item->called)
    item->connection->publish_call(refused);
  else
    item->connection->publish(c);
  --item->connection->in_flight;
}

}  // namespace

const char* reason_name(uint32_t reason) { return kReasonNames[reason]; }

Answers::Answers(const Busy& busy) : busy_(busy), bell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

Answers::~Answers() {
  close(bell_);
}

uint32_t Answers::outcomes(Outcome* out, uint32_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto n = long(std::min<size_t>(most, outbox_.size()));
  std::copy_n(outbox_.begin(), n, out);
  outbox_.erase(outbox_.begin(), outbox_.begin() + n);
  if (outbox_.empty()) shm::sleep_on(bell_, 0);
  return uint32_t(n);
}

uint32_t Answers::records(BatchRecord* out, uint32_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kinds_.clear();  // they name places
  const auto n = long(std::min<size_t>(most, records_.size()));
  std::copy_n(records_.begin(), n, out);
  records_.erase(records_.begin(), records_.begin() + n);
  return uint32_t(n);
}

uint32_t Answers::traces(TraceRecord* out, uint32_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto n = long(std::min<size_t>(most, traces_.size()));
  std::copy_n(traces_.begin(), n, out);
  traces_.erase(traces_.begin(), traces_.begin() + n);
  return uint32_t(n);
}

Item* Answers::new_item() {
  if (pool_.empty()) return items_.emplace_back(std::make_unique<Item>()).get();
  Item* item = pool_.back();
  pool_.pop_back();
  *item = Item{};
  return item;
}

void Answers::answer(Item* item, const BatchSlot* batch_slot, uint32_t routes, uint64_t waited_ns) {
  const uint32_t backend = batch_slot ? batch_slot->layer->backend_at(batch_slot->rows) : 0;
  const auto collect_ns = uint32_t(batch_slot ? batch_slot->launch_ns - batch_slot->cut_ns : 0), kernel_ns = uint32_t(batch_slot ? batch_slot->kernel_ns : 0);
  if (item->f.traced()) trace(item, batch_slot, kComputed, waited_ns);
  const uint32_t tokens = batch_slot ? batch_slot->tokens : 0, requests = batch_slot ? uint32_t(batch_slot->items.size()) : 0;
  if (item->connection) {
    auto& c = item->called ? item->connection->open_call(false) : item->connection->open(item->id);
    c.refused = 0;
    c.routes_computed = routes;
    c.arrival_ns = item->f.arrival_ns;
    c.queue_ns = uint32_t(waited_ns);
    c.collect_ns = collect_ns;
    c.kernel_ns = kernel_ns;
    c.deliver_ns = 0;
    c.batch_tokens = tokens;
    c.batch_requests = requests;
    c.queued_tokens = uint32_t(busy_.all_tokens());
    c.queued_requests = uint32_t(busy_.all_requests());
    c.token_ns = busy_.token_ns.load(std::memory_order_relaxed);
    snprintf(c.name, sizeof c.name, "%s", batch_slot ? batch_slot->layer->name_at(batch_slot->rows) : "");
    c.set_version(item->weights_version);
    count(kComputed);
    publish(item, c, false);
  } else {
    Outcome o{};
    o.handle = item->handle;
    o.weights_version = item->weights_version;
    o.routes_computed = routes;
    o.queue_ns = uint32_t(waited_ns);
    o.collect_ns = collect_ns;
    o.kernel_ns = kernel_ns;
    o.batch_tokens = tokens;
    o.batch_requests = requests;
    o.backend = backend;
    if (item->f.named && batch_slot) snprintf(o.text, sizeof o.text, "%s", batch_slot->layer->name_at(batch_slot->rows));
    post(item, o);
  }
  give_back(item);
}

void Answers::refuse(Item* item, const Refusal& why) {
  if (item->f.traced()) trace(item, nullptr, why.reason, 0);
  if (item->connection) {
    auto& c = item->called ? item->connection->open_call(true) : item->connection->open(item->id);
    c.refused = 1;
    c.retry_after_us = why.retry_after_us;
    snprintf(c.name, sizeof c.name, "%s", kReasonNames[why.reason]);
    snprintf(c.text, sizeof c.text, "%s", why.text.c_str());
    count(why.reason);
    publish(item, c, true);
  } else {
    Outcome o{};
    o.handle = item->handle;
    put(why, &o);
    post(item, o);
  }
  give_back(item);
}

TraceRecord Answers::trace_of(const Forward& f, uint32_t reason, uint32_t transport) {
  TraceRecord t{};
  memcpy(t.trace, f.trace, sizeof t.trace);
  t.arrival_ns = f.arrival_ns;
  t.answered_ns = shm::now_ns();
  t.layer = f.layer;
  t.tokens = f.tokens;
  t.top_k = f.top_k;
  t.reason = reason;
  t.transport = transport;
  return t;
}

void Answers::refused_outside(const Forward& f, uint32_t reason) {
  const TraceRecord t = trace_of(f, reason, 2);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (traces_.size() < kMostTraces) traces_.push_back(t);
}

void Answers::trace(const Item* item, const BatchSlot* batch_slot, uint32_t reason, uint64_t waited_ns) {
  TraceRecord t = trace_of(item->f, reason, item->connection ? 1 : 2);
  if (batch_slot) {
    t.computed_ns = batch_slot->computed_ns;
    t.backend = batch_slot->layer->backend_at(batch_slot->rows);
    t.queue_ns = uint32_t(waited_ns);
    t.collect_ns = uint32_t(batch_slot->launch_ns - batch_slot->cut_ns);
    t.kernel_ns = uint32_t(batch_slot->kernel_ns);
    t.batch_tokens = batch_slot->tokens;
    t.batch_requests = uint32_t(batch_slot->items.size());
  }
  held_traces_.push_back(t);
}

void Answers::delivered(uint32_t deliver_ns) {
  if (awaited_ && awaited_->batch_requests && !awaited_->deliver_ns) awaited_->deliver_ns = deliver_ns;
  for (Outcome& o : held_)
    if (o.batch_requests && !o.deliver_ns) o.deliver_ns = deliver_ns;
  for (TraceRecord& t : held_traces_)
    if (t.batch_requests && !t.deliver_ns) t.deliver_ns = deliver_ns;
}

void Answers::refuse_bad(Item* item, const LayerFacts& layer, const Bad& bad) {
  char got[40] = "another number";  // its memory is a device's, or says otherwise now
  if (bad.hidden) return refuse(item, refusal<Text::nonfinite_hidden_state>(bad.row, bad.column, double(bad.value)));
  if (bad.value != 0) snprintf(got, sizeof got, bad.weight ? "%g" : "%.0f", double(bad.value));
  if (bad.weight) return refuse(item, refusal<Text::nonfinite_weight>(bad.row, bad.column, got));
  refuse(item, refusal<Text::expert_id>(bad.row, bad.column, layer.layer, got, layer.num_experts - 1));
}

void Answers::session_gone(uint64_t handle) {
  Outcome o{};
  o.handle = handle;
  o.session_gone = 1;
  held_.push_back(o);
}

void Answers::flush() {
  if (held_.empty() && held_records_.empty() && held_traces_.empty()) return;
  bool first;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    first = outbox_.empty() && !held_.empty();
    const uint64_t now = shm::now_ns();
    for (Outcome& o : held_) o.posted_ns = now;
    outbox_.insert(outbox_.end(), held_.begin(), held_.end());
    for (const BatchRecord& r : held_records_) keep(r);
    for (const TraceRecord& t : held_traces_)
      if (traces_.size() < kMostTraces) traces_.push_back(t);
  }
  held_.clear();
  held_records_.clear();
  held_traces_.clear();
  if (first) shm::ring(bell_);
}

void Answers::keep(const BatchRecord& r) {
  if (records_.size() < kSingleRecords) return records_.push_back(r);
  const auto [at, is_new] = kinds_.try_emplace(kind_of(r), records_.size());
  if (!is_new)
    add(&records_[at->second], r);
  else if (records_.size() < kMostRecords)
    records_.push_back(r);
  else
    kinds_.erase(at);
}

void Answers::answered(uint64_t* counts) {
  for (uint32_t i = 0; i < kReasons; ++i) counts[i] += answered_[i].exchange(0, std::memory_order_relaxed);
}

}  // namespace expertd
