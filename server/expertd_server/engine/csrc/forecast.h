// When an answer is to be expected, from what batches took: what admission and the cut go by where requests have
// deadlines.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <unordered_map>

namespace expertd {

// Measured time of a layer's batches, by powers of two of their rows and of the routes of a row.
class BatchTimes {
 public:
  void saw(uint64_t rows, uint64_t top_k, uint64_t ns) {
    Column& column = columns_[width(top_k)];
    const int i = log2_up(rows, kRows - 1);
    Cell& cell = column.cells[i];
    // An outlier counts in full only if the next batch is as long: one pause of the machine says nothing about batches.
    const double counted = cell.batches ? std::min(double(ns), std::max(kOutlier * cell.ns, cell.last_ns)) : double(ns);
    const double weight = std::max(kSmoothing, 1.0 / ++cell.batches);  // the first ones count alike
    cell.rows += weight * (double(rows) - cell.rows);
    cell.ns += weight * (counted - cell.ns);
    cell.last_ns = double(ns);
    column.known |= uint64_t(1) << i;
  }

  // Of a batch of so many rows, in ns; 0: nothing is known.
  double expect(uint64_t rows, uint64_t top_k) const {
    const int wanted = width(top_k);
    for (int away = 0; away < kWidths; ++away) {  // wider rows take as long at least, narrower ones in proportion
      const int wider = wanted + away, narrower = wanted - away;
      if (wider < kWidths && columns_[wider].known) return columns_[wider].expect(rows);
      if (narrower >= 0 && columns_[narrower].known) return columns_[narrower].expect(rows) * double(uint64_t(1) << away);
    }
    return 0;
  }

  // Whether batches of so many rows or more, of so many routes, have been seen: then expect() is no extrapolation.
  bool saw_as_many(uint64_t rows, uint64_t top_k) const {
    return columns_[width(top_k)].known >> log2_up(rows, kRows - 1) != 0;
  }

 private:
  static constexpr double kSmoothing = 0.2, kOutlier = 4;
  static constexpr int kRows = 33, kWidths = 10;

  struct Cell {
    double rows = 0, ns = 0;  // moving averages
    double last_ns = 0;
    uint32_t batches = 0;
  };
  struct Column {
    Cell cells[kRows];
    uint64_t known = 0;  // bits of cells

    // Between the two that are known around it; fewer rows than any take no longer, more in proportion.
    double expect(uint64_t rows) const {
      const double r = double(rows);
      const int i = log2_up(rows, kRows - 1);
      const bool here = known >> i & 1;
      uint64_t below = known & ((uint64_t(1) << i) - 1), above = known >> (i + 1) << (i + 1);
      if (here && cells[i].rows <= r)
        below |= uint64_t(1) << i;
      else if (here)
        above |= uint64_t(1) << i;
      if (!below) return cells[__builtin_ctzll(above)].ns;
      const Cell& low = cells[63 - __builtin_clzll(below)];
      if (!above) return low.ns * r / low.rows;
      const Cell& high = cells[__builtin_ctzll(above)];
      return low.ns + (high.ns - low.ns) * (r - low.rows) / (high.rows - low.rows);
    }
  };

  static int log2_up(uint64_t n, int most) { return n <= 1 ? 0 : std::min(most, 64 - __builtin_clzll(n - 1)); }
  static int width(uint64_t top_k) { return log2_up(top_k, kWidths - 1); }

  Column columns_[kWidths];
};

// How much longer than expected something takes: what was seen, and half as much after each five seconds.
class Slack {
 public:
  double at(uint64_t now) const {
    return now > at_ns_ ? ns_ * std::exp2(-double(now - at_ns_) / kHalfLifeNs) : ns_;
  }
  // Of the last two the less: one outlier does not count.
  double steady(uint64_t now) const { return std::min({at(now), last_ns_, before_ns_}); }
  void saw(uint64_t now, double ns) {
    const double before = at(now);
    ns_ = std::max(ns, before);
    at_ns_ = now;
    before_ns_ = last_ns_;
    last_ns_ = ns;
  }

 private:
  static constexpr double kHalfLifeNs = 5e9;
  double ns_ = 0, last_ns_ = 0, before_ns_ = 0;
  uint64_t at_ns_ = 0;
};

// What waits in the queues of a layer, and what its batches take.
struct LayerWork {
  BatchTimes times;
  uint64_t top_k = 0;  // of the model; 0 = not known
  uint64_t tokens[2] = {}, routes[2] = {};
  double cost_ns[2] = {};
};

// When an answer is expected.
struct Foreseen {
  double in_ns = 0;    // best guess, from now; 0: nothing is known
  double late_ns = 0;  // how long after its deadline it may come, allowing for what went wrong lately; <= 0: in time
  double less_ns = 0;  // by how much it can come sooner if it is asked for later: what runs and waits before it
};

// Not thread-safe.  Lines by their layer's number and whether router weights are on the input.
class Forecast {
 public:
  explicit Forecast(uint64_t max_tokens) : max_tokens_(max_tokens) {}

  // Factor on expected times where a request is admitted or joins a batch.
  static constexpr double kSafety = 1.25;

  LayerWork* layer(uint32_t number, uint64_t top_k) {
    LayerWork* w = &layers_[number];
    w->top_k = top_k;
    return w;
  }
  LayerWork* find(uint32_t number) {
    const auto found = layers_.find(number);
    return found == layers_.end() ? nullptr : &found->second;
  }

