// What comes into the core: inline requests, commands, and submissions in shared memory with their checks.
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "core_class.h"
#include "peers.h"

namespace expertd {

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
  uint32_t why = 0;
  Layer* layer = held(item->f.layer, item->f.weights_version, &why);
  const Forward f = item->f;  // the item is gone where it is answered
  Account* account = item->account;
  if (!layer) {
    refuse_layer(item, why);
  } else if (!item->work || fits(item, layer->facts, item->work->hidden_size)) {  // Python has checked its own
    item->weights_version = layer->facts.weights_version;
    if (f.tokens) return layer->lines[f.router_weight_on_input ? 1 : 0].push_back(item);
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
      watch(c.port->bell);
      ports_.push_back(std::move(c.port));
      return;
    case Command::kRemovePort:
      return remove_port(c.handle);
    case Command::kCancel:
      return take_back([&](const Item* i) { return !i->port && i->handle == c.handle; });
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

// The layer that computes a request for it; version 0 = whichever is served.  Null: none does, for the reason *why.
Layer* Core::held(uint32_t number, uint64_t version, uint32_t* why) const {
  const auto found = layers_.find(number);
  *why = found == layers_.end() ? kLayerNotHeld : kVersionNotHeld;
  if (found == layers_.end()) return nullptr;
  if (!version || version == found->second->facts.weights_version) return found->second.get();
  const auto kept = kept_.find(number);
  return kept != kept_.end() && version == kept->second->facts.weights_version ? kept->second.get() : nullptr;
}

void Core::refuse_layer(Item* item, uint32_t why) {
  const Forward& f = item->f;
  if (why == kLayerNotHeld)
    return answers_.refuse(item, why, 0, "layer: got %u, want one of those held here; Describe lists them", f.layer);
  answers_.refuse(item, why, 0,
                  "weights_version: got %llu, want one that is held here (Describe lists them), or none; ask another replica",
                  static_cast<unsigned long long>(f.weights_version));
}

// A request is computed by the generation that was held when it came.
void Core::retire(std::unique_ptr<Layer> layer) {
  retired_.push_back(std::move(layer));
  forget_retired();
}

void Core::forget_retired() {
  if (retired_.empty()) return;
  const auto used = [&](const std::unique_ptr<Layer>& layer) {
    return !layer->lines[0].empty() || !layer->lines[1].empty() ||
           std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& l) { return l.layer == layer.get(); });
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
    for (auto& line : layer->lines) {
      const auto at = std::find_if(line.begin(), line.end(), which);
      if (at == line.end()) continue;
      Item* item = *at;
      line.erase(at);
      unqueue(item);
      busy_.leave(item->f.tokens);
      answers_.refuse(item, kCancelled, 0, "request: cancelled by its caller");
      return forget_retired();
    }
}

// ---- sessions in shared memory -----------------------------------------------------------------------------------------

void Core::remove_port(uint64_t handle) {
  for (auto& p : ports_) {
    if (p->handle != handle || p->closing) continue;
    p->closing = true;
    p->end();
    epoll_ctl(epoll_, EPOLL_CTL_DEL, p->bell, nullptr);
    drop_waiting(p.get());
  }
  forget_closed();
}

void Core::drop_waiting(const Port* p) {
  for (Layer* layer : serving_)
    for (auto& line : layer->lines) {
      const auto gone = std::stable_partition(line.begin(), line.end(), [&](const Item* i) { return i->port != p; });
      for (auto it = gone; it != line.end(); ++it) {
        unqueue(*it);
        busy_.leave((*it)->f.tokens);
        --(*it)->port->in_flight;
        answers_.give_back(*it);
      }
      line.erase(gone, line.end());
    }
}

void Core::forget_closed() {
  const auto over = [&](const std::unique_ptr<Port>& p) {
    if (!p->closing || p->in_flight) return false;
    answers_.session_gone(p->handle);
    return true;
  };
  ports_.erase(std::remove_if(ports_.begin(), ports_.end(), over), ports_.end());
}

// A session's turn ends after kTurn submissions: one that writes on and on, what is refused or cancelled at once, does not
// keep the others waiting.
bool Core::poll_ports() {
  constexpr int kTurn = 64;
  bool any = false;
  shm::Submission s;
  for (auto& p : ports_) {
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

void Core::accept(Port* p, const shm::Submission& s, bool called) {
  if (s.kind == shm::kCancel) return take_back([&](const Item* i) { return i->port == p && !i->called && i->id == s.id; });
  Item* item = answers_.new_item();
  item->port = p;
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
  if (called && s.kind == 0) return answers_.refuse(item, kMalformed, 0, "call: got a number under which nothing was prepared");
  f.weights_version = s.weights_version;
  uint32_t why = 0;
  Layer* found = held(s.layer, s.weights_version, &why);
  if (!found) return refuse_layer(item, why);
  const LayerFacts& layer = found->facts;
  item->weights_version = layer.weights_version;
  if (!check(p, s, item, layer)) return;
  if (s.kind == shm::kEcho) return echo(item, layer);
  if (s.kind == shm::kPrepare) return prepare(p, s, item);
  if (f.tokens == 0) return answers_.answer(item, nullptr, 0, 0);
  if (draining_) return answers_.refuse(item, kDraining, 0, "server: it drains and takes no new requests; ask another replica");
  const Verdict v = accounts_.enter(f, f.arrival_ns);
  if (v.reason) return turn_away(item, v);
  item->account = v.account;
  item->foreseen_ns = v.foreseen_ns;
  busy_.enter(f.tokens);
  busy_.admitted.fetch_add(1, std::memory_order_relaxed);
  found->lines[f.router_weight_on_input].push_back(item);
}

// With the words of admission.py.
void Core::turn_away(Item* item, const Verdict& v) {
  const Forward& f = item->f;
  using llu = unsigned long long;
  if (v.reason == kDeadlineExceeded)
    return answers_.refuse(item, v.reason, 0, "request: its deadline had passed when it came; want time left to compute it");
  if (v.reason == kOverloaded) {
    const double left_ms = double(f.deadline_ns - f.arrival_ns) * 1e-6;
    return answers_.refuse(item, v.reason, advice_us(v),
                           "request: got %.1f ms left of its time, want %.1f, with what runs and waits before it;"
                           " try again after retry_after_us, or another replica",
                           left_ms, left_ms + double(v.late_ns) * 1e-6);
  }
  const Waiting all = accounts_.all(), own = accounts_.of(f.caller);
  answers_.refuse(item, v.reason, advice_us(v),
                  "queue: got %llu requests of %llu tokens waiting, %llu of %llu this caller's, and one of %u more;"
                  " try again after retry_after_us, or another replica",
                  llu(all.requests), llu(all.tokens), llu(own.requests), llu(own.tokens), f.tokens);
}

// Everything is bounded before it is paid for.  hidden_size: what the caller takes H for, 0 = not told.  False: refused.
bool Core::fits(Item* item, const LayerFacts& layer, uint32_t hidden_size) {
  const Forward& f = item->f;
  const uint64_t M = f.tokens, H = layer.hidden_size, k = f.top_k;
  if (M > config_.max_tokens) {
    answers_.refuse(item, kTooManyTokens, 0, "hidden_states: got %u tokens, want at most %u; split the batch", f.tokens, config_.max_tokens);
    return false;
  }
  if (layer.top_k && M * k > uint64_t(config_.max_tokens) * layer.top_k) {
    answers_.refuse(item, kTooManyTokens, 0, "topk_ids: got %u tokens x %u routes, want at most %u x %u; split the batch",
                    f.tokens, f.top_k, config_.max_tokens, layer.top_k);
    return false;
  }
  if (hidden_size && hidden_size != H) {
    answers_.refuse(item, kBadShape, 0, "hidden_states: got rows of %u, want %u", hidden_size, layer.hidden_size);
    return false;
  }
  if (k < 1 || k > layer.num_experts) {
    answers_.refuse(item, kBadShape, 0, "topk_ids: got top_k %u, want 1 to %u", f.top_k, layer.num_experts);
    return false;
  }
  const bool good_output = is_float(f.out_dtype) || (f.out_dtype == kE4m3 && !f.on_device);
  if (!(is_float(f.hidden_dtype) || f.hidden_dtype == kE4m3) || !is_float(f.weights_dtype) || !good_output ||
      (f.ids_dtype != kI32 && f.ids_dtype != kI64)) {
    answers_.refuse(item, kBadDtype, 0,
                    "dtypes of hidden_states, topk_ids, topk_weights, output: got %u, %u, %u, %u, want a float, an integer and two"
                    " floats, of which E4M3 may be the first, and the last where it is on the host",
                    f.hidden_dtype, f.ids_dtype, f.weights_dtype, f.out_dtype);
    return false;
  }
  if (f.router_weight_on_input && (k != 1 || !layer.input_weights)) {
    answers_.refuse(item, kUnsupportedCombination, 0, "router_weight_on_input: got top_k %u, want 1 and a backend that takes it", f.top_k);
    return false;
  }
  return true;
}

// And fills the addresses.
bool Core::check(const Port* p, const shm::Submission& s, Item* item, const LayerFacts& layer) {
  Forward& f = item->f;
  const uint64_t M = f.tokens, H = layer.hidden_size, k = f.top_k;
  const bool scaled = f.hidden_dtype == kE4m3;
  if (!fits(item, layer, s.hidden_size)) return false;
  if (f.on_device && (!p->has_pool() || (s.kind != shm::kForward && s.kind != shm::kPrepare))) {
    answers_.refuse(item, kMalformed, 0, "tensors: got offsets on a device, want a session with memory there, and a forward");
    return false;
  }
  f.hidden = p->at(s.hidden, M * H * size_of(f.hidden_dtype), f.on_device);
  f.ids = p->at(s.ids, M * k * size_of(f.ids_dtype), f.on_device);
  f.weights = p->at(s.weights, M * k * size_of(f.weights_dtype), f.on_device);
  f.out = p->at(s.out, tensor_bytes(f.out_dtype, M, H), f.on_device);
  f.scales = scaled ? p->at(s.scales, e4m3::scales_bytes(M, H), f.on_device) : 0;
  if (!f.hidden || !f.ids || !f.weights || !f.out || (scaled && !f.scales)) {
    answers_.refuse(item, kMalformed, 0, "tensors: got offsets outside of the session's memory, or no multiples of 16");
    return false;
  }
  return true;
}

void Core::prepare(Port* p, const shm::Submission& s, Item* item) {
  if (p->prepare(s)) return answers_.answer(item, nullptr, 0, 0);
  answers_.refuse(item, kMalformed, 0, "number of a prepared request: got %u, want 1 to %u", s.number, shm::kMostPrepared);
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
