// Batches in lanes: how one is started on a CPU or on a device, when it is over, and what becomes of its requests.
#include "core_class.h"

#include <algorithm>

namespace expertd {

using shm::now_ns;

Core::Started Core::start(uint64_t now, Run* out) {
  uint32_t flag = 0;
  Layer* layer = most_urgent(serving_, accounts_, &flag);
  if (!layer) return kNothing;
  cut(layer->lines[flag], bounds_of(config_, accounts_, *layer->work, layer->facts.top_k, now), accounts_, cut_);
  for (Item* item : cut_.dropped) drop(item, *layer, now);
  if (cut_.run.empty()) return answers_.flush(), kLaunched;
  Lane* lane = free_.back();
  free_.pop_back();
  lane->items.swap(cut_.run);
  lane->layer = layer;
  lane->tokens = lane->rows = cut_.tokens;
  lane->router_weight_on_input = flag;
  lane->cut_ns = now;
  lane->top_k = 0;
  for (Item* item : lane->items) {
    lane->top_k = std::max(lane->top_k, item->f.top_k);
    unqueue(item);
    busy_.begin(item->f.tokens);
  }
  accounts_.forecast([&](Forecast& f) { f.begin(now, *layer->work, lane->tokens, lane->top_k); });
  accounts_.tidy();
  const bool alone = under_way_.empty();
  under_way_.push_back(lane);
  begun_.store(1ull << 63 | uint64_t(layer->facts.layer) << 31 | (lane->tokens & 0x7fffffff), std::memory_order_relaxed);
  *out = Run{lane->index, layer->facts.layer, layer->facts.generation, lane->tokens, lane->tokens, lane->top_k, flag,
             uint32_t(lane->items.size()), 0, 0, 0, 0, 0, 0};
  if (config_.device) return start_on_device(lane, alone, out);
  gather_here(*lane, config_, out);
  lane->launch_ns = now_ns();
  return call(*lane, *out) ? kLaunched : kNeedsRun;
}

// Without Python.  False: it cannot be, or what was called refuses; Python then calls it again, and finds the words.
bool Core::call(const Lane& lane, const Run& run) {
  const LayerFacts& layer = lane.layer->facts;
  if (!layer.call) return false;
  const bool wide = config_.compute_dtype == kF32;
  const Call c{reinterpret_cast<void*>(run.hidden), reinterpret_cast<int32_t*>(run.slots),
               reinterpret_cast<float*>(run.weights), reinterpret_cast<void*>(run.out), run.rows, layer.hidden_size,
               int32_t(run.top_k), wide, wide, int32_t(run.router_weight_on_input)};
  leave_door(*lane.layer->work, run.rows, run.top_k);
  const int32_t refused = layer.call(layer.context, layer.experts, &c);
  take_door();
  if (refused) return false;
  done(lane.index, now_ns() - lane.launch_ns, nullptr);
  return true;
}

Core::Started Core::start_on_device(Lane* lane, bool alone, Run* out) {
  write_table(*lane, config_);
  *static_cast<volatile uint32_t*>(lane->memory.done) = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  lane->launch_ns = now_ns();
  const bool streamed = config_.streamed_rows && movable(*lane, config_);
  const int error = alone && !streamed ? launch_whole(lane) : launch_parts(lane, streamed);
  if (!error) return kLaunched;
  pad_table(*lane, lane->tokens);
  out->rows = lane->rows;
  out->whole = error == kNoGraph && alone && on_device(*lane);
  out->launch_error = error == kNoGraph ? 0 : uint32_t(error);
  return kNeedsRun;
}

int Core::launch_whole(Lane* lane) {
  const auto [rows, exec] = lane->layer->graphs.at_least({kWhole, lane->index, lane->top_k, lane->router_weight_on_input}, lane->tokens);
  if (!exec) return on_device(*lane) ? kNoGraph : launch_parts(lane, false);
  pad_table(*lane, rows);
  return cuda_.launch(exec, cuda_.compute);
}

// Inputs, experts and outputs on streams of their own: beside the experts of another batch.
int Core::launch_parts(Lane* lane, bool streamed) {
  const auto [rows, experts] =
      lane->layer->graphs.at_least({kExperts, lane->index, lane->top_k, lane->router_weight_on_input}, lane->tokens);
  const uint32_t H = lane->layer->facts.hidden_size;
  const Part bring = lane->layer->facts.takes_e4m3 ? streamed ? kCollectStaged : kCollectE4m3
                     : streamed                    ? kCollectRoutes
                                                   : kCollect;
  void* collect = shared_.exactly({bring, lane->index, lane->top_k, H}, rows);
  void* deliver = shared_.exactly({kDeliver, lane->index, 0, H}, rows);
  if (!experts || !collect || !deliver) return kNoGraph;
  pad_table(*lane, rows);
  int error = streamed ? copy_in(*lane, config_, cuda_) : 0;
  error |= cuda_.launch(collect, cuda_.in);
  error |= cuda_.record(cuda_.there[lane->index], cuda_.in);
  error |= cuda_.wait(cuda_.compute, cuda_.there[lane->index], 0);
  error |= cuda_.launch(experts, cuda_.compute);
  error |= cuda_.record(cuda_.computed[lane->index], cuda_.compute);
  error |= cuda_.wait(cuda_.out, cuda_.computed[lane->index], 0);
  if (!streamed) return error | cuda_.launch(deliver, cuda_.out);
  error |= copy_out(*lane, config_, cuda_);
  return error | cuda_.write(cuda_.out, uint64_t(lane->memory.done), 1, 0);
}

bool Core::over(const Lane& lane) const {
  if (!config_.device || !*static_cast<volatile uint32_t*>(lane.memory.done)) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

Lane* Core::pop() {
  Lane* lane = under_way_.front();
  under_way_.pop_front();
  return lane;
}

void Core::done(uint32_t lane, uint64_t kernel_ns, const char* text) {
  take_door();
  Lane* l = &lanes_[lane];
  under_way_.erase(std::find(under_way_.begin(), under_way_.end(), l));
  l->kernel_ns = kernel_ns;
  if (text)
    fail(l, kBackendFailed, text);
  else
    finish(l, now_ns());
}

void Core::finish(Lane* lane, uint64_t now) {
  const uint64_t begin = std::max(lane->launch_ns, last_end_ns_);  // before that the device computed another batch
  if (config_.device) lane->kernel_ns = now - begin;
  last_end_ns_ = lane->computed_ns = now;
  BatchRecord r = record_of(*lane);
  uint64_t row = 0, staged = 0, asked = 0;
  double behind_ns = 0;
  for (size_t i = 0; i < lane->items.size(); ++i) {
    Item* item = lane->items[i];
    const Forward& f = item->f;
    Bad bad;
    const uint32_t routes = scatter(*lane, config_, i, row, staged, &bad);
    row += f.tokens;
    asked += routes_of(f);
    staged += is_output_staged(*item) ? f.tokens : 0;
    if (item->foreseen_ns) behind_ns = std::max(behind_ns, double(now) - double(item->foreseen_ns));
    r.routes += routes;
    const uint64_t waited = lane->cut_ns > f.arrival_ns ? lane->cut_ns - f.arrival_ns : 0;
    r.queue_ns += waited;
    ++r.waits[std::lower_bound(kWaitBoundsNs, kWaitBoundsNs + kWaitBounds, waited) - kWaitBoundsNs];
    busy_.end(f.tokens);
    if (bad.any)
      answers_.refuse_bad(item, lane->layer->facts, bad);
    else
      answers_.answer(item, lane, routes, waited);
  }
  r.kernel_ns = lane->kernel_ns;
  r.deliver_ns = now_ns() - now;
  answers_.delivered(uint32_t(r.deliver_ns));
  accounts_.forecast([&](Forecast& f) {
    f.computed(now, lane->layer->work, lane->rows, lane->top_k, now - begin, behind_ns);
  });
  patience_.batch_ended(now_ns(), now - lane->cut_ns, lane->items.size());
  busy_.saw(lane->tokens, now - begin);
  accounts_.saw(asked, now - begin);
  leave(lane, r);
}

void Core::fail(Lane* lane, uint32_t reason, const char* text) {
  BatchRecord r = record_of(*lane);
  r.failed = 1;
  for (Item* item : lane->items) {
    busy_.end(item->f.tokens);
    answers_.refuse(item, reason, 0, "%s", text);
  }
  leave(lane, r);
}

BatchRecord Core::record_of(const Lane& lane) const {
  BatchRecord r{};
  r.batches = 1;
  r.layer = lane.layer->facts.layer;
  r.generation = lane.layer->facts.generation;
  r.backend = lane.layer->backend_at(lane.rows);
  r.tokens = lane.tokens;
  r.requests = uint32_t(lane.items.size());
  r.collect_ns = lane.launch_ns - lane.cut_ns;
  return r;
}

void Core::leave(Lane* lane, const BatchRecord& r) {
  accounts_.forecast([](Forecast& f) { f.end(now_ns()); });
  answers_.record(r);
  if (under_way_.empty()) begun_.store(0, std::memory_order_relaxed);
  busy_.batches.fetch_add(1, std::memory_order_relaxed);
  busy_.served_tokens.fetch_add(lane->tokens, std::memory_order_relaxed);
  lane->items.clear();
  lane->layer = nullptr;
  free_.push_back(lane);
  forget_closed();
  answers_.flush();
  forget_retired();
}

}  // namespace expertd
