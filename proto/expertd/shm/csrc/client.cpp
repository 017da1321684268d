// The client's side of a region: an arena, tickets for what is in flight, and waiting for answers.  Thread-safe: any
// thread may submit and wait; whoever waits reads the completions for all.  The other side is not trusted with anything
// but the answers themselves: an id that nobody waits for is passed over.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "layout.h"
#include "wait.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd::shm;

namespace {

constexpr uint64_t kAlign = 256;  // of a block of the arena
constexpr int64_t kNobody = -1;

// First fit; neighbours that are free are one.
class Arena {
 public:
  explicit Arena(uint64_t bytes) { free_[0] = bytes; }

  int64_t take(uint64_t bytes) {
    if (bytes > uint64_t(1) << 62) return kNobody;
    bytes = (std::max<uint64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < bytes) continue;
      const uint64_t at = it->first, left = it->second - bytes;
      free_.erase(it);
      if (left) free_[at + bytes] = left;
      taken_[at] = bytes;
      return int64_t(at);
    }
    return kNobody;
  }

  void give(uint64_t at) {
    const auto found = taken_.find(at);
    if (found == taken_.end()) return;
    uint64_t bytes = found->second;
    taken_.erase(found);
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + bytes) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free_[at] = bytes;
  }

  uint64_t blocks() const { return taken_.size(); }

 private:
  std::map<uint64_t, uint64_t> free_, taken_;
};

enum State : uint32_t { kFree, kInFlight, kAbandoned, kDone };

struct Ticket {
  std::atomic<uint32_t> state{kFree};
  uint64_t id = 0;
  int64_t block = kNobody;  // of the arena, given back with the ticket
  Completion answer;
};

struct Client {
  Client(uint8_t* base, uint32_t entries, uint64_t arena_bytes, int server_bell, int client_bell)
      : control(reinterpret_cast<Control*>(base)),
        entries(entries),
        submissions(reinterpret_cast<Submission*>(base + kPage)),
        completions(reinterpret_cast<Completion*>(base + completions_offset(entries))),
        server_bell(server_bell),
        client_bell(client_bell),
        arena(arena_bytes),
        tickets(new Ticket[entries]) {
    for (uint32_t i = entries; i-- > 0;) unused.push_back(i);
  }

  Control* const control;
  const uint32_t entries;
  Submission* const submissions;
  Completion* const completions;
  const int server_bell, client_bell;

  std::mutex submitting;  // arena, unused, submitted, made
  Arena arena;
  std::vector<uint32_t> unused;
  uint64_t submitted = 0, made = 0;

  std::mutex reading;  // completions, answered
  uint64_t answered = 0;
  std::unique_ptr<Ticket[]> tickets;

  std::atomic<bool> ended{false};

  bool over() const { return ended.load(std::memory_order_acquire) || control->ended.load(std::memory_order_acquire); }
  Ticket& ticket(uint64_t id) { return tickets[id & (entries - 1)]; }

  // With `submitting` held.  False: the server has not taken what was sent before.
  bool push(const Submission& s, uint64_t id) {
    if (submitted - control->taken.load(std::memory_order_acquire) >= entries) return false;
    Submission& to = submissions[submitted & (entries - 1)];
    memcpy(reinterpret_cast<char*>(&to) + sizeof to.seq, reinterpret_cast<const char*>(&s) + sizeof s.seq,
           sizeof to - sizeof to.seq);
    to.id = id;
    to.seq.store(++submitted, std::memory_order_release);
    return true;
  }

  void wake_server() {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the entry, then the look at the server's sleep
    if (control->server.sleeps.load(std::memory_order_relaxed)) ring(server_bell);
  }

  void free_ticket(uint64_t id) {
    Ticket& t = ticket(id);
    const std::lock_guard<std::mutex> lock(submitting);
    if (t.block != kNobody) arena.give(uint64_t(t.block));
    t.block = kNobody;
    t.id = 0;
    t.state.store(kFree, std::memory_order_relaxed);
    unused.push_back(uint32_t(id & (entries - 1)));
  }

