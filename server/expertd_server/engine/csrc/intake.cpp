// What comes into the core: inline requests, commands, and submissions in shared memory with their checks.
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "check.h"
#include "core_class.h"
#include "tcp_connections.h"

namespace expertd {
namespace {

TensorFacts raw_tensor(uint8_t dtype, uint64_t rows, uint64_t columns) {
  TensorFacts t{};
  t.present = 1;
  t.dtype = dtype;
  t.spelling = kRaw;
  t.rank = 2;
  t.shape[0] = rows;
  t.shape[1] = columns;
  t.amount = rows * columns * size_of(dtype);
  return t;
}

// hidden_size: of the layer, where the client does not tell what it takes H for.
RequestFacts facts_of(const shm::Submission& s, uint32_t hidden_size) {
  const uint64_t M = s.tokens, H = s.hidden_size ? s.hidden_size : hidden_size;
  RequestFacts r{};
  r.layer = s.layer;
  r.output_dtype = s.out_dtype;
  r.weight_on_input = (s.flags & shm::kRouterWeightOnInput) != 0;
  r.hidden = raw_tensor(s.hidden_dtype, M, H);
  r.ids = raw_tensor(s.ids_dtype, M, s.top_k);
  r.weights = raw_tensor(s.weights_dtype, M, s.top_k);
  if (s.hidden_dtype == kE4m3) {
    r.hidden.scaled = 1;
    r.hidden.scale_block = uint32_t(e4m3::kBlock);
    r.hidden.scale_bytes = e4m3::scales_bytes(M, H);
  }
  return r;
}

}  // namespace

bool Core::take_inbox() {
  if (!incoming_.load(std::memory_order_seq_cst)) return false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    incoming_.store(false, std::memory_order_relaxed);
    taken_.swap(inbox_);
  }
  for (Command& c : taken_) obey(c);
  taken_.clear();
  return true;
}

void Core::enqueue(const Command& c) {
  Item* item = answers_.new_item();
  item->f = c.forward;
  item->handle = c.handle;
  item->account = c.account;
  item->foreseen_ns = c.foreseen_ns;
  item->work = c.work;
  Layer* layer = held(item->f.layer, item->f.weights_version);
  const Forward f = item->f;  // the item is gone where it is answered
  Account* account = item->account;
  if (!layer) {
    answers_.refuse(item, missing(f.layer, f.weights_version));
  } else if (f.hidden_size && f.hidden_size != layer->facts.hidden_size) {
    answers_.refuse(item, not_held(f.layer));  // since it was checked, another layer has its number
  } else {
    item->weights_version = layer->facts.weights_version;
    if (f.tokens) return layer->queues[f.router_weight_on_input ? 1 : 0].push_back(item);
    answers_.answer(item, nullptr, 0, 0);
  }
  accounts_.leave(account, f);
  busy_.leave(f.tokens);
}

void Core::obey(Command& c) {
  switch (c.kind) {
    case Command::kForward:
      return enqueue(c);
    case Command::kAddLayer:
      return add_layer(c);
    case Command::kRemoveLayer:
      return remove_layer(c.layer);
    case Command::kDropKept:
      return drop_kept();
    case Command::kAddGraph: {
      const auto part = std::get<0>(c.key);
      if (part != kWhole && part != kExperts) return shared_.add(c.key, c.rows, c.exec);
      const auto found = layers_.find(c.layer);
      if (found != layers_.end() && found->second->facts.generation == c.generation)
        found->second->graphs.add(c.key, c.rows, c.exec);
      return;
    }
    case Command::kAddPort:
      watch(c.connection->bell);
      shm_connections_.push_back(std::move(c.connection));
      return;
    case Command::kRemovePort:
      return remove_port(c.handle);
    case Command::kCancel:
      return take_back([&](const Item* i) { return !i->connection && i->handle == c.handle; });
  }
}

void Core::add_layer(Command& c) {
  auto& at = layers_[c.layer];
  if (at && c.keeps) {
    auto& kept = kept_[c.layer];
    if (kept) retire(std::move(kept));
    kept = std::move(at);
  } else if (at) {
    retire(std::move(at));
  }
  at = std::move(c.made);
  at->work = accounts_.forecast([&](Forecast& f) {
    LayerWork* work = f.layer(c.layer, at->facts.top_k);
    for (const Measured& m : c.measured) work->times.saw(m.rows, m.top_k, m.ns);
    return work;
  });
  list_serving();
}

void Core::remove_layer(uint32_t number) {
  const auto found = layers_.find(number);
  if (found == layers_.end()) return;
  std::unique_ptr<Layer> layer = std::move(found->second);
  layers_.erase(found);
  if (const auto kept = kept_.find(number); kept != kept_.end()) {
    retired_.push_back(std::move(kept->second));
    kept_.erase(kept);
  }
  retire(std::move(layer));
}

void Core::drop_kept() {
  auto kept = std::move(kept_);
  kept_.clear();
  for (auto& one : kept) retired_.push_back(std::move(one.second));
  forget_retired();
}

