// The client's side of a region: an arena, rings, and tickets for what is in flight (tickets.h).  The other side is not
// trusted with anything but the answers themselves: an id that nobody waits for is passed over.
#include <cstddef>
#include <cstring>

#include "arena.h"
#include "layout.h"
#include "tickets.h"
#include "wait.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd::shm;

namespace {

struct Request : Ticket {
  int64_t block = Arena::kNoRoom;  // of the arena, given back with the ticket; kNoRoom = none
};

struct Client : Tickets<Client, Request> {
  static constexpr int kLooks = 64;
  static constexpr uint64_t kWatchSpinNs = 50000;
  static constexpr uint64_t kQuickRingNs = 100000;

  Client(uint8_t* base, uint32_t entries, uint64_t arena_bytes, int bell)
      : Tickets(entries),
        control(reinterpret_cast<Control*>(base)),
        submissions(reinterpret_cast<Submission*>(base + kPage)),
        completions(reinterpret_cast<Completion*>(base + completions_offset(entries))),
        memory(base + arena_offset(entries)),
        bell(bell),
        arena(arena_bytes) {}

  Control* const control;
  Submission* const submissions;
  Completion* const completions;
  uint8_t* const memory;
  const int bell;
  std::atomic<bool> hung_up{false};  // the server closed its end
  Trial rings;                       // of expect()

  Arena arena;             // under `holding`, with submitted
  uint64_t submitted = 0;
  uint64_t answered = 0;   // under `reading`

  bool over() const { return ended() || hung_up.load() || control->ended.load(std::memory_order_acquire); }
  bool unwritten() const { return false; }

  void give_back(Request& t) {
    if (t.block != Arena::kNoRoom) arena.give(uint64_t(t.block));
    t.block = Arena::kNoRoom;
  }

  int64_t take(uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(holding);
    return arena.take(bytes);
  }

  void give(uint64_t at) {
    const std::lock_guard<std::mutex> lock(holding);
    arena.give(at);
  }

  // ---- submissions, with `holding` held

  bool has_room() const { return submitted - control->taken.load(std::memory_order_acquire) < entries; }

  void push(const Submission& s, uint64_t id) {
    Submission& to = submissions[submitted & (entries - 1)];
    memcpy(reinterpret_cast<char*>(&to) + sizeof to.seq, reinterpret_cast<const char*>(&s) + sizeof s.seq,
           sizeof to - sizeof to.seq);
    to.id = id;
    to.seq.store(++submitted, std::memory_order_release);
  }

  // ---- and without

  uint64_t submit(const Submission& s, int64_t block, bool announce) {
    uint64_t id = 0;
    {
      const std::lock_guard<std::mutex> lock(holding);
      if (has_room()) id = open(announce, [&](Request& t) { t.block = block; });
      if (!id) return 0;
      push(s, id);
    }
    wake(control->server, bell);
    if (announce) ring_if_idle();
    return id;
  }

  // Copies the tensors into a block, submits *s with their offsets filled in.
  Sent send(Submission* s, const Tensors* t, bool announce, uint64_t, uint64_t* ticket) {
    const auto room = Arena::rounded;
    const uint64_t hidden = t->hidden ? room(t->hidden_bytes) : 0, scales = room(t->scales_bytes);
    const uint64_t ids = room(t->ids_bytes), weights = room(t->weights_bytes);
    const int64_t block = take(hidden + scales + ids + weights + t->out_bytes);
    if (block == Arena::kNoRoom) return kNoRoom;
    uint64_t at = uint64_t(block);
    const auto put = [&](const void* from, uint64_t bytes, uint64_t of) {
      if (bytes) memcpy(memory + at, from, bytes);
      at += of;
      return at - of;
    };
    if (t->hidden) s->hidden = put(t->hidden, t->hidden_bytes, hidden);
    s->scales = put(t->scales, t->scales_bytes, scales);
    s->ids = put(t->ids, t->ids_bytes, ids);
    s->weights = put(t->weights, t->weights_bytes, weights);
    s->out = at;
    *ticket = submit(*s, block, announce);
    if (*ticket) return kSent;
    give(uint64_t(block));
    return kCrowded;
  }

  // Wakes the server, if it sleeps, for a request to come.  A ring that takes longer than kQuickRingNs has given this core
  // away, likely to the server, which then spins for what this thread cannot send.
  void expect() {
    if (!rings.worth()) return;
    const uint64_t begin = now_ns();
    wake(control->server, bell);
    rings.paid(now_ns() - begin <= kQuickRingNs);
  }

  void tell_cancel(uint64_t id) {
    Submission s{};
    s.kind = kCancel;
    {
      const std::lock_guard<std::mutex> lock(holding);
      if (has_room()) push(s, id);  // without it the request is computed in vain
    }
    wake(control->server, bell);
  }