  // With `reading` held: moves what has come to its tickets, and names those that somebody waits for in ids.
  uint32_t read_completions(uint64_t* ids = nullptr, uint32_t most = ~0u) {
    uint32_t came = 0;
    while (came < most) {
      Completion& c = completions[answered & (entries - 1)];
      if (c.seq.load(std::memory_order_acquire) != answered + 1) break;
      ++answered;
      const uint64_t id = c.id;
      Ticket& t = ticket(id);
      const uint32_t state = t.state.load(std::memory_order_acquire);
      if (t.id != id || (state != kInFlight && state != kAbandoned)) continue;
      memcpy(static_cast<void*>(&t.answer), &c, c.refused ? sizeof c : offsetof(Completion, reason));
      uint32_t expected = kInFlight;
      if (t.state.compare_exchange_strong(expected, kDone, std::memory_order_acq_rel)) {
        if (ids) ids[came] = id;
        ++came;
      } else {
        free_ticket(id);
      }
    }
    return came;
  }
};

bool spin_for(Client* c, Ticket& t, uint64_t until) {
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (t.state.load(std::memory_order_acquire) == kDone) return true;
      if (c->reading.try_lock()) {
        c->read_completions();
        c->reading.unlock();
      }
      relax();
    }
    if (now_ns() >= until) return t.state.load(std::memory_order_acquire) == kDone;
  }
}

}  // namespace

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
API Client* expertd_shm_client(void* base, uint64_t bytes, uint32_t entries, int server_bell, int client_bell) {
  const auto* control = static_cast<Control*>(base);
  if (entries == 0 || (entries & (entries - 1)) || bytes <= arena_offset(entries)) return nullptr;
  if (control->magic != kMagic || control->version != kVersion || control->entries != entries) return nullptr;
  return new Client(static_cast<uint8_t*>(base), entries, bytes - arena_offset(entries), server_bell, client_bell);
}

API void expertd_shm_free(Client* c) { delete c; }

// Offset in the arena of a block; -1: there is no room now.
API int64_t expertd_shm_take(Client* c, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(c->submitting);
  return c->arena.take(bytes);
}

API void expertd_shm_give(Client* c, uint64_t at) {
  const std::lock_guard<std::mutex> lock(c->submitting);
  c->arena.give(at);
}

// Sends a copy of *s; its seq and id are chosen here.  block: of the arena, given back with the ticket; -1 = none.
// The ticket; 0: as many as there are entries are in flight, or the session is over.
API uint64_t expertd_shm_submit(Client* c, const Submission* s, int64_t block) {
  uint64_t id;
  {
    const std::lock_guard<std::mutex> lock(c->submitting);
    if (c->unused.empty() || c->over()) return 0;
    const uint32_t index = c->unused.back();
    id = ++c->made * c->entries + index;
    Ticket& t = c->tickets[index];
    t.id = id;
    t.block = block;
    t.state.store(kInFlight, std::memory_order_release);
    if (!c->push(*s, id)) {
      t.id = 0;
      t.block = kNobody;
      t.state.store(kFree, std::memory_order_relaxed);
      return 0;
    }
    c->unused.pop_back();
  }
  c->wake_server();
  return id;
}

enum Waited { kAnswered = 0, kTimedOut = 1, kEnded = 2 };

// Waits for a ticket's answer: spins for spin_ns, then sleeps; timeout_ns < 0: for ever.
API int expertd_shm_wait(Client* c, uint64_t id, int64_t timeout_ns, int64_t spin_ns, Completion* answer) {
  Ticket& t = c->ticket(id);
  const uint64_t begin = now_ns(), end = timeout_ns < 0 ? ~uint64_t(0) : begin + uint64_t(timeout_ns);
  bool there = spin_for(c, t, std::min(end, begin + uint64_t(spin_ns)));
  while (!there) {
    if (c->over()) return kEnded;
    const uint64_t now = now_ns();
    if (now >= end) return kTimedOut;
    const int64_t left = int64_t(std::min<uint64_t>(end - now, 100000000));
    if (c->reading.try_lock()) {
      c->control->client.sleeps.store(1, std::memory_order_seq_cst);
      if (!c->read_completions()) sleep_on(c->client_bell, left);
      c->control->client.sleeps.store(0, std::memory_order_relaxed);
      c->read_completions();
      c->reading.unlock();
    } else {  // another thread sleeps on the bell and reads for all
      const timespec pause{0, long(std::min<int64_t>(left, 20000))};
      nanosleep(&pause, nullptr);
    }
    there = t.state.load(std::memory_order_acquire) == kDone;
  }
  memcpy(static_cast<void*>(answer), &t.answer, t.answer.refused ? sizeof t.answer : offsetof(Completion, reason));
  return kAnswered;
}