// The layer that computes a request for it; version 0 = whichever is served.  Null: missing() says why.
Layer* Core::held(uint32_t number, uint64_t version) const {
  const auto found = layers_.find(number);
  if (found == layers_.end()) return nullptr;
  if (!version || version == found->second->facts.weights_version) return found->second.get();
  const auto kept = kept_.find(number);
  return kept != kept_.end() && version == kept->second->facts.weights_version ? kept->second.get() : nullptr;
}

Refusal Core::missing(uint32_t number, uint64_t version) {
  const auto found = layers_.find(number);
  if (found == layers_.end()) return not_held(number);
  std::string held = std::to_string(found->second->facts.weights_version);
  if (const auto kept = kept_.find(number); kept != kept_.end()) held += ", " + std::to_string(kept->second->facts.weights_version);
  return refusal<Text::version_not_held>(version, held);
}

// A request is computed by the generation that was held when it came.
void Core::retire(std::unique_ptr<Layer> layer) {
  retired_.push_back(std::move(layer));
  forget_retired();
}

void Core::forget_retired() {
  if (retired_.empty()) return;
  const auto used = [&](const std::unique_ptr<Layer>& layer) {
    return !layer->queues[0].empty() || !layer->queues[1].empty() ||
           std::any_of(batch_slots_.begin(), batch_slots_.end(), [&](const BatchSlot& l) { return l.layer == layer.get(); });
  };
  const auto unused = std::stable_partition(retired_.begin(), retired_.end(), used);
  retired_.erase(unused, retired_.end());
  list_serving();
}

void Core::list_serving() {
  serving_.clear();
  for (const auto& layer : retired_) serving_.push_back(layer.get());
  for (const auto& [number, layer] : kept_) serving_.push_back(layer.get());
  for (const auto& [number, layer] : layers_) serving_.push_back(layer.get());
}

template <class Which>
void Core::take_back(const Which& which) {
  for (Layer* layer : serving_)
    for (auto& queue : layer->queues) {
      const auto at = std::find_if(queue.begin(), queue.end(), which);
      if (at == queue.end()) continue;
      Item* item = *at;
      queue.erase(at);
      unqueue(item);
      busy_.leave(item->f.tokens);
      answers_.refuse(item, refusal<Text::cancelled>());
      return forget_retired();
    }
}

// ---- sessions in shared memory -----------------------------------------------------------------------------------------

void Core::remove_port(uint64_t handle) {
  for (auto& p : shm_connections_) {
    if (p->handle != handle || p->closing) continue;
    p->closing = true;
    p->end();
    epoll_ctl(epoll_, EPOLL_CTL_DEL, p->bell, nullptr);
    drop_waiting(p.get());
  }
  forget_closed();
}

void Core::drop_waiting(const ShmConnection* p) {
  for (Layer* layer : serving_)
    for (auto& queue : layer->queues) {
      const auto gone = std::stable_partition(queue.begin(), queue.end(), [&](const Item* i) { return i->connection != p; });
      for (auto it = gone; it != queue.end(); ++it) {
        unqueue(*it);
        busy_.leave((*it)->f.tokens);
        --(*it)->connection->in_flight;
        answers_.give_back(*it);
      }
      queue.erase(gone, queue.end());
    }
}

void Core::forget_closed() {
  const auto over = [&](const std::unique_ptr<ShmConnection>& p) {
    if (!p->closing || p->in_flight) return false;
    answers_.session_gone(p->handle);
    return true;
  };
  shm_connections_.erase(std::remove_if(shm_connections_.begin(), shm_connections_.end(), over), shm_connections_.end());
}

// A session's turn ends after kTurn submissions: one that writes on and on, what is refused or cancelled at once, does not
// keep the others waiting.
bool Core::poll_ports() {
  constexpr int kTurn = 64;
  bool any = false;
  shm::Submission s;
  for (auto& p : shm_connections_) {
    for (int i = 0; i < kTurn && !p->closing && p->take(&s); ++i) {
      accept(p.get(), s, false);
      any = true;
    }
    if (p->has_pool() && !p->closing && p->called(&s)) {
      accept(p.get(), s, true);
      any = true;
      called_ns_ = shm::now_ns();
    }
  }
  return any;
}

