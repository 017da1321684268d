// Who waits for what, and how much each was served: what admission and fairness go by.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "core.h"
#include "forecast.h"

namespace expertd {

inline uint64_t routes_of(const Forward& f) { return uint64_t(f.tokens) * f.top_k; }

// A caller.  Kept while it has something waiting, and for a while after.
struct Account {
  Waiting waiting{};    // under the lock of Accounts
  uint64_t served = 0;  // routes; the core's thread alone
};

// The limit of a caller that a request goes beyond: what waits of all callers and of its own, and what it brings.
struct Shortage {
  const char* unit = nullptr;  // null = there is none
  uint64_t all = 0, own = 0, more = 0, most = 0;
};

// What was said to a request that came.  account: what it is counted for until leave(), where reason is kComputed.
struct Verdict {
  uint32_t reason = kComputed;  // or kDeadlineExceeded, kQueueFull, kOverloaded
  Account* account = nullptr;
  uint64_t foreseen_ns = 0;  // when it is expected to be computed; 0 = not known
  uint64_t late_ns = 0;      // of kOverloaded: how long after its deadline its answer may come
  uint64_t retry_ns = 0;     // and after how long it would be in time; 0 = waiting does not help
  Shortage shortage;         // of kQueueFull
};

class Accounts {
 public:
  explicit Accounts(const Config& c) : config_(c), forecast_(c.max_tokens) {}

  // Whether `f` may come in now, and if so, and unless it is only asked, that it has.
  Verdict enter(const Forward& f, uint64_t now, bool asked = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Verdict v;
    if (f.deadline_ns && now >= f.deadline_ns) return v.reason = kDeadlineExceeded, v;
    const Waiting more{1, f.tokens, routes_of(f), f.bytes};
    const auto found = of_.find(f.caller);
    const Waiting own = found == of_.end() ? Waiting{} : found->second.waiting;
    if (all_.requests) v.shortage = shortage(own, more);
    if (v.shortage.unit) return v.reason = kQueueFull, v;
    if (config_.refuse_late && f.deadline_ns) {
      const Foreseen seen = forecast_.foresee(now, f.layer, line_of(f), f.tokens, f.top_k, f.deadline_ns, own.routes,
                                              callers_ + !own.requests, all_.routes);
      if (seen.late_ns > 0) {
        v.reason = kOverloaded;
        v.late_ns = uint64_t(seen.late_ns);
        v.retry_ns = uint64_t(std::min(seen.late_ns, seen.less_ns));
        return v;
      }
      if (seen.in_ns > 0) v.foreseen_ns = now + uint64_t(seen.in_ns);
    }
    if (asked) return v;
    v.account = found == of_.end() ? &of_[f.caller] : &found->second;
    callers_ += !own.requests;
    add(&v.account->waiting, more);
    add(&all_, more);
    forecast_.enter(f.layer, line_of(f), f.tokens, more.routes);
    return v;
  }

  void leave(Account* account, const Forward& f) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Waiting less{1, f.tokens, routes_of(f), f.bytes};
    take(&account->waiting, less);
    take(&all_, less);
    callers_ -= !account->waiting.requests;
    forecast_.leave(f.layer, line_of(f), f.tokens, less.routes);
  }

  // Calls look(Forecast&) while nobody else looks.
  template <class Look>
  auto forecast(const Look& look) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return look(forecast_);
  }

  Waiting all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return all_;
  }

  Waiting of(uint32_t caller) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = of_.find(caller);
    return found == of_.end() ? Waiting{} : found->second.waiting;
  }

  // ---- the core's thread: shares.  A caller who comes, or comes back, starts where the least served of those that wait
  // is: nobody can save up.

  uint64_t share(const Account& a) const { return std::max(a.served, floor_); }

  // How long ago a caller would have to have come to be as urgent as one who was served least: the time that his larger
  // share took.
  uint64_t lag_ns(const Account& a) const { return uint64_t(double(share(a) - floor_) * route_ns_); }

  // Before a cut: the least share of those who wait.
  void settle(uint64_t least) { floor_ = std::max(floor_, least); }

  void serve(Account* a, uint64_t routes, uint64_t now) {
    a->served = share(*a) + routes;
    if (last_ != a) several_ns_ = last_ ? now : 0;
    last_ = a;
  }

  // Whether more than one caller was served within the last second.
  bool shared(uint64_t now) const {
    constexpr uint64_t kLatelyNs = 1000000000;
    return several_ns_ && now - several_ns_ < kLatelyNs;
  }

  // Once in many times what is better apart is computed together: else it would not be seen when that has changed.
  bool tries_together() {
    constexpr uint32_t kSeldom = 1024;
    return ++apart_ % kSeldom == 0;
  }

  // What a batch took.
  void saw(uint64_t routes, uint64_t ns) {
    constexpr double kSmoothing = 0.2;
    const double each = double(ns) / double(routes ? routes : 1);
    route_ns_ = route_ns_ == 0 ? each : route_ns_ + kSmoothing * (each - route_ns_);
  }

  // Forgets callers that are gone.
  void tidy() {
    const std::lock_guard<std::mutex> lock(mutex_);
    constexpr size_t kRemembered = 4096;
    if (of_.size() <= kRemembered) return;
    for (const bool all : {false, true}) {
      for (auto it = of_.begin(); it != of_.end();)
        it = !it->second.waiting.requests && (all || it->second.served <= floor_) ? of_.erase(it) : std::next(it);
      if (of_.size() <= kRemembered) return;
    }
  }

 private:
  // A caller alone may have `limit`; n callers who all want as much as they can get have 4/(3n + 1) of it each, and at
  // most 4/3 together.  So whoever fills the queue leaves room for the next one who comes.
  static bool fits(uint64_t own, uint64_t all, uint64_t more, uint64_t limit) {
    return own + more + 3 * (all + more) <= 4 * limit;
  }

  static uint32_t line_of(const Forward& f) { return f.router_weight_on_input ? 1 : 0; }

  Shortage shortage(const Waiting& own, const Waiting& more) const {
    const Config& c = config_;
    const Shortage limits[] = {{"requests", all_.requests, own.requests, more.requests, c.max_queue_requests},
                               {"tokens", all_.tokens, own.tokens, more.tokens, c.max_queue_tokens},
                               {"routes", all_.routes, own.routes, more.routes, c.max_queue_routes},
                               {"bytes", all_.bytes, own.bytes, more.bytes, c.max_queue_bytes}};
    for (const Shortage& s : limits)
      if (!fits(s.own, s.all, s.more, s.most)) return s;
    return {};
  }

  static void add(Waiting* to, const Waiting& n) {
    to->requests += n.requests;
    to->tokens += n.tokens;
    to->routes += n.routes;
    to->bytes += n.bytes;
  }
  static void take(Waiting* from, const Waiting& n) {
    from->requests -= n.requests;
    from->tokens -= n.tokens;
    from->routes -= n.routes;
    from->bytes -= n.bytes;
  }

  mutable std::mutex mutex_;
  const Config& config_;
  Forecast forecast_;
  std::unordered_map<uint32_t, Account> of_;  // nodes stay where they are
  Waiting all_{};
  uint64_t callers_ = 0;  // that have something waiting
  uint64_t floor_ = 0;
  double route_ns_ = 0;
  const Account* last_ = nullptr;  // who was served last: never looked into
  uint64_t several_ns_ = 0;        // when somebody else than before was; 0 = never
  uint32_t apart_ = 0;
};

}  // namespace expertd