// For a thread that reads for all: waits until answers come, spins for spin_ns, then sleeps.  The tickets whose answers
// came, at most `most`; 0: the time was over, or so is the session.
API uint32_t expertd_shm_next(Client* c, uint64_t* ids, uint32_t most, int64_t timeout_ns, int64_t spin_ns) {
  const uint64_t begin = now_ns();
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(c->reading);
      if (const uint32_t n = c->read_completions(ids, most)) return n;
      const int64_t spent = int64_t(now_ns() - begin);
      if (c->over() || spent >= timeout_ns) return 0;
      if (spent >= spin_ns) {
        c->control->client.sleeps.store(1, std::memory_order_seq_cst);
        uint32_t n = c->read_completions(ids, most);
        if (!n) sleep_on(c->client_bell, timeout_ns - spent);
        c->control->client.sleeps.store(0, std::memory_order_relaxed);
        if (n) return n;
        continue;
      }
    }
    relax();
  }
}

// The answer of a ticket that next() or drain() named.
API void expertd_shm_answer(Client* c, uint64_t id, Completion* answer) {
  const Ticket& t = c->ticket(id);
  memcpy(static_cast<void*>(answer), &t.answer, t.answer.refused ? sizeof t.answer : offsetof(Completion, reason));
}

// For an event loop that watches the client's bell: the tickets whose answers came, at most `most`.  Where there are
// none the bell is armed, so that the next answer rings it.
API uint32_t expertd_shm_drain(Client* c, uint64_t* ids, uint32_t most) {
  const std::lock_guard<std::mutex> lock(c->reading);
  sleep_on(c->client_bell, 0);
  uint32_t n = c->read_completions(ids, most);
  if (n == 0) {
    c->control->client.sleeps.store(1, std::memory_order_seq_cst);
    n = c->read_completions(ids, most);
  }
  return n;
}

// Gives the ticket, and its block, back after its answer was used.
API void expertd_shm_release(Client* c, uint64_t id) {
  Ticket& t = c->ticket(id);
  if (t.id == id && t.state.load(std::memory_order_acquire) == kDone) c->free_ticket(id);
}

// Nobody waits any more: the server is told, and ticket and block are given back when it has answered.
API void expertd_shm_abandon(Client* c, uint64_t id) {
  Ticket& t = c->ticket(id);
  uint32_t expected = kInFlight;
  if (t.id != id) return;
  if (!t.state.compare_exchange_strong(expected, kAbandoned, std::memory_order_acq_rel)) {
    if (expected == kDone) c->free_ticket(id);
    return;
  }
  Submission s{};
  s.kind = kCancel;
  {
    const std::lock_guard<std::mutex> lock(c->submitting);
    c->push(s, id);  // without it the request is computed in vain
  }
  c->wake_server();
}

// Everybody who waits learns that the session is over.
API void expertd_shm_end(Client* c) {
  c->ended.store(true, std::memory_order_release);
  ring(c->client_bell);
}

// A call from a device comes soon: a device cannot ring.
API void expertd_shm_wake(Client* c) { c->wake_server(); }

API int expertd_shm_over(Client* c) { return c->over(); }

API uint64_t expertd_shm_blocks(Client* c) {
  const std::lock_guard<std::mutex> lock(c->submitting);
  return c->arena.blocks();
}
