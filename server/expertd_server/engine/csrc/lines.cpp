#include "lines.h"

#include <queue>
#include <tuple>
#include <unordered_map>

namespace expertd {
namespace {

struct Size {
  uint64_t tokens = 0, top_k = 0;

  Size with(const Forward& f) const { return {tokens + f.tokens, std::max<uint64_t>(top_k, f.top_k)}; }
  bool fits(uint64_t max_tokens, uint64_t usual_top_k) const {
    return tokens <= max_tokens && (!usual_top_k || tokens * top_k <= max_tokens * usual_top_k);
  }
};

// Moves some of `line` to `out`; the rest stays in order of arrival.
void turn_by_turn(std::vector<Item*>& line, uint32_t max_tokens, uint32_t top_k, Accounts& accounts, Cut& out) {
  std::vector<Item*> sorted = line;
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
    if (!out.run.empty() && !with.fits(max_tokens, top_k)) break;
    turns.pop();
    size = with;
    out.run.push_back(item);
    item->taken = true;
    accounts.serve(item->account, routes_of(item->f));
    ++callers[which].next;
    add(which);
  }
  out.tokens = uint32_t(size.tokens);
  line.erase(std::remove_if(line.begin(), line.end(), [](const Item* i) { return i->taken; }), line.end());
}

}  // namespace

void cut(std::vector<Item*>& line, uint64_t now, uint32_t max_tokens, uint32_t top_k, Accounts& accounts, Cut& out) {
  out.run.clear();
  out.dropped.clear();
  out.tokens = 0;
  Size size;
  size_t kept = 0;
  for (Item* item : line) {
    if (item->cancelled || expired(item->f, now)) {
      out.dropped.push_back(item);
    } else {
      line[kept++] = item;
      size = size.with(item->f);
    }
  }
  line.resize(kept);
  if (line.size() > 1 && !size.fits(max_tokens, top_k)) return turn_by_turn(line, max_tokens, top_k, accounts, out);
  out.run.swap(line);
  out.tokens = uint32_t(size.tokens);
  for (const Item* item : out.run) accounts.serve(item->account, routes_of(item->f));
}

}  // namespace expertd
