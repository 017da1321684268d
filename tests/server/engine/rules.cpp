// The rules of the core's queue (accounts.h, forecast.h, queues.h) on a clock of the caller's: who comes in, what is cut,
// what is expected.  rules_kit.py compiles it and calls it.
#include <memory>
#include <unordered_map>

#include "queues.cpp"

using namespace expertd;

namespace {

struct RulesLayer {
  uint32_t number = 0, top_k = 0;
  LayerWork* work = nullptr;
  std::vector<Item*> queues[2];
};

struct Rules {
  explicit Rules(const Config& c) : config(c), accounts(config) {}
  const Config config;
  Accounts accounts;
  Patience patience;
  std::unordered_map<uint32_t, std::unique_ptr<RulesLayer>> layers;
  std::vector<RulesLayer*> serving;
  std::unordered_map<uint64_t, std::unique_ptr<Item>> items;
  Cut cut;
};

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API Rules* expertd_rules(uint32_t max_tokens, uint32_t requests, uint64_t tokens, uint64_t routes, uint64_t bytes, int refuse_late) {
  Config c{};
  c.max_tokens = max_tokens;
  c.max_queue_requests = requests;
  c.max_queue_tokens = tokens;
  c.max_queue_routes = routes;
  c.max_queue_bytes = bytes;
  c.refuse_late = uint8_t(refuse_late);
  return new Rules(c);
}
API void expertd_rules_free(Rules* r) { delete r; }

API void expertd_rules_layer(Rules* r, uint32_t number, uint32_t top_k) {
  auto& at = r->layers[number];
  at = std::make_unique<RulesLayer>();
  at->number = number;
  at->top_k = top_k;
  at->work = r->accounts.forecast([&](Forecast& f) { return f.layer(number, top_k); });
  r->serving.push_back(at.get());
}
API void expertd_rules_saw(Rules* r, uint32_t layer, uint64_t rows, uint64_t top_k, uint64_t ns) {
  r->layers.at(layer)->work->times.saw(rows, top_k, ns);
}
API double expertd_rules_expect(Rules* r, uint32_t layer, uint64_t rows, uint64_t top_k) {
  return r->layers.at(layer)->work->times.expect(rows, top_k);
}

// The reason of a refusal, or 0; late_ns: how late it would be.
API uint32_t expertd_rules_come(Rules* r, uint64_t now, uint64_t tag, const Forward* f, uint64_t* late_ns) {
  const Verdict v = r->accounts.enter(*f, now);
  *late_ns = v.late_ns;
  if (v.reason) return v.reason;
  auto item = std::make_unique<Item>();
  item->f = *f;
  item->handle = tag;
  item->account = v.account;
  item->foreseen_ns = v.foreseen_ns;
  r->layers.at(f->layer)->queues[f->router_weight_on_input].push_back(item.get());
  r->items[tag] = std::move(item);
  return 0;
}
API void expertd_rules_cancel(Rules* r, uint64_t tag) { r->items.at(tag)->cancelled = true; }

// Tags of the next batch, and behind them of what is dropped; counts: how many of each.  Its layer, or -1.
API int64_t expertd_rules_cut(Rules* r, uint64_t now, uint64_t* tags, uint32_t* counts) {
  uint32_t flag = 0;
  RulesLayer* layer = most_urgent(r->serving, r->accounts, &flag);
  if (!layer) return -1;
  cut(layer->queues[flag], bounds_of(r->config, r->accounts, *layer->work, layer->top_k, now), r->accounts, r->cut);
  for (Item* item : r->cut.dropped)
    if (item->foreseen_ns && !item->cancelled)
      r->accounts.forecast([&](Forecast& f) { f.dropped(now, *layer->work, item->f.tokens, item->f.top_k, item->foreseen_ns); });
  counts[0] = uint32_t(r->cut.run.size());
  counts[1] = uint32_t(r->cut.dropped.size());
  uint32_t top_k = 0;
  for (const auto* some : {&r->cut.run, &r->cut.dropped})
    for (Item* item : *some) {
      *tags++ = item->handle;
      if (some == &r->cut.run) top_k = std::max(top_k, item->f.top_k);
      r->accounts.leave(item->account, item->f);
    }
  if (!r->cut.run.empty()) r->accounts.forecast([&](Forecast& f) { f.begin(now, *layer->work, r->cut.tokens, top_k); });
  return layer->number;
}

// A batch is over.
API void expertd_rules_ended(Rules* r, uint64_t now, uint32_t layer, uint64_t rows, uint64_t top_k, uint64_t routes, uint64_t ns,
                             double behind_ns) {
  r->accounts.forecast([&](Forecast& f) {
    f.computed(now, r->layers.at(layer)->work, rows, top_k, ns, behind_ns);
    f.end(now);
  });
  r->accounts.saw(routes, ns);
}
API uint64_t expertd_rules_foreseen(Rules* r, uint64_t tag) { return r->items.at(tag)->foreseen_ns; }
API uint64_t expertd_rules_urgency(const Forward* f) { return urgency(*f); }

// Until when a batch waits for the clients of the last one.
API void expertd_rules_batch_ended(Rules* r, uint64_t now, uint64_t service_ns, uint64_t requests) {
  r->patience.batch_ended(now, service_ns, requests);
}
API uint64_t expertd_rules_until(Rules* r, float part, uint64_t waiting) { return r->patience.until(part, waiting); }
API void expertd_rules_waited(Rules* r, uint64_t came) { r->patience.waited(came); }

// ---- the forecast by itself

API void expertd_forecast_enter(Rules* r, uint32_t layer, uint32_t queue, uint64_t tokens, uint64_t routes) {
  r->accounts.forecast([&](Forecast& f) { f.enter(layer, queue, tokens, routes); });
}
API void expertd_forecast_leave(Rules* r, uint32_t layer, uint32_t queue, uint64_t tokens, uint64_t routes) {
  r->accounts.forecast([&](Forecast& f) { f.leave(layer, queue, tokens, routes); });
}
API void expertd_forecast_begin(Rules* r, uint64_t now, uint32_t layer, uint64_t rows, uint64_t top_k) {
  r->accounts.forecast([&](Forecast& f) { f.begin(now, *f.find(layer), rows, top_k); });
}
API void expertd_forecast_end(Rules* r, uint64_t now) {
  r->accounts.forecast([&](Forecast& f) { f.end(now); });
}
API void expertd_forecast_computed(Rules* r, uint64_t now, uint32_t layer, uint64_t rows, uint64_t top_k, uint64_t ns,
                                   double behind_ns) {
  r->accounts.forecast([&](Forecast& f) { f.computed(now, f.find(layer), rows, top_k, ns, behind_ns); });
}
API void expertd_forecast_dropped(Rules* r, uint64_t now, uint32_t layer, uint64_t tokens, uint64_t top_k, uint64_t foreseen_ns) {
  r->accounts.forecast([&](Forecast& f) { f.dropped(now, *f.find(layer), tokens, top_k, foreseen_ns); });
}
API void expertd_forecast_went_out(Rules* r, uint64_t now, double ns) {
  r->accounts.forecast([&](Forecast& f) { f.went_out(now, ns); });
}
API double expertd_forecast_running(Rules* r, uint64_t now) {
  return r->accounts.forecast([&](const Forecast& f) { return f.running_ns(now); });
}
API double expertd_forecast_waiting(Rules* r) {
  return r->accounts.forecast([](const Forecast& f) { return f.waiting_ns(); });
}
// out: when it is expected, from now, how late it may be, and how much of that what runs and waits makes.
API void expertd_forecast_foresee(Rules* r, uint64_t now, uint32_t layer, uint32_t queue, uint64_t tokens, uint64_t top_k,
                                  uint64_t deadline_ns, uint64_t own_routes, uint64_t callers, uint64_t all_routes, double* out) {
  const Foreseen seen = r->accounts.forecast([&](const Forecast& f) {
    return f.foresee(now, layer, queue, tokens, top_k, deadline_ns, own_routes, callers, all_routes);
  });
  out[0] = seen.in_ns;
  out[1] = seen.late_ns;
  out[2] = seen.less_ns;
}
