// One call of a cluster, by the thread that makes it: parts are gathered where their servers read them, sent, waited for
// and added up.  Whatever is out of the ordinary (a part that failed, is late or does not fit) is left as it is, for
// flight.py to go on with.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "join.h"
#include "split.h"
#include "wait.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd::cluster;
using expertd::shm::Completion;
using expertd::shm::now_ns;
using expertd::shm::Submission;

namespace {

constexpr uint64_t kAlign = 256;  // of a tensor in a block
constexpr uint64_t kSpinsWorth = 4;
// Answers that usually take longer than so many times the spinning are slept for at once: a server on the same cores
// needs them.

// Submissions and completions are Python's here, whose memory is aligned to 8 bytes.
template <typename T>
T get(const char* at, size_t offset) {
  T value;
  memcpy(&value, at + offset, sizeof value);
  return value;
}

template <typename T>
void put(char* at, size_t offset, T value) {
  memcpy(at + offset, &value, sizeof value);
}

struct Tensors {  // expertd.shm.layout.Tensors
  const void *hidden, *scales, *ids, *weights;
  uint64_t hidden_bytes, scales_bytes, ids_bytes, weights_bytes, out_bytes;
};

// A session, by the functions of its library: expertd.shm.layout.Session.
struct Session {
  void* client;
  char* arena;  // null: messages carry the tensors
  int64_t (*take)(void*, uint64_t);
  void (*give)(void*, uint64_t);
  uint64_t (*submit)(void*, const char* submission, int64_t, int);
  int (*send)(void*, char* submission, const Tensors*, int, uint64_t*);
  int (*see)(void*, uint64_t);
  int (*wait)(void*, uint64_t, int64_t, int64_t, char* completion);
  void (*answer)(void*, uint64_t, char* completion);
  uint64_t (*output)(void*, uint64_t);  // null: in the arena
  void (*release)(void*, uint64_t);
  void (*leave)(void*);
};

enum State : uint32_t { kUnsent = 0, kInFlight = 1, kAnswered = 2, kRefused = 3, kLost = 4 };

struct Share {
  const Session* session;
  int64_t owner;
  const int64_t* rows;  // its tokens
  int64_t tokens, routes;
  uint64_t ticket;
  uint32_t state;
  uint32_t late;  // whether its answer may have come before answered_ns
  uint64_t sent_ns, answered_ns;
  uint64_t inside_ns;  // from its reading to its writing by the server
  uint32_t queued_tokens;
  float token_ns;
  char name[36];  // of the backend
  char spare[4];
  const void* values;
  char submission[sizeof(Submission)];
  char answer[sizeof(Completion)];
};

struct Call {
  Batch batch;
  Owners owners;
  Share* shares;
  int64_t count;  // of shares; 0 until ask()
  const Session* const* sessions;  // [owners.count]: of those that get something
  const int64_t* found;            // [3, owners.count]: tokens, routes, where its tokens begin in rows
  const int64_t* rows;
  int64_t out_row;     // bytes of a row of a partial sum
  uint64_t* usual_ns;  // of a wait, recently; all calls of a cluster have it
  int64_t spin_ns;
  void* out;  // null: sums are not added up here
  int64_t out_stride;
  int32_t in_bf16, out_bf16;
  char form[sizeof(Submission)];  // what all parts have in common
};

uint64_t rounded(int64_t bytes) { return (uint64_t(bytes) + kAlign - 1) / kAlign * kAlign; }

// The sizes of a part's tensors, and where they begin when they lie one after another.
struct Sizes {
  uint64_t hidden, scales, ids, weights, out, at_scales, at_ids, at_weights, at_out;

  Sizes(const Call& c, int64_t tokens)
      : hidden(uint64_t(tokens * c.batch.hidden_row)),
        scales(c.batch.scales ? uint64_t(tokens * c.batch.scales_row) : 0),
        ids(uint64_t(tokens * c.batch.top_k * (c.batch.wide_ids ? 8 : 4))),
        weights(uint64_t(tokens * c.batch.weights_row)),
        out(uint64_t(tokens * c.out_row)),
        at_scales(rounded(int64_t(hidden))),
        at_ids(at_scales + rounded(int64_t(scales))),
        at_weights(at_ids + rounded(int64_t(ids))),
        at_out(at_weights + rounded(int64_t(weights))) {}

