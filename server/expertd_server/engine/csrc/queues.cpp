#include "queues.h"

#include <queue>
#include <tuple>
#include <unordered_map>

namespace expertd {
namespace {

// A batch that grows.
struct Size {
  uint64_t tokens = 0, top_k = 0, deadline_ns = ~uint64_t(0);  // the earliest

  Size with(const Forward& f) const {
    return {tokens + f.tokens, std::max<uint64_t>(top_k, f.top_k),
            f.deadline_ns ? std::min(deadline_ns, f.deadline_ns) : deadline_ns};
  }
  bool fits(const Bounds& b) const {
    return tokens <= b.max_tokens && (!b.top_k || tokens * top_k <= uint64_t(b.max_tokens) * b.top_k);
  }
  // Whether it is computed by `deadline_ns`.
  bool in_time(const Bounds& b, uint64_t deadline) const {
    if (!b.times || deadline == ~uint64_t(0)) return true;
    return double(b.now) + b.before_ns + Forecast::kSafety * b.times->expect(tokens, top_k) + b.after_ns <= double(deadline);
  }
  // Whether it is long, and `f`, with which it is `with`, takes about as long after it as in it.
  bool better_apart(const Bounds& b, const Forward& f, const Size& with) const {
    if (!b.apart || !tokens || !b.apart->saw_as_many(with.tokens, with.top_k)) return false;
    const double together = b.apart->expect(with.tokens, with.top_k);
    return together > kLongBatchNs &&
           together - b.apart->expect(tokens, top_k) > kSavesLittle * b.apart->expect(f.tokens, f.top_k);
  }
};

// Whether each of them, after those before it, is no better_apart().
bool together(const std::vector<Item*>& queue, const Bounds& bounds) {
  if (!bounds.apart) return true;
  Size size;
  for (const Item* item : queue) {
    const Size with = size.with(item->f);
    if (size.better_apart(bounds, item->f, with)) return false;
    size = with;
  }
  return true;
}

// Moves some of `queue` to `out`; the rest stays in order of arrival.
void turn_by_turn(std::vector<Item*>& queue, const Bounds& bounds, Accounts& accounts, Cut& out) {
  std::vector<Item*> sorted = queue;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Item* a, const Item* b) { return urgency(a->f) < urgency(b->f); });
  struct Caller {
    std::vector<Item*> items;
    size_t next = 0;
  };
  std::unordered_map<Account*, size_t> index;
  std::vector<Caller> callers;
  for (Item* item : sorted) {
    const auto [at, is_new] = index.try_emplace(item->account, callers.size());
    if (is_new) callers.emplace_back();
    callers[at->second].items.push_back(item);
  }
  using Turn = std::tuple<uint64_t, uint64_t, size_t>;  // share, urgency of its next, which; the least comes first
  std::priority_queue<Turn, std::vector<Turn>, std::greater<Turn>> turns;
  const auto add = [&](size_t which) {
    const Caller& c = callers[which];
    if (c.next == c.items.size()) return;
    const Item* item = c.items[c.next];
    turns.emplace(accounts.share(*item->account), urgency(item->f), which);
  };
  for (size_t which = 0; which < callers.size(); ++which) add(which);
  Size size;
  while (!turns.empty()) {
    const size_t which = std::get<2>(turns.top());
    Item* item = callers[which].items[callers[which].next];
    const Size with = size.with(item->f);
    const bool first = out.run.empty();
    if (!first && !(with.fits(bounds) && with.in_time(bounds, size.deadline_ns))) break;
    if (size.better_apart(bounds, item->f, with) && !accounts.tries_together()) break;
    turns.pop();
    ++callers[which].next;
    if (first || with.in_time(bounds, with.deadline_ns)) {
      size = with;
      out.run.push_back(item);
      item->taken = true;
      accounts.serve(item->account, routes_of(item->f), bounds.now);
    }
    add(which);
  }
  out.tokens = uint32_t(size.tokens);
  queue.erase(std::remove_if(queue.begin(), queue.end(), [](const Item* i) { return i->taken; }), queue.end());
}

}  // namespace

void cut(std::vector<Item*>& queue, const Bounds& bounds, Accounts& accounts, Cut& out) {
  out.run.clear();
  out.dropped.clear();
  out.tokens = 0;
  Size size;
  size_t kept = 0;
  for (Item* item : queue) {
    if (item->cancelled || expired(item->f, bounds.now) || doomed(item->f, bounds)) {
      out.dropped.push_back(item);
    } else {
      queue[kept++] = item;
      size = size.with(item->f);
    }
  }
  queue.resize(kept);
  if (queue.size() > 1 && !(size.fits(bounds) && size.in_time(bounds, size.deadline_ns) && together(queue, bounds)))
    return turn_by_turn(queue, bounds, accounts, out);
  out.run.swap(queue);
  out.tokens = uint32_t(size.tokens);
  for (const Item* item : out.run) accounts.serve(item->account, routes_of(item->f), bounds.now);
}

}  // namespace expertd
