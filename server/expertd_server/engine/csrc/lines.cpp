#include "lines.h"

#include <algorithm>

namespace expertd {

void Shares::serve(uint32_t caller, uint64_t tokens) {
  if (served_.size() > 4096)  // callers that are gone
    for (auto it = served_.begin(); it != served_.end();) it = it->second <= floor_ ? served_.erase(it) : std::next(it);
  served_[caller] = of(caller) + tokens;
}

void Shares::raise_floor(uint64_t floor) { floor_ = std::max(floor_, floor); }

void cut(std::vector<Item*>& line, uint64_t now, uint32_t max_tokens, Shares& shares, Cut& out) {
  out.run.clear();
  out.dropped.clear();
  out.tokens = 0;
  uint64_t tokens = 0;
  size_t kept = 0;
  for (Item* item : line) {
    if (item->cancelled || expired(item->f, now)) {
      out.dropped.push_back(item);
    } else {
      line[kept++] = item;
      tokens += item->f.tokens;
    }
  }
  line.resize(kept);
  if (line.empty()) return;
  uint64_t least = ~uint64_t(0);
  for (const Item* item : line) least = std::min(least, shares.of(item->f.caller));
  shares.raise_floor(least);
  if (tokens <= max_tokens || line.size() == 1) {
    out.run.swap(line);
    out.tokens = uint32_t(tokens);
    for (const Item* item : out.run) shares.serve(item->f.caller, item->f.tokens);
    return;
  }
  std::stable_sort(line.begin(), line.end(), [](const Item* a, const Item* b) { return urgency(a->f) < urgency(b->f); });
  while (!line.empty()) {
    // The most urgent request of the caller served least; line is short where it matters, and sorted.
    auto next = std::min_element(line.begin(), line.end(), [&](const Item* a, const Item* b) {
      return shares.of(a->f.caller) < shares.of(b->f.caller);
    });
    Item* item = *next;
    if (!out.run.empty() && uint64_t(out.tokens) + item->f.tokens > max_tokens) break;
    line.erase(next);
    out.run.push_back(item);
    out.tokens += item->f.tokens;
    shares.serve(item->f.caller, item->f.tokens);
  }
}

}  // namespace expertd
