// Batches in batch slots: how one is started on a CPU or on a device, when it is over, and what becomes of its requests.
#include "core_class.h"

#include <algorithm>

namespace expertd {

using shm::now_ns;

Core::Started Core::start(uint64_t now, Run* out) {
  uint32_t flag = 0;
  Layer* layer = most_urgent(serving_, accounts_, &flag);
  if (!layer) return kNothing;
  cut(layer->queues[flag], bounds_of(config_, accounts_, *layer->work, layer->facts.top_k, now), accounts_, cut_);
  for (Item* item : cut_.dropped) drop(item, *layer, now);
  if (cut_.run.empty()) return answers_.flush(), kLaunched;
  BatchSlot* batch_slot = free_.back();
  free_.pop_back();
  batch_slot->items.swap(cut_.run);
  batch_slot->layer = layer;
  batch_slot->tokens = batch_slot->rows = cut_.tokens;
  batch_slot->router_weight_on_input = flag;
  batch_slot->cut_ns = now;
  batch_slot->top_k = 0;
  for (Item* item : batch_slot->items) {
    batch_slot->top_k = std::max(batch_slot->top_k, item->f.top_k);
    unqueue(item);
    busy_.begin(item->f.tokens);
  }
  accounts_.forecast([&](Forecast& f) { f.begin(now, *layer->work, batch_slot->tokens, batch_slot->top_k); });
  accounts_.tidy();
  const bool alone = under_way_.empty();
  under_way_.push_back(batch_slot);
  begun_.store(1ull << 63 | uint64_t(layer->facts.layer) << 31 | (batch_slot->tokens & 0x7fffffff), std::memory_order_relaxed);
  *out = Run{batch_slot->index, layer->facts.layer, layer->facts.generation, batch_slot->tokens, batch_slot->tokens, batch_slot->top_k, flag,
             uint32_t(batch_slot->items.size()), 0, 0, 0, 0, 0, 0};
  if (config_.device) return start_on_device(batch_slot, alone, out);
  gather_here(*batch_slot, config_, out);
  batch_slot->launch_ns = now_ns();
  return call(*batch_slot, *out) ? kLaunched : kNeedsRun;
}

// Without Python.  False: it cannot be, or what was called refuses; Python then calls it again, and finds the words.
bool Core::call(const BatchSlot& batch_slot, const Run& run) {
  const LayerFacts& layer = batch_slot.layer->facts;
  if (!layer.call) return false;
  const bool wide = config_.compute_dtype == kF32;
  const Call c{reinterpret_cast<void*>(run.hidden), reinterpret_cast<int32_t*>(run.slots),
               reinterpret_cast<float*>(run.weights), reinterpret_cast<void*>(run.out), run.rows, layer.hidden_size,
               int32_t(run.top_k), wide, wide, int32_t(run.router_weight_on_input)};
  lend_to_poller(*batch_slot.layer->work, run.rows, run.top_k);
  const int32_t refused = layer.call(layer.context, layer.experts, &c);
  take_from_poller();
  if (refused) return false;
  done(batch_slot.index, now_ns() - batch_slot.launch_ns, nullptr);
  return true;
}

Core::Started Core::start_on_device(BatchSlot* batch_slot, bool alone, Run* out) {
  write_table(*batch_slot, config_);
  *static_cast<volatile uint32_t*>(batch_slot->memory.done) = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  batch_slot->launch_ns = now_ns();
  const bool streamed = config_.streamed_rows && movable(*batch_slot, config_);
  const int error = alone && !streamed ? launch_whole(batch_slot) : launch_parts(batch_slot, streamed);
  if (!error) return kLaunched;
  pad_table(*batch_slot, batch_slot->tokens);
  out->rows = batch_slot->rows;
  out->whole = error == kNoGraph && alone && on_device(*batch_slot);
  out->launch_error = error == kNoGraph ? 0 : uint32_t(error);
  return kNeedsRun;
}

int Core::launch_whole(BatchSlot* batch_slot) {
  const auto [rows, exec] = batch_slot->layer->graphs.at_least({kWhole, batch_slot->index, batch_slot->top_k, batch_slot->router_weight_on_input}, batch_slot->tokens);
  if (!exec) return on_device(*batch_slot) ? kNoGraph : launch_parts(batch_slot, false);
  pad_table(*batch_slot, rows);
  return cuda_.launch(exec, cuda_.compute);
}

// Inputs, experts and outputs on streams of their own: beside the experts of another batch.
int Core::launch_parts(BatchSlot* batch_slot, bool streamed) {
  const auto [rows, experts] =
      batch_slot->layer->graphs.at_least({kExperts, batch_slot->index, batch_slot->top_k, batch_slot->router_weight_on_input}, batch_slot->tokens);
  const uint32_t H = batch_slot->layer->facts.hidden_size;
  const Part bring = batch_slot->layer->facts.takes_e4m3 ? streamed ? kCollectStaged : kCollectE4m3
                     : streamed                    ? kCollectRoutes
                                                   : kCollect;
  void* collect = shared_.exactly({bring, batch_slot->index, batch_slot->top_k, H}, rows);
  void* deliver = shared_.exactly({kDeliver, batch_slot->index, 0, H}, rows);
  if (!experts || !collect || !deliver) return kNoGraph;
  pad_table(*batch_slot, rows);
  int error = streamed ? copy_in(*batch_slot, config_, cuda_) : 0;
  error |= cuda_.launch(collect, cuda_.in);
  error |= cuda_.record(cuda_.there[batch_slot->index], cuda_.in);
  error |= cuda_.wait(cuda_.compute, cuda_.there[batch_slot->index], 0);
  error |= cuda_.launch(experts, cuda_.compute);
  error |= cuda_.record(cuda_.computed[batch_slot->index], cuda_.compute);
  error |= cuda_.wait(cuda_.out, cuda_.computed[batch_slot->index], 0);
  if (!streamed) return error | cuda_.launch(deliver, cuda_.out);
  error |= copy_out(*batch_slot, config_, cuda_);
  return error | cuda_.write(cuda_.out, uint64_t(batch_slot->memory.done), 1, 0);
}

bool Core::over(const BatchSlot& batch_slot) const {
  if (!config_.device || !*static_cast<volatile uint32_t*>(batch_slot.memory.done)) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

BatchSlot* Core::pop() {
  BatchSlot* batch_slot = under_way_.front();
  under_way_.pop_front();
  return batch_slot;
}

void Core::done(uint32_t batch_slot, uint64_t kernel_ns, const char* text) {
  take_from_poller();
  BatchSlot* l = &batch_slots_[batch_slot];
  under_way_.erase(std::find(under_way_.begin(), under_way_.end(), l));
  l->kernel_ns = kernel_ns;
  if (text)
    fail(l, kBackendFailed, text);
  else
    finish(l, now_ns());
}

void Core::finish(BatchSlot* batch_slot, uint64_t now) {
  const uint64_t begin = std::max(batch_slot->launch_ns, last_end_ns_);  // before that the device computed another batch
  if (config_.device) batch_slot->kernel_ns = now - begin;
  last_end_ns_ = batch_slot->computed_ns = now;
  BatchRecord r = record_of(*batch_slot);
  uint64_t row = 0, staged = 0, asked = 0;
  double behind_ns = 0;
  for (size_t i = 0; i < batch_slot->items.size(); ++i) {
    Item* item = batch_slot->items[i];
    const Forward& f = item->f;
    Bad bad;
    const uint32_t routes = scatter(*batch_slot, config_, i, row, staged, &bad);
    row += f.tokens;
    asked += routes_of(f);
    staged += is_output_staged(*item) ? f.tokens : 0;
    if (item->foreseen_ns) behind_ns = std::max(behind_ns, double(now) - double(item->foreseen_ns));
    r.routes += routes;
    const uint64_t waited = batch_slot->cut_ns > f.arrival_ns ? batch_slot->cut_ns - f.arrival_ns : 0;
    r.queue_ns += waited;
    ++r.waits[std::lower_bound(kWaitBoundsNs, kWaitBoundsNs + kWaitBounds, waited) - kWaitBoundsNs];
    busy_.end(f.tokens);
    if (bad.any)
      answers_.refuse_bad(item, batch_slot->layer->facts, bad);
    else
      answers_.answer(item, batch_slot, routes, waited);
  }
  r.kernel_ns = batch_slot->kernel_ns;
  r.deliver_ns = now_ns() - now;
  answers_.delivered(uint32_t(r.deliver_ns));
  accounts_.forecast([&](Forecast& f) {
    f.computed(now, batch_slot->layer->work, batch_slot->rows, batch_slot->top_k, now - begin, behind_ns);
  });
  patience_.batch_ended(now_ns(), now - batch_slot->cut_ns, batch_slot->items.size());
  busy_.saw(batch_slot->tokens, now - begin);
  accounts_.saw(asked, now - begin);
  leave(batch_slot, r);
}

void Core::fail(BatchSlot* batch_slot, uint32_t reason, const char* text) {
  BatchRecord r = record_of(*batch_slot);
  r.failed = 1;
  for (Item* item : batch_slot->items) {
    busy_.end(item->f.tokens);
    answers_.refuse(item, {reason, text});
  }
  leave(batch_slot, r);
}

BatchRecord Core::record_of(const BatchSlot& batch_slot) const {
  BatchRecord r{};
  r.batches = 1;
  r.layer = batch_slot.layer->facts.layer;
  r.generation = batch_slot.layer->facts.generation;
  r.backend = batch_slot.layer->backend_at(batch_slot.rows);
  r.tokens = batch_slot.tokens;
  r.requests = uint32_t(batch_slot.items.size());
  r.collect_ns = batch_slot.launch_ns - batch_slot.cut_ns;
  return r;
}

void Core::leave(BatchSlot* batch_slot, const BatchRecord& r) {
  accounts_.forecast([](Forecast& f) { f.end(now_ns()); });
  answers_.record(r);
  if (under_way_.empty()) begun_.store(0, std::memory_order_relaxed);
  busy_.batches.fetch_add(1, std::memory_order_relaxed);
  busy_.served_tokens.fetch_add(batch_slot->tokens, std::memory_order_relaxed);
  batch_slot->items.clear();
  batch_slot->layer = nullptr;
  free_.push_back(batch_slot);
  forget_closed();
  answers_.flush();
  forget_retired();
}

}  // namespace expertd