  // Who sleeps at the socket wakes, too: it is shut.
  void end() {
    if (end_all()) shutdown(bell, SHUT_RDWR);
  }

  // ---- completions, with `reading` held

  // As many as there are entries at most: a server that writes on and on keeps nobody here beyond his time.
  void look() {
    for (uint32_t i = 0; i < entries; ++i) {
      Completion& c = completions[answered & (entries - 1)];
      if (c.seq.load(std::memory_order_acquire) != answered + 1) return;
      ++answered;
      const uint64_t id = c.id;
      Request* t = in_flight(id);
      if (!t) continue;
      copy_answer(c, &t->answer);
      done(*t, id);
    }
  }

  void sleep_for_all(int64_t timeout_ns) { sleep_watching(timeout_ns); }

  void sleep_watching(int64_t timeout_ns) {
    const uint64_t before = answered;
    control->client.sleeps.store(1, std::memory_order_seq_cst);
    look();
    if (answered == before && !any_ready()) note(sleep_on_peer(bell, timeout_ns));
    control->client.sleeps.store(0, std::memory_order_relaxed);
    look();
  }

  void sleep_idle(int64_t timeout_ns) { note(sleep_on(news, timeout_ns, bell)); }

  void look_for_end() { note(expertd::shm::hung_up(bell)); }

  void note(bool closed) {
    if (closed) hung_up.store(true);
  }

  void unbell() { control->client.sleeps.store(0, std::memory_order_relaxed); }

  // Where nothing has come the bell is armed, so that the next answer rings it.
  uint32_t drain(uint64_t* ids, uint32_t most) {
    const std::lock_guard<std::mutex> lock(reading);
    note(!hear_peer(bell));
    look();
    if (!any_ready()) {
      control->client.sleeps.store(1, std::memory_order_seq_cst);
      look();
    }
    return take_ready(ids, most);
  }
};

}  // namespace

EXPERTD_TICKETS(shm, Client)

// Of the structs, for the test that holds layout.py to layout.h.
API void expertd_shm_sizes(uint64_t* out) {
  out[0] = sizeof(Control);
  out[1] = sizeof(Submission);
  out[2] = sizeof(Completion);
  out[3] = offsetof(Completion, text);
  out[4] = offsetof(Submission, trace);
  out[5] = arena_offset(256);
  out[6] = offsetof(Submission, number);
  out[7] = offsetof(Control, called);
  out[8] = offsetof(Control, answered);
  out[9] = offsetof(Control, calls);
  out[10] = offsetof(Control, last);
  out[11] = offsetof(Control, failure);
}

// null: not a region of this version, or not as large as it says.
API Client* expertd_shm_client(void* base, uint64_t bytes, uint32_t entries, int bell) {
  const auto* control = static_cast<Control*>(base);
  if (entries == 0 || (entries & (entries - 1)) || bytes <= arena_offset(entries)) return nullptr;
  if (control->magic != kMagic || control->version != kVersion || control->entries != entries) return nullptr;
  return new Client(static_cast<uint8_t*>(base), entries, bytes - arena_offset(entries), bell);
}

// Offset in the arena of a block; -1: there is no room now.
API int64_t expertd_shm_take(Client* c, uint64_t bytes) { return c->take(bytes); }
API void expertd_shm_give(Client* c, uint64_t at) { c->give(at); }

// Blocks of the arena that are taken.
API uint64_t expertd_shm_blocks(Client* c) {
  const std::lock_guard<std::mutex> lock(c->holding);
  return c->arena.blocks();
}

// Sends a copy of *s; its seq and id are chosen here.  block: of the arena, given back with the ticket; -1 = none.
// announced: nobody waits for it, watch() or drain() names it.  The ticket; 0: as many as there are entries are in
// flight, or the session is over.
API uint64_t expertd_shm_submit(Client* c, const Submission* s, int64_t block, int announced) {
  return c->submit(*s, block, announced != 0);
}

// A request whose tensors all lie in the arena, sent and waited for; its ticket is given back.  kTimedOut: *ticket is in
// flight, for wait() and release().
API int expertd_shm_exchange(Client* c, const Submission* s, int64_t timeout_ns, int64_t spin_ns, Completion* answer,
                             uint64_t* ticket) {
  *ticket = c->submit(*s, Arena::kNoRoom, false);
  if (!*ticket) return c->over() ? int(kEnded) : int(kCrowded);
  const Waited how = c->wait(*ticket, timeout_ns, spin_ns, answer);
  if (how == kAnswered) c->release(*ticket);
  return how;
}

// Asks the server not to compute a request in flight, whose answer is wanted all the same.
API void expertd_shm_recall(Client* c, uint64_t ticket) { c->tell_cancel(ticket); }

// A call from a device comes soon: a device cannot ring.
API void expertd_shm_wake(Client* c) { wake(c->control->server, c->bell); }

// A request comes soon.
API void expertd_shm_expect(Client* c) { c->expect(); }
