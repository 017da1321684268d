// The client's side of a region: an arena, tickets for what is in flight, and waiting for answers.  Thread-safe.  The
// other side is not trusted with anything but the answers themselves: an id that nobody waits for is passed over.
//
// A thread that sent a request may wait for its answer itself (wait).  One of those that wait reads the completions for
// all, and sleeps on the bell for all; when its own has come it wakes another one to do so.  Requests that nobody waits
// for are announced: a thread (watch) or an event loop (drain) gets the tickets whose answers have come.
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <algorithm>
#include <climits>
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
constexpr uint64_t kSpinsWorth = 4;
// Answers that usually take longer than so many times the spinning are slept for at once: a server on the same cores
// needs them.

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

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t timeout_ns) {
  const timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &t, nullptr, 0);
}

void wake_sleeper(std::atomic<uint32_t>& word) {
  word.fetch_add(1);
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

enum State : uint32_t { kFree, kInFlight, kAbandoned, kDone };

struct Ticket {
  std::atomic<uint32_t> state{kFree};
  std::atomic<uint32_t> calls{0};   // grows whenever its waiter has to look again
  std::atomic<uint32_t> sleeps{0};  // its waiter sleeps on `calls`, or is about to
  std::atomic<bool> announced{false};
  std::atomic<uint64_t> id{0};
  int64_t block = kNobody;  // of the arena, given back with the ticket
  Completion answer;
};

struct Client {
  Client(uint8_t* base, uint32_t entries, uint64_t arena_bytes, int server_bell, int client_bell)
      : control(reinterpret_cast<Control*>(base)),
        entries(entries),
        submissions(reinterpret_cast<Submission*>(base + kPage)),
        completions(reinterpret_cast<Completion*>(base + completions_offset(entries))),
        memory(base + arena_offset(entries)),
        server_bell(server_bell),
        client_bell(client_bell),
        news(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        arena(arena_bytes),
        tickets(new Ticket[entries]) {
    for (uint32_t i = entries; i-- > 0;) unused.push_back(i);
  }
  ~Client() { close(news); }

  Control* const control;
  const uint32_t entries;
  Submission* const submissions;
  Completion* const completions;
  uint8_t* const memory;
  const int server_bell, client_bell;
  const int news;  // rings for the thread that watches: announced answers have come, or nobody else reads any more

  std::mutex submitting;  // arena, unused, submitted, made
  Arena arena;
  std::vector<uint32_t> unused;
  uint64_t submitted = 0, made = 0;

  std::mutex reading;  // completions, answered, ready
  uint64_t answered = 0;
  std::vector<uint64_t> ready;  // announced tickets whose answers have come
  std::atomic<uint32_t> announced{0};  // in flight
  std::atomic<uint32_t> idle{0};       // the thread that watches sleeps until there is something announced
  std::atomic<uint32_t> sleepers{0};   // threads that sleep on their tickets
  std::unique_ptr<Ticket[]> tickets;

  std::atomic<uint64_t> usual_ns{0};  // of a wait, recently
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

  void free_ticket(uint64_t id) {
    Ticket& t = ticket(id);
    const std::lock_guard<std::mutex> lock(submitting);
    if (t.block != kNobody) arena.give(uint64_t(t.block));
    t.block = kNobody;
    t.id = 0;
    t.state.store(kFree, std::memory_order_relaxed);
    unused.push_back(uint32_t(id & (entries - 1)));
  }

  // With `reading` held: moves what has come to its tickets.
  uint32_t read_completions() {
    uint32_t came = 0;
    for (;; ++came) {
      Completion& c = completions[answered & (entries - 1)];
      if (c.seq.load(std::memory_order_acquire) != answered + 1) return came;
      ++answered;
      const uint64_t id = c.id;
      Ticket& t = ticket(id);
      const uint32_t state = t.state.load(std::memory_order_acquire);
      if (t.id != id || (state != kInFlight && state != kAbandoned)) continue;
      memcpy(static_cast<void*>(&t.answer), &c, c.refused ? sizeof c : offsetof(Completion, text));
      uint32_t expected = kInFlight;
      const bool wanted = t.state.compare_exchange_strong(expected, kDone);
      const bool announce = t.announced.exchange(false);  // after the state: see expertd_shm_announce
      if (announce) announced.fetch_sub(1);
      if (!wanted) {
        free_ticket(id);
      } else if (announce) {
        ready.push_back(id);
      } else if (t.sleeps.load()) {
        wake_sleeper(t.calls);
      }
    }
  }

  uint32_t take_ready(uint64_t* ids, uint32_t most) {
    const auto n = long(std::min<size_t>(most, ready.size()));
    std::copy_n(ready.begin(), n, ids);
    ready.erase(ready.begin(), ready.begin() + n);
    return uint32_t(n);
  }

  // With `reading` held: sleeps until the server answers something, timeout_ns are over, or `other` is readable.
  void sleep_for_all(int64_t timeout_ns, int other = -1) {
    control->client.sleeps.store(1, std::memory_order_seq_cst);
    if (!read_completions() && ready.empty()) sleep_on(client_bell, timeout_ns, other);
    control->client.sleeps.store(0, std::memory_order_relaxed);
    read_completions();
  }

  // After `reading` was given back by one who reads no more: somebody else has to.
  void hand_on() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (announced.load() || !ready.empty()) ring(news);
    if (!sleepers.load()) return;
    for (uint32_t i = 0; i < entries; ++i)
      if (tickets[i].sleeps.load() && tickets[i].state.load() == kInFlight) return wake_sleeper(tickets[i].calls);
  }
};

// Whether the answer of `id` has come; false, too, where another thread gave the ticket up.
bool came(const Ticket& t, uint64_t id) {
  return t.state.load(std::memory_order_acquire) == kDone && t.id.load() == id;
}

bool spin_for(Client* c, Ticket& t, uint64_t id, uint64_t until) {
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (came(t, id)) return true;
      if (c->reading.try_lock()) {
        c->read_completions();
        const bool news = !c->ready.empty();
        c->reading.unlock();
        if (news) ring(c->news);
      }
      relax();
    }
    if (now_ns() >= until) return came(t, id);
  }
}