  void enter(uint32_t number, uint32_t queue, uint64_t tokens, uint64_t routes) { change(number, queue, tokens, routes, false); }
  void leave(uint32_t number, uint32_t queue, uint64_t tokens, uint64_t routes) { change(number, queue, tokens, routes, true); }

  // A batch starts.
  void begin(uint64_t now, const LayerWork& w, uint64_t rows, uint64_t top_k) {
    free_ns_ = (under_way_++ ? std::max(now, free_ns_) : now) + uint64_t(w.times.expect(rows, top_k));
  }
  // It took `ns` for itself.  behind_ns: how much later than foreseen the worst of
  // its requests was computed.
  void computed(uint64_t now, LayerWork* w, uint64_t rows, uint64_t top_k, uint64_t ns, double behind_ns) {
    w->times.saw(rows, top_k, ns);
    slack_.saw(now, behind_ns);
  }
  // A request was not computed because it would be late, although it was expected at foreseen_ns.
  void dropped(uint64_t now, const LayerWork& w, uint64_t tokens, uint64_t top_k, uint64_t foreseen_ns) {
    slack_.saw(now, double(now) - double(foreseen_ns) + w.times.expect(tokens, top_k));
  }
  // A batch is over, computed or not.
  void end(uint64_t now) {
    --under_way_;
    seen_ns_ = now;
  }
  // An answer took so long from there to its caller.
  void went_out(uint64_t now, double ns) { way_out_.saw(now, ns); }

  // Until what is under way is over.  What should be over already takes as long again.
  double running_ns(uint64_t now) const {
    if (!under_way_) return 0;
    return now <= free_ns_ ? double(free_ns_ - now) : double(now - free_ns_);
  }
  double waiting_ns() const { return std::max(0.0, backlog_ns_); }
  // waiting: of so many requests, all that there are, none is refused for one answer that took long.
  double way_out_ns(uint64_t now, uint64_t waiting) const { return idle(waiting) ? way_out_.steady(now) : way_out_.at(now); }
  // Whether nothing runs, and no more waits than this.
  bool idle(uint64_t waiting) const { return !under_way_ && waiting_ <= waiting; }
  // Whether times are not older than a second: else a request is computed whatever is expected, so that an estimate that
  // was wrong does not stay so because nothing is computed any more.
  bool fresh(uint64_t now) const { return under_way_ || (seen_ns_ && now - seen_ns_ < kFreshNs); }

  // Of a request with a deadline.  own_routes: of its caller that wait; callers: that have something waiting, with him.
  Foreseen foresee(uint64_t now, uint32_t number, uint32_t queue, uint64_t tokens, uint64_t top_k, uint64_t deadline_ns,
                   uint64_t own_routes, uint64_t callers, uint64_t all_routes) const {
    const auto found = layers_.find(number);
    if (found == layers_.end() || !tokens) return {};
    const LayerWork& w = found->second;
    const double alone = w.times.expect(tokens, top_k), out = way_out_ns(now, 0), left = double(deadline_ns - now);
    if (alone == 0) return {};
    if (idle(0)) return {alone, fresh(now) ? alone + out - left : 0, 0};
    const uint64_t routes = tokens * top_k;
    const double running = running_ns(now);
    const double more = std::max(0.0, cost(w, w.tokens[queue] + tokens, w.routes[queue] + routes) - w.cost_ns[queue]);
    // In turns: before a caller's last request others had no more than he, and nobody had more than there is.
    const double part = std::min(1.0, double(callers) * double(own_routes + routes) / double(all_routes + routes));
    const double ahead = waiting_ns() * part;
    const double slack = std::min(slack_.at(now), left / 2);
    const double careful = kSafety * running + std::max(kSafety * ahead + more, alone) + out + slack;
    return {running + std::max(ahead + more, alone), careful - left, running + ahead};
  }

 private:
  static constexpr uint64_t kFreshNs = 1000000000;

  // Of the batches that so much makes.
  double cost(const LayerWork& w, uint64_t tokens, uint64_t routes) const {
    if (!tokens) return 0;
    const uint64_t top_k = (routes + tokens - 1) / tokens;
    uint64_t most = max_tokens_;
    if (w.top_k && top_k > w.top_k) most = std::max<uint64_t>(1, max_tokens_ * w.top_k / top_k);
    const uint64_t rest = tokens % most;
    return double(tokens / most) * w.times.expect(most, top_k) + (rest ? w.times.expect(rest, top_k) : 0);
  }

  void change(uint32_t number, uint32_t queue, uint64_t tokens, uint64_t routes, bool less) {
    waiting_ += less ? -1 : 1;
    LayerWork* w = find(number);
    if (!w) return;
    w->tokens[queue] = less ? w->tokens[queue] - std::min(tokens, w->tokens[queue]) : w->tokens[queue] + tokens;
    w->routes[queue] = less ? w->routes[queue] - std::min(routes, w->routes[queue]) : w->routes[queue] + routes;
    const double now = cost(*w, w->tokens[queue], w->routes[queue]);
    backlog_ns_ += now - w->cost_ns[queue];
    w->cost_ns[queue] = now;
    if (!waiting_) backlog_ns_ = 0;  // and nothing that rounding left of it
  }

  const uint64_t max_tokens_;
  std::unordered_map<uint32_t, LayerWork> layers_;  // nodes stay where they are; none is ever taken out
  double backlog_ns_ = 0;
  uint64_t free_ns_ = 0, seen_ns_ = 0, waiting_ = 0;
  uint32_t under_way_ = 0;
  Slack slack_, way_out_;
};

}  // namespace expertd
