// One batch -> one part for each server: the twin of split.py, which says what it does and gives the same parts.
#include "split.h"

#include <cstring>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace expertd::cluster {
namespace {

int64_t owner_of(const Owners& owners, int64_t id) {
  const int64_t group = id < 0 || id >= owners.experts ? -1 : owners.group_of[id];
  return group < 0 ? -1 : owners.owner_of_group[group];
}

// visit(owner, first): of each route that somebody computes; first: of its token to that server.
template <typename Id, typename Visit>
void each(const Batch& batch, const Owners& owners, Visit visit) {
  static thread_local std::vector<int64_t> seen;  // by owner: the last token that went there, + 1
  seen.assign(size_t(owners.count), 0);
  const Id* ids = static_cast<const Id*>(batch.ids);
  for (int64_t token = 0; token < batch.tokens; ++token, ids += batch.top_k)
    for (int64_t k = 0; k < batch.top_k; ++k) {
      const int64_t owner = owner_of(owners, ids[k]);
      if (owner < 0) continue;
      visit(owner, token, seen[size_t(owner)] <= token);
      seen[size_t(owner)] = token + 1;
    }
}

template <typename Id>
bool odd(const Batch& batch, const Owners& owners) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  bool found = false;
  for (int64_t i = 0; i < batch.tokens * batch.top_k; ++i)
    found |= ids[i] < -1 || ids[i] >= owners.experts || (ids[i] >= 0 && owners.group_of[ids[i]] < 0);
  return found;
}

template <typename Id>
int64_t count(const Batch& batch, const Owners& owners, int64_t* tokens, int64_t* routes, int64_t* begins,
              int64_t* rows) {
  if (odd<Id>(batch, owners)) return -1;
  for (int64_t n = 0; n < owners.count; ++n) tokens[n] = routes[n] = 0;
  each<Id>(batch, owners, [&](int64_t owner, int64_t, bool first) {
    tokens[owner] += first;
    ++routes[owner];
  });
  int64_t total = 0;
  for (int64_t n = 0; n < owners.count; ++n) begins[n] = total, total += tokens[n];
  each<Id>(batch, owners, [&](int64_t owner, int64_t token, bool first) {
    if (first) rows[begins[owner]++] = token;
  });
  for (int64_t n = 0; n < owners.count; ++n) begins[n] -= tokens[n];
  return total;
}

template <typename Id>
void copy_ids(const Batch& batch, const Owners& owners, int64_t owner, const int64_t* rows, int64_t count, Id* to) {
  const Id* from = static_cast<const Id*>(batch.ids);
  for (int64_t n = 0; n < count; ++n) {
    const Id* ids = from + (rows ? rows[n] : n) * batch.top_k;
    for (int64_t k = 0; k < batch.top_k; ++k) *to++ = owner_of(owners, ids[k]) == owner ? ids[k] : Id(-1);
  }
}

void copy_rows(const char* from, int64_t bytes, const int64_t* rows, int64_t count, char* to) {
  if (!rows) {
    std::memcpy(to, from, size_t(bytes * count));
    return;
  }
  for (int64_t n = 0; n < count; ++n) std::memcpy(to + n * bytes, from + rows[n] * bytes, size_t(bytes));
}

template <typename Id>
int64_t scan(const Id* ids, int64_t n, const int64_t* group_of, int64_t experts, int64_t groups, uint8_t* meant,
             int64_t* found) {
  int64_t routes = 0, low = -1, high = -1;
  uint64_t bits = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids[i];
    if (id < low) low = id;
    if (id > high) high = id;
    if (id < 0 || id >= experts) continue;
    ++routes;
    const int64_t group = group_of[id] < 0 ? groups : group_of[id];
    if (meant)
      meant[group] = 1;
    else
      bits |= uint64_t(1) << group;
  }
  const bool odd = low < -1 || high >= experts;
  *found = odd ? (low < -1 ? low : high) : int64_t(bits);
  return odd ? -1 : routes;
}

}  // namespace

void gather(const Batch& batch, const Owners& owners, int64_t owner, const int64_t* rows, int64_t count,
            const Room& to) {
  copy_rows(batch.hidden, batch.hidden_row, rows, count, to.hidden);
  if (batch.scales) copy_rows(batch.scales, batch.scales_row, rows, count, to.scales);
  copy_rows(batch.weights, batch.weights_row, rows, count, to.weights);
  if (batch.wide_ids)
    copy_ids(batch, owners, owner, rows, count, reinterpret_cast<int64_t*>(to.ids));
  else
    copy_ids(batch, owners, owner, rows, count, reinterpret_cast<int32_t*>(to.ids));
}

}  // namespace expertd::cluster

using namespace expertd::cluster;

// Of the ids of a batch: how many are not -1, and which groups they are of; number `groups` stands for experts that
// nobody holds.  In meant [groups + 1], or, where that is null and there are less than 63, as bits in *found.  -1: *found
// is none of the model's.
API int64_t expertd_cluster_scan(const Batch* batch, const int64_t* group_of, int64_t experts, int64_t groups,
                                 uint8_t* meant, int64_t* found) {
  const int64_t n = batch->tokens * batch->top_k;
  if (batch->wide_ids) return scan(static_cast<const int64_t*>(batch->ids), n, group_of, experts, groups, meant, found);
  return scan(static_cast<const int32_t*>(batch->ids), n, group_of, experts, groups, meant, found);
}

// Of each server's part, [count]: tokens, routes, and where its tokens begin in rows, which has room for
// tokens * min(top_k, count) of them.  Returns how many there are; -1: an id is of no expert that somebody holds.
API int64_t expertd_cluster_count(const Batch* batch, const Owners* owners, int64_t* tokens, int64_t* routes,
                                  int64_t* begins, int64_t* rows) {
  return (batch->wide_ids ? count<int64_t> : count<int32_t>)(*batch, *owners, tokens, routes, begins, rows);
}

// As gather(): one server's part.
API void expertd_cluster_gather(const Batch* batch, const Owners* owners, int64_t owner, const int64_t* rows,
                                int64_t count, const Room* to) {
  gather(*batch, *owners, owner, rows, count, *to);
}