// Where a request's tensors lie in this process.  hidden null: the submission says where in the arena.
struct Tensors {
  const void *hidden, *scales, *ids, *weights;
  uint64_t hidden_bytes, scales_bytes, ids_bytes, weights_bytes, out_bytes;
};

uint64_t rounded(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

enum Sent { kSent = 0, kNoRoom = 3, kCrowded = 4 };
enum Waited { kAnswered = 0, kTimedOut = 1, kEnded = 2 };

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
// announced: nobody waits for it, watch() or drain() names it.  The ticket; 0: as many as there are entries are in
// flight, or the session is over.
API uint64_t expertd_shm_submit(Client* c, const Submission* s, int64_t block, int announced) {
  uint64_t id;
  {
    const std::lock_guard<std::mutex> lock(c->submitting);
    if (c->unused.empty() || c->over()) return 0;
    const uint32_t index = c->unused.back();
    id = ++c->made * c->entries + index;
    Ticket& t = c->tickets[index];
    t.id = id;
    t.block = block;
    t.announced = announced != 0;
    t.state.store(kInFlight, std::memory_order_release);
    if (announced) c->announced.fetch_add(1);
    if (!c->push(*s, id)) {
      if (announced) c->announced.fetch_sub(1);
      t.id = 0;
      t.block = kNobody;
      t.state.store(kFree, std::memory_order_relaxed);
      return 0;
    }
    c->unused.pop_back();
  }
  wake(c->control->server, c->server_bell);
  if (announced && c->idle.load() && c->idle.exchange(0)) ring(c->news);
  return id;
}

// Copies the tensors into a block, sends *s with the offsets filled in.  *ticket: as of submit.  kSent, kNoRoom or
// kCrowded: then nothing was sent.
API int expertd_shm_send(Client* c, Submission* s, const Tensors* t, int announced, uint64_t* ticket) {
  const uint64_t hidden = t->hidden ? rounded(t->hidden_bytes) : 0, scales = rounded(t->scales_bytes);
  const uint64_t ids = rounded(t->ids_bytes), weights = rounded(t->weights_bytes);
  const int64_t block = expertd_shm_take(c, hidden + scales + ids + weights + t->out_bytes);
  if (block == kNobody) return kNoRoom;
  uint64_t at = uint64_t(block);
  const auto put = [&](const void* from, uint64_t bytes, uint64_t room) {
    if (bytes) memcpy(c->memory + at, from, bytes);
    at += room;
    return at - room;
  };
  if (t->hidden) s->hidden = put(t->hidden, t->hidden_bytes, hidden);
  s->scales = put(t->scales, t->scales_bytes, scales);
  s->ids = put(t->ids, t->ids_bytes, ids);
  s->weights = put(t->weights, t->weights_bytes, weights);
  s->out = at;
  *ticket = expertd_shm_submit(c, s, block, announced);
  if (*ticket) return kSent;
  expertd_shm_give(c, uint64_t(block));
  return kCrowded;
}

// Waits for a ticket's answer, which is not announced: spins for spin_ns, then sleeps; timeout_ns < 0: for ever.
API int expertd_shm_wait(Client* c, uint64_t id, int64_t timeout_ns, int64_t spin_ns, Completion* answer) {
  Ticket& t = c->ticket(id);
  const uint64_t begin = now_ns(), end = timeout_ns < 0 ? ~uint64_t(0) : begin + uint64_t(timeout_ns);
  if (c->usual_ns.load(std::memory_order_relaxed) > kSpinsWorth * uint64_t(spin_ns)) spin_ns = 0;
  bool there = spin_for(c, t, id, std::min(end, begin + uint64_t(spin_ns))), read = false;
  int how = kAnswered;
  while (!there) {
    if (c->over()) how = kEnded;
    const uint64_t now = now_ns();
    if (now >= end) how = kTimedOut;
    if (how != kAnswered) break;
    const int64_t left = int64_t(std::min<uint64_t>(end - now, 100000000));
    const uint32_t calls = t.calls.load();
    t.sleeps.store(1);
    if (t.state.load() != kDone) {
      if (c->reading.try_lock()) {
        read = true;
        c->sleep_for_all(left);
        c->reading.unlock();
      } else {
        c->sleepers.fetch_add(1);
        sleep_while(t.calls, calls, left);
        c->sleepers.fetch_sub(1);
      }
    }
    t.sleeps.store(0);
    there = came(t, id);
    if (read) c->hand_on(), read = false;
  }
  if (!there) return how;
  const uint64_t usual = c->usual_ns.load(std::memory_order_relaxed), took = now_ns() - begin;
  c->usual_ns.store(usual - usual / 8 + took / 8, std::memory_order_relaxed);
  memcpy(static_cast<void*>(answer), &t.answer, t.answer.refused ? sizeof t.answer : offsetof(Completion, text));
  return kAnswered;
}

// A ticket that was to be waited for is announced from now on.  1: its answer is there already, and nobody names it.
API int expertd_shm_announce(Client* c, uint64_t id) {
  Ticket& t = c->ticket(id);
  if (t.id.load() != id) return 0;
  c->announced.fetch_add(1);
  t.announced.store(true);
  if (t.state.load() == kDone && t.announced.exchange(false)) {
    c->announced.fetch_sub(1);
    return 1;
  }
  c->idle.store(0);
  ring(c->news);
  return 0;
}

// send() and then wait().
API int expertd_shm_call(Client* c, Submission* s, const Tensors* tensors, int64_t timeout_ns, int64_t spin_ns,
                         Completion* answer, uint64_t* ticket) {
  const int sent = expertd_shm_send(c, s, tensors, 0, ticket);
  return sent != kSent ? sent : expertd_shm_wait(c, *ticket, timeout_ns, spin_ns, answer);
}

API void expertd_shm_release(Client* c, uint64_t id);

// A request whose tensors all lie in the arena, sent and waited for; its ticket is given back.  kTimedOut: *ticket is in
// flight, for wait() and release().
API int expertd_shm_exchange(Client* c, const Submission* s, int64_t timeout_ns, int64_t spin_ns, Completion* answer,
                             uint64_t* ticket) {
  *ticket = expertd_shm_submit(c, s, kNobody, 0);
  if (!*ticket) return c->over() ? kEnded : kCrowded;
  const int how = expertd_shm_wait(c, *ticket, timeout_ns, spin_ns, answer);
  if (how == kAnswered) expertd_shm_release(c, *ticket);
  return how;
}

// For one thread that looks after what is announced, and after `other`, a descriptor that becomes readable when the
// session ends: the tickets whose answers have come, at most `most`; 0: the time was over, `other` is readable, or the
// session is over.
API uint32_t expertd_shm_watch(Client* c, int other, uint64_t* ids, uint32_t most, int64_t timeout_ns, int64_t spin_ns) {
  const uint64_t begin = now_ns(), end = begin + uint64_t(timeout_ns);
  uint64_t spin_end = begin + uint64_t(spin_ns);
  for (;;) {
    if (c->announced.load() && c->reading.try_lock()) {
      c->read_completions();
      uint32_t n = c->take_ready(ids, most);
      if (!n && now_ns() >= spin_end) {
        c->sleep_for_all(int64_t(end - std::min(end, now_ns())), other);
        n = c->take_ready(ids, most);
      }
      c->reading.unlock();
      if (n) return c->hand_on(), n;
      if (c->over() || now_ns() >= end || readable(other)) return c->hand_on(), 0;
      relax();
      continue;
    }
    c->idle.store(1);  // then the look at what is there
    if (c->reading.try_lock()) {
      const uint32_t n = c->take_ready(ids, most);
      c->reading.unlock();
      if (n) return n;
      if (c->announced.load()) continue;
    }  // else whoever reads rings when he has something, or reads no more
    const uint64_t now = now_ns();
    if (c->over() || now >= end || readable(other)) return 0;
    sleep_on(c->news, int64_t(end - now), other);
    spin_end = now_ns() + uint64_t(spin_ns);
  }
}

// The answer of a ticket that watch() or drain() named.
API void expertd_shm_answer(Client* c, uint64_t id, Completion* answer) {
  const Ticket& t = c->ticket(id);
  memcpy(static_cast<void*>(answer), &t.answer, t.answer.refused ? sizeof t.answer : offsetof(Completion, text));
}

// For an event loop that watches the client's bell: the tickets whose answers came, at most `most`.  Where there are
// none the bell is armed, so that the next answer rings it.
API uint32_t expertd_shm_drain(Client* c, uint64_t* ids, uint32_t most) {
  const std::lock_guard<std::mutex> lock(c->reading);
  sleep_on(c->client_bell, 0);
  c->read_completions();
  if (c->ready.empty()) {
    c->control->client.sleeps.store(1, std::memory_order_seq_cst);
    c->read_completions();
  }
  return c->take_ready(ids, most);
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
  wake(c->control->server, c->server_bell);
}

// Everybody who waits learns that the session is over.
API void expertd_shm_end(Client* c) {
  c->ended.store(true, std::memory_order_release);
  ring(c->client_bell);
  ring(c->news);
  for (uint32_t i = 0; i < c->entries; ++i)
    if (c->tickets[i].sleeps.load()) wake_sleeper(c->tickets[i].calls);
}

// A call from a device comes soon: a device cannot ring.
API void expertd_shm_wake(Client* c) { wake(c->control->server, c->server_bell); }

API int expertd_shm_over(Client* c) { return c->over(); }

API uint64_t expertd_shm_blocks(Client* c) {
  const std::lock_guard<std::mutex> lock(c->submitting);
  return c->arena.blocks();
}