  Room room(char* at) const { return {at, at + at_scales, at + at_ids, at + at_weights}; }
};

void send_by_arena(const Call& c, Share& s, const Sizes& sizes) {
  const Session& to = *s.session;
  const int64_t block = to.take(to.client, sizes.at_out + sizes.out);
  if (block < 0) return;
  gather(c.batch, c.owners, s.owner, s.rows, s.tokens, sizes.room(to.arena + block));
  const uint64_t at = uint64_t(block);
  put(s.submission, offsetof(Submission, hidden), at);
  put(s.submission, offsetof(Submission, scales), at + sizes.at_scales);
  put(s.submission, offsetof(Submission, ids), at + sizes.at_ids);
  put(s.submission, offsetof(Submission, weights), at + sizes.at_weights);
  put(s.submission, offsetof(Submission, out), at + sizes.at_out);
  s.ticket = to.submit(to.client, s.submission, block, 0);
  if (!s.ticket) to.give(to.client, at);
}

void send_by_message(const Call& c, Share& s, const Sizes& sizes) {
  static thread_local std::vector<char> memory;
  if (memory.size() < sizes.at_out) memory.resize(sizes.at_out);
  const Room room = sizes.room(memory.data());
  gather(c.batch, c.owners, s.owner, s.rows, s.tokens, room);
  const Tensors t{room.hidden, sizes.scales ? room.scales : nullptr, room.ids, room.weights,
                  sizes.hidden, sizes.scales, sizes.ids, sizes.weights, sizes.out};
  if (s.session->send(s.session->client, s.submission, &t, 0, &s.ticket)) s.ticket = 0;
}

// One share for each server that gets something, in their order.
void deal(Call& c) {
  const int64_t owners = c.owners.count, *tokens = c.found, *routes = tokens + owners, *begins = routes + owners;
  for (int64_t n = 0; n < owners; ++n) {
    if (!tokens[n]) continue;
    Share& s = c.shares[c.count++];
    s.session = c.sessions[n];
    s.owner = n;
    s.rows = c.rows + begins[n];
    s.tokens = tokens[n];
    s.routes = routes[n];
    s.ticket = 0;
    s.state = kUnsent;
  }
}

void send(const Call& c, Share& s) {
  memcpy(s.submission, c.form, sizeof s.submission);
  put(s.submission, offsetof(Submission, tokens), uint32_t(s.tokens));
  const Sizes sizes(c, s.tokens);
  s.session->arena ? send_by_arena(c, s, sizes) : send_by_message(c, s, sizes);
  s.sent_ns = now_ns();
  if (s.ticket) s.state = kInFlight;
}

void came(Share& s, bool late) {
  const Session& from = *s.session;
  s.answered_ns = now_ns();
  s.late = late;
  s.state = get<uint32_t>(s.answer, offsetof(Completion, refused)) ? kRefused : kAnswered;
  if (s.state == kRefused) return;
  s.inside_ns = 0;
  for (const size_t stage : {offsetof(Completion, queue_ns), offsetof(Completion, collect_ns),
                             offsetof(Completion, kernel_ns), offsetof(Completion, deliver_ns)})
    s.inside_ns += get<uint32_t>(s.answer, stage);
  s.queued_tokens = get<uint32_t>(s.answer, offsetof(Completion, queued_tokens));
  s.token_ns = get<float>(s.answer, offsetof(Completion, token_ns));
  memcpy(s.name, s.answer + offsetof(Completion, name), sizeof s.name);
  s.values = from.output ? reinterpret_cast<const void*>(from.output(from.client, s.ticket))
                         : from.arena + get<uint64_t>(s.submission, offsetof(Submission, out));
}

// Takes the answer of a part if it is there.
void look(Share& s, bool late) {
  const int found = s.session->see(s.session->client, s.ticket);
  if (found < 0) s.state = kLost;
  if (found <= 0) return;
  s.session->leave(s.session->client);
  s.session->answer(s.session->client, s.ticket, s.answer);
  came(s, late);
}

enum Outcome { kDone = 0, kTimeOver = 1, kAmiss = 2 };

int64_t routes_of(const Share& s) { return get<uint32_t>(s.answer, offsetof(Completion, routes_computed)); }

// Of the weights that computed a part.  What says none has those that it was started with.
uint64_t version_of(const Share& s) {
  constexpr uint64_t kFirst = 1;
  const bool says = get<uint32_t>(s.answer, offsetof(Completion, says_version)) == expertd::shm::kSaysVersion;
  const uint64_t version = says ? get<uint64_t>(s.answer, offsetof(Completion, version_low)) : 0;
  return version ? version : kFirst;
}

// kTimeOver: parts are in flight still.
Outcome outcome(const Call& c) {
  bool waits = false;
  uint64_t version = get<uint64_t>(c.form, offsetof(Submission, weights_version));
  for (int64_t n = 0; n < c.count; ++n) {
    const Share& s = c.shares[n];
    if (s.state == kInFlight)
      waits = true;
    else if (s.state != kAnswered || routes_of(s) != s.routes || (version && version_of(s) != version))
      return kAmiss;
    else
      version = version_of(s);
  }
  return waits ? kTimeOver : kDone;
}

Outcome spin(const Call& c, uint64_t until_ns) {
  for (;;) {
    for (int64_t n = 0; n < c.count; ++n)
      if (c.shares[n].state == kInFlight) look(c.shares[n], false);
    const Outcome now = outcome(c);
    if (now == kTimeOver && now_ns() < until_ns) {
      expertd::shm::relax();
      continue;
    }
    for (int64_t n = 0; n < c.count; ++n)
      if (c.shares[n].state == kInFlight) c.shares[n].session->leave(c.shares[n].session->client);
    return now;
  }
}

// Sleeps for one part after another: who waits for all need not know which came first.
Outcome sleep(const Call& c, uint64_t until_ns) {
  for (int64_t n = 0; n < c.count; ++n) {
    Share& s = c.shares[n];
    if (s.state != kInFlight) continue;
    const uint64_t now = now_ns();
    const int how = s.session->wait(s.session->client, s.ticket, int64_t(until_ns > now ? until_ns - now : 0), 0,
                                    s.answer);
    if (how == 0) came(s, false);
    if (how == 2) s.state = kLost;
    if (how) return outcome(c);
    for (int64_t m = n + 1; m < c.count; ++m)
      if (c.shares[m].state == kInFlight) look(c.shares[m], true);
    if (const Outcome so_far = outcome(c); so_far != kTimeOver) return so_far;
  }
  return outcome(c);
}

void add_up(const Call& c) {
  static thread_local std::vector<Part> parts;
  parts.clear();
  for (int64_t n = 0; n < c.count; ++n)
    parts.push_back({c.shares[n].rows, c.shares[n].tokens, c.shares[n].values, 0, nullptr});
  join({parts.data(), c.count, c.batch.tokens, get<uint32_t>(c.form, offsetof(Submission, hidden_size)), nullptr,
        c.out, c.out_stride},
       c.in_bf16, c.out_bf16);
  for (int64_t n = 0; n < c.count; ++n) c.shares[n].session->release(c.shares[n].session->client, c.shares[n].ticket);
}

}  // namespace