void Core::accept(ShmConnection* p, const shm::Submission& s, bool called) {
  if (s.kind == shm::kCancel) return take_back([&](const Item* i) { return i->connection == p && !i->called && i->id == s.id; });
  Item* item = answers_.new_item();
  item->connection = p;
  item->id = s.id;
  item->called = called;
  ++p->in_flight;
  Forward& f = item->f;
  f.arrival_ns = shm::now_ns();
  f.deadline_ns = s.deadline_ns + (called && s.deadline_ns ? f.arrival_ns : 0);
  f.layer = s.layer;
  f.tokens = s.tokens;
  f.top_k = s.top_k;
  f.caller = p->caller;
  f.hidden_dtype = s.hidden_dtype;
  f.ids_dtype = s.ids_dtype;
  f.weights_dtype = s.weights_dtype;
  f.out_dtype = s.out_dtype;
  f.router_weight_on_input = (s.flags & shm::kRouterWeightOnInput) != 0;
  f.on_device = (s.flags & shm::kOnDevice) != 0;
  if (config_.traces && !called) memcpy(f.trace, s.trace, sizeof f.trace);
  if (called && s.kind == 0) return answers_.refuse(item, refusal<Text::number_unprepared>());
  f.weights_version = s.weights_version;
  Layer* found = held(s.layer, s.weights_version);
  if (!found) return answers_.refuse(item, missing(s.layer, s.weights_version));
  const LayerFacts& layer = found->facts;
  item->weights_version = layer.weights_version;
  const RequestFacts facts = facts_of(s, layer.hidden_size);
  if (const Refusal bad = check_request(facts, layer, config_.max_tokens)) return answers_.refuse(item, bad);
  f.out_dtype = output_dtype(facts);
  if (!place(p, s, item, layer.hidden_size)) return;
  if (s.kind == shm::kEcho) return echo(item, layer);
  if (s.kind == shm::kPrepare) return prepare(p, s, item);
  if (f.tokens == 0) return answers_.answer(item, nullptr, 0, 0);
  if (draining_) return answers_.refuse(item, refusal<Text::draining>());
  const Verdict v = accounts_.enter(f, f.arrival_ns);
  if (v.reason) return answers_.refuse(item, refusal_of(v, f, f.arrival_ns));
  item->account = v.account;
  item->foreseen_ns = v.foreseen_ns;
  busy_.enter(f.tokens);
  busy_.admitted.fetch_add(1, std::memory_order_relaxed);
  found->queues[f.router_weight_on_input].push_back(item);
}

Refusal Core::check(const RequestFacts& r) {
  {
    const std::lock_guard<std::mutex> lock(held_mutex_);
    const auto found = held_.find(r.layer);
    if (found != held_.end()) return check_request(r, found->second, config_.max_tokens);
  }
  return not_held(r.layer);
}

Refusal Core::not_held(uint32_t layer) {
  std::string held;
  const std::lock_guard<std::mutex> lock(held_mutex_);
  for (auto at = held_.begin(); at != held_.end();) {
    const uint32_t first = at->first;
    uint32_t last = first;
    while (++at != held_.end() && at->first == last + 1) ++last;
    held += (held.empty() ? "" : ",") + std::to_string(first) + (last == first ? "" : "-" + std::to_string(last));
  }
  return refusal<Text::layer_not_held>(layer, held.empty() ? "none" : held);
}

// Fills the addresses.  False: it is refused.
bool Core::place(const ShmConnection* p, const shm::Submission& s, Item* item, uint32_t hidden_size) {
  Forward& f = item->f;
  const uint64_t M = f.tokens, H = hidden_size, k = f.top_k;
  const bool scaled = f.hidden_dtype == kE4m3;
  if (f.on_device && (!p->has_pool() || (s.kind != shm::kForward && s.kind != shm::kPrepare)))
    return answers_.refuse(item, refusal<Text::offsets_on_device>()), false;
  if (f.on_device && f.out_dtype == kE4m3) return answers_.refuse(item, refusal<Text::e4m3_on_device>()), false;
  f.hidden = p->at(s.hidden, M * H * size_of(f.hidden_dtype), f.on_device);
  f.ids = p->at(s.ids, M * k * size_of(f.ids_dtype), f.on_device);
  f.weights = p->at(s.weights, M * k * size_of(f.weights_dtype), f.on_device);
  f.out = p->at(s.out, tensor_bytes(f.out_dtype, M, H), f.on_device);
  f.scales = scaled ? p->at(s.scales, e4m3::scales_bytes(M, H), f.on_device) : 0;
  if (f.hidden && f.ids && f.weights && f.out && (!scaled || f.scales)) return true;
  return answers_.refuse(item, refusal<Text::offsets>()), false;
}

void Core::prepare(ShmConnection* p, const shm::Submission& s, Item* item) {
  if (p->prepare(s)) return answers_.answer(item, nullptr, 0, 0);
  answers_.refuse(item, refusal<Text::number_of_prepared>(s.number, shm::kMostPrepared));
}

void Core::echo(Item* item, const LayerFacts& layer) {
  const Forward& f = item->f;
  const uint64_t M = f.tokens, H = layer.hidden_size;
  const auto copy = [](uint64_t to, uint64_t from, uint64_t bytes) {
    memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  };
  if (f.out_dtype == f.hidden_dtype) {
    copy(f.out, f.hidden, M * H * size_of(f.out_dtype));
    if (f.scales) copy(f.out + e4m3::scales_at(M, H), f.scales, e4m3::scales_bytes(M, H));
  }
  answers_.answer(item, nullptr, 0, 0);
}

}  // namespace expertd