// Of the structs, for the test that holds native.py to them.
API void expertd_cluster_sizes(uint64_t* out) {
  out[0] = sizeof(Batch);
  out[1] = sizeof(Owners);
  out[2] = offsetof(Call, shares);
  out[3] = offsetof(Call, form);
  out[4] = sizeof(Call);
  out[5] = offsetof(Share, ticket);
  out[6] = offsetof(Share, submission);
  out[7] = offsetof(Share, answer);
  out[8] = sizeof(Share);
  out[9] = sizeof(Session);
  out[10] = sizeof(Tensors);
  out[11] = sizeof(Room);
}

// Waits until until_ns for parts that were sent.  kDone: all were answered with as many routes as were asked for, and,
// where there is `out`, added up in their order and given back.  kTimeOver; kAmiss: one was not.
API int expertd_cluster_wait(Call* c, uint64_t until_ns) {
  const uint64_t begin = now_ns(), usual = __atomic_load_n(c->usual_ns, __ATOMIC_RELAXED);
  const bool spins = usual <= kSpinsWorth * uint64_t(c->spin_ns);
  Outcome found = spin(*c, spins ? std::min(until_ns, begin + uint64_t(c->spin_ns)) : 0);
  if (found == kTimeOver && now_ns() < until_ns) found = sleep(*c, until_ns);
  if (found != kDone) return found;
  __atomic_store_n(c->usual_ns, usual - usual / 8 + (now_ns() - begin) / 8, __ATOMIC_RELAXED);
  if (c->out) add_up(*c);
  return found;
}

// Makes all parts, sends them, and waits.
API int expertd_cluster_ask(Call* c, uint64_t until_ns) {
  deal(*c);
  for (int64_t n = 0; n < c->count; ++n) send(*c, c->shares[n]);
  return expertd_cluster_wait(c, until_ns);
}
