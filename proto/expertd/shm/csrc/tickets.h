// Requests in flight of one session and those who wait for their answers, whichever way both travel.  Thread-safe.
//
// A thread that sent a request may wait for its answer itself (wait).  One of those that wait reads what comes for all,
// and sleeps for all; when its own has come it wakes another one to do so.  Requests that nobody waits for are announced:
// a thread (watch) or an event loop (drain) gets the tickets whose answers have come.
//
// A way is a struct that derives from Tickets<itself, its ticket> and has
//
//   kLooks, kWatchSpinNs        of one that spins: looks between two at the clock; how long who watches does
//   over()                      whether either side has ended the session
//   look()                      with `reading` held: gives what has come to done(); does not wait
//   sleep_for_all(ns)           with `reading` held: the same, after it has waited for something to come
//   sleep_watching(ns)          with `reading` held, for the thread that watches: the same
//   sleep_idle(ns)              until `news` rings, or the session ends
//   look_for_end()              over() is right afterwards, also where nobody reads
//   send(submission, tensors, announced, end_ns, ticket)    a Sent
//   unwritten()                 whether what was sent has to be carried on by somebody
//   tell_cancel(id)             the server shall not compute it
//   give_back(ticket)           with `holding` held: what belongs to the ticket beside its answer
//   drain(tickets, most)        what look() finds, for an event loop that is told of what comes later
//   unbell()                    with `reading` held: nothing has to tell it, since it looks by itself
#pragma once

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "layout.h"
#include "wait.h"

namespace expertd::shm {

// Where a request's tensors lie in this process.  hidden null: the submission says where in the arena.
struct Tensors {
  const void *hidden, *scales, *ids, *weights;
  uint64_t hidden_bytes, scales_bytes, ids_bytes, weights_bytes, out_bytes;
};

enum State : uint32_t { kFree, kInFlight, kAbandoned, kDone };
enum Sent { kSent = 0, kNoRoom = 3, kCrowded = 4 };  // of the last two nothing was sent
enum Waited { kAnswered = 0, kTimedOut = 1, kEnded = 2 };

constexpr uint64_t kSliceNs = 100000000;  // of a sleep: then the session is looked at again
// When answers usually take longer than so many times the spinning, the thread sleeps at once: a server on the same cores
// needs them.  When they take longer than the spinning it spins for twice that time: to sleep shortly before an answer
// comes costs its waking on top.  Where that is in vain it is seldom tried: the server may need the very core that spins.
constexpr uint64_t kSpinsWorth = 4;

struct Ticket {
  std::atomic<uint32_t> state{kFree};
  std::atomic<uint32_t> calls{0};   // grows whenever its waiter has to look again
  std::atomic<uint32_t> sleeps{0};  // its waiter sleeps on `calls`, or is about to
  std::atomic<bool> announced{false};
  std::atomic<uint64_t> id{0};
  alignas(64) Completion answer;
};

inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t timeout_ns) {
  const timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &t, nullptr, 0);
}

inline void wake_sleeper(std::atomic<uint32_t>& word) {
  word.fetch_add(1);
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline uint64_t end_of(uint64_t begin, int64_t timeout_ns) {
  return timeout_ns < 0 ? ~uint64_t(0) : begin + uint64_t(timeout_ns);
}

inline void copy_answer(const Completion& from, Completion* to) {
  memcpy(static_cast<void*>(to), &from, from.refused ? sizeof from : offsetof(Completion, decode_ns) + sizeof from.decode_ns);
}

template <class Way, class T>
class Tickets {
 public:
  // entries: requests in flight at most, a power of two.
  explicit Tickets(uint32_t entries)
      : entries(entries), news(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), tickets_(new T[entries]) {
    for (uint32_t i = entries; i-- > 0;) unused_.push_back(i);
  }
  ~Tickets() { close(news); }

  const uint32_t entries;
  const int news;  // rings for the thread that watches: announced answers have come, or nobody else reads any more

  std::mutex holding;  // which tickets are free, and what a way keeps for them
  std::mutex reading;  // what comes

  T& ticket(uint64_t id) { return tickets_[id & (entries - 1)]; }
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  bool any_ready() const { return readies_.load() != 0; }

  uint64_t taken() {
    const std::lock_guard<std::mutex> lock(holding);
    return entries - unused_.size();
  }

  // With `holding` held: the id of a ticket that fill() has made ready.  0: as many as there are are in flight, or the
  // session is over.
  template <class Fill>
  uint64_t open(bool announce, Fill fill) {
    if (unused_.empty() || way().over()) return 0;
    const uint32_t index = unused_.back();
    unused_.pop_back();
    T& t = tickets_[index];
    const uint64_t id = ++made_ * entries + index;
    fill(t);
    t.announced = announce;
    t.id = id;
    t.state.store(kInFlight, std::memory_order_release);
    if (announce) announced_.fetch_add(1);
    return id;
  }

  // After an announced request was sent.
  void ring_if_idle() {
    if (idle_.load() && idle_.exchange(0)) ring(news);
  }

  // Of an id that came from the other side: null = nobody's.
  T* in_flight(uint64_t id) {
    T& t = ticket(id);
    const uint32_t state = t.state.load(std::memory_order_acquire);
    return id && t.id == id && (state == kInFlight || state == kAbandoned) ? &t : nullptr;
  }

  // With `reading` held: the answer of one in flight is there.
  void done(T& t, uint64_t id) {
    uint32_t expected = kInFlight;
    const bool wanted = t.state.compare_exchange_strong(expected, kDone);
    const bool announce = t.announced.exchange(false);  // after the state: see announce()
    if (announce) announced_.fetch_sub(1);
    if (!wanted)
      free_ticket(id);
    else if (announce)
      list(id);
    else if (t.sleeps.load())
      wake_sleeper(t.calls);
  }

  // Announced tickets whose answers have come, at most `most`.
  uint32_t take_ready(uint64_t* ids, uint32_t most) {
    if (!readies_.load()) return 0;
    const std::lock_guard<std::mutex> lock(listing_);
    const auto n = long(std::min<size_t>(most, ready_.size()));
    std::copy_n(ready_.begin(), n, ids);
    ready_.erase(ready_.begin(), ready_.begin() + n);
    readies_.store(uint32_t(ready_.size()));
    return uint32_t(n);
  }

  // For an event loop that looks again soon: as drain(), but it is not told of what comes later.
  uint32_t poll(uint64_t* ids, uint32_t most) {
    const std::lock_guard<std::mutex> lock(reading);
    way().unbell();
    way().look();
    return take_ready(ids, most);
  }

  // Waits for a ticket's answer, which is not announced: spins for spin_ns, then sleeps; timeout_ns < 0: for ever.
  Waited wait(uint64_t id, int64_t timeout_ns, int64_t spin_ns, Completion* answer) {
    const uint64_t begin = now_ns();
    const Waited how = wait_until(ticket(id), id, begin, end_of(begin, timeout_ns), spin_ns);
    hand_on(false);
    if (how != kAnswered) return how;
    const uint64_t usual = usual_ns_.load(std::memory_order_relaxed), took = now_ns() - begin;
    usual_ns_.store(usual - usual / 8 + took / 8, std::memory_order_relaxed);
    copy_answer(ticket(id).answer, answer);
    return kAnswered;
  }

  // For one who waits for several sessions: whether the answer of a ticket, which is not announced, has come; -1: it has
  // not, and the session is over.  leave() when he looks no more.
  int see(uint64_t id) {
    const T& t = ticket(id);
    if (came(t, id)) return 1;
    if (reading.try_lock()) {
      way().look();
      reading.unlock();
      if (readies_.load()) tell_news();
    }
    return came(t, id) ? 1 : way().over() ? -1 : 0;
  }

  // send() and then wait(): a Sent, or a Waited.
  int call(Submission* s, const Tensors* tensors, int64_t timeout_ns, int64_t spin_ns, Completion* answer, uint64_t* id) {
    const uint64_t end = end_of(now_ns(), timeout_ns);
    if (const int sent = way().send(s, tensors, false, end, id); sent != kSent) return sent;
    const uint64_t now = now_ns();
    return wait(*id, timeout_ns < 0 ? -1 : int64_t(end > now ? end - now : 0), spin_ns, answer);
  }

  // A ticket that was to be waited for is announced from now on.  True: its answer is there already, and nobody names it.
  bool announce(uint64_t id) {
    T& t = ticket(id);
    if (t.id.load() != id) return false;
    announced_.fetch_add(1);
    t.announced.store(true);
    if (t.state.load() == kDone && t.announced.exchange(false)) {
      announced_.fetch_sub(1);
      return true;
    }
    ring_if_idle();
    return false;
  }

  // Gives the ticket, and what belongs to it, back after its answer was used.
  void release(uint64_t id) {
    T& t = ticket(id);
    if (t.id == id && t.state.load(std::memory_order_acquire) == kDone) free_ticket(id);
  }

  // Nobody waits any more: the server is told, and the ticket is given back when it has answered.
  void abandon(uint64_t id) {
    T& t = ticket(id);
    uint32_t expected = kInFlight;
    if (t.id != id) return;
    if (t.state.compare_exchange_strong(expected, kAbandoned, std::memory_order_acq_rel))
      way().tell_cancel(id);
    else if (expected == kDone)
      free_ticket(id);
  }

  // Everybody who waits learns that the session is over.  False: they know.
  bool end_all() {
    if (ended_.exchange(true)) return false;
    ring(news);
    for (uint32_t i = 0; i < entries; ++i)
      if (tickets_[i].sleeps.load()) wake_sleeper(tickets_[i].calls);
    return true;
  }

  // For one thread that looks after what is announced: the tickets whose answers have come, at most `most`; 0: the time was
  // over, or the session is.
  uint32_t watch(uint64_t* ids, uint32_t most, int64_t timeout_ns) {
    const uint64_t end = end_of(now_ns(), timeout_ns);
    uint64_t spin_end = 0;
    for (;;) {
      if (const uint32_t n = take_ready(ids, most)) return hand_on(true), n;
      const uint64_t now = now_ns();
      way().look_for_end();
      if (way().over() || now >= end) return hand_on(true), 0;
      if (!spin_end) spin_end = now + Way::kWatchSpinNs;
      if ((announced_.load() || way().unwritten()) && reading.try_lock()) {
        way().look();
        if (!readies_.load() && !way().over() && now >= spin_end) way().sleep_watching(int64_t(end - now));
        reading.unlock();
        relax();
        continue;
      }  // else nothing is to be read, or whoever reads rings when he has something, or reads no more
      hand_on(true);
      idle_.store(1);  // then the look at what is there
      if (readies_.load() || (announced_.load() && reading.try_lock() && (reading.unlock(), true))) continue;
      way().sleep_idle(int64_t(end - now));
      spin_end = 0;
    }
  }

  // After `reading` was given back by one who goes on reading: who watches is told of what was found for him.
  void tell_news() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (readies_.load()) ring_if_idle();
  }

  // After `reading` was given back by one who reads no more: somebody else has to.  watches: it is the thread that
  // watches.
  void hand_on(bool watches) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!watches && (announced_.load() || readies_.load())) ring_if_idle();
    if (!sleepers_.load() || !reading.try_lock()) return;  // whoever reads hands on when he is done
    reading.unlock();
    for (uint32_t i = 0; i < entries; ++i)
      if (tickets_[i].sleeps.load() && tickets_[i].state.load() == kInFlight) return wake_sleeper(tickets_[i].calls);
  }

 private:
  Way& way() { return static_cast<Way&>(*this); }

  // Whether the answer of `id` has come; false, too, where another thread gave the ticket up.
  static bool came(const T& t, uint64_t id) {
    return t.state.load(std::memory_order_acquire) == kDone && t.id.load() == id;
  }

  bool spin_for(T& t, uint64_t id, uint64_t until) {
    for (;;) {
      for (int i = 0; i < Way::kLooks; ++i) {
        if (came(t, id)) return true;
        if (reading.try_lock()) {
          way().look();
          reading.unlock();
          if (readies_.load()) tell_news();
        }
        relax();
      }
      if (way().over() || now_ns() >= until) return came(t, id);
    }
  }

  Waited wait_until(T& t, uint64_t id, uint64_t begin, uint64_t end, int64_t spin_ns) {
    const uint64_t usual = usual_ns_.load(std::memory_order_relaxed), most = kSpinsWorth * uint64_t(spin_ns);
    const bool longer = 2 * usual > uint64_t(spin_ns) && usual <= most && longer_.worth();
    spin_ns = usual > most ? 0 : longer ? int64_t(std::min(most, 2 * usual)) : spin_ns;
    bool there = spin_for(t, id, std::min(end, begin + uint64_t(spin_ns)));
    if (longer) longer_.paid(there);
    while (!there) {
      if (way().over()) return kEnded;
      const uint64_t now = now_ns();
      if (now >= end) return kTimedOut;
      sleep_for(t, int64_t(std::min<uint64_t>(end - now, kSliceNs)));
      there = came(t, id);
    }
    return kAnswered;
  }

  // Until its answer has come, it has to look again, or the time is over.
  void sleep_for(T& t, int64_t timeout_ns) {
    const uint32_t calls = t.calls.load();
    sleepers_.fetch_add(1);  // before it finds that another one reads: he looks at this when he is done
    t.sleeps.store(1);
    if (t.state.load() != kDone && !way().over()) {
      if (reading.try_lock()) {
        way().sleep_for_all(timeout_ns);
        reading.unlock();
        tell_news();
      } else {
        sleep_while(t.calls, calls, timeout_ns);
      }
    }
    t.sleeps.store(0);
    sleepers_.fetch_sub(1);
  }

  void free_ticket(uint64_t id) {
    T& t = ticket(id);
    const std::lock_guard<std::mutex> lock(holding);
    way().give_back(t);
    t.id = 0;
    t.state.store(kFree, std::memory_order_relaxed);
    unused_.push_back(uint32_t(id & (entries - 1)));
  }

  void list(uint64_t id) {
    const std::lock_guard<std::mutex> lock(listing_);
    ready_.push_back(id);
    readies_.store(uint32_t(ready_.size()));
  }

  std::unique_ptr<T[]> tickets_;
  std::vector<uint32_t> unused_;  // under `holding`, with made_
  uint64_t made_ = 0;

  std::mutex listing_;
  std::vector<uint64_t> ready_;  // announced tickets whose answers have come
  std::atomic<uint32_t> readies_{0};

  std::atomic<uint32_t> announced_{0};  // in flight
  std::atomic<uint32_t> idle_{0};       // the thread that watches sleeps on `news`, or is about to
  std::atomic<uint32_t> sleepers_{0};   // threads that sleep for their tickets, or are about to
  std::atomic<uint64_t> usual_ns_{0};   // of a wait, recently
  Trial longer_;                        // spinning longer than one is told
  std::atomic<bool> ended_{false};
};

}  // namespace expertd::shm

// The functions that every way exports alike; each says in its own file what is its own.
#define EXPERTD_TICKETS(way, Client)                                                                                   \
  API void expertd_##way##_free(Client* c) { delete c; }                                                               \
  API int expertd_##way##_send(Client* c, Submission* s, const Tensors* t, int announced, uint64_t* id) {              \
    return c->send(s, t, announced != 0, 0, id);                                                                       \
  }                                                                                                                    \
  API int expertd_##way##_call(Client* c, Submission* s, const Tensors* t, int64_t timeout_ns, int64_t spin_ns,        \
                               Completion* answer, uint64_t* id) {                                                     \
    return c->call(s, t, timeout_ns, spin_ns, answer, id);                                                             \
  }                                                                                                                    \
  API int expertd_##way##_wait(Client* c, uint64_t id, int64_t timeout_ns, int64_t spin_ns, Completion* answer) {      \
    return c->wait(id, timeout_ns, spin_ns, answer);                                                                   \
  }                                                                                                                    \
  API int expertd_##way##_see(Client* c, uint64_t id) { return c->see(id); }                                           \
  API void expertd_##way##_leave(Client* c) { c->hand_on(false); }                                                     \
  API int expertd_##way##_announce(Client* c, uint64_t id) { return c->announce(id); }                                 \
  API void expertd_##way##_answer(Client* c, uint64_t id, Completion* answer) {                                        \
    expertd::shm::copy_answer(c->ticket(id).answer, answer);                                                           \
  }                                                                                                                    \
  API uint32_t expertd_##way##_watch(Client* c, uint64_t* ids, uint32_t most, int64_t timeout_ns) {                    \
    return c->watch(ids, most, timeout_ns);                                                                            \
  }                                                                                                                    \
  API uint32_t expertd_##way##_poll(Client* c, uint64_t* ids, uint32_t most) { return c->poll(ids, most); }            \
  API uint32_t expertd_##way##_drain(Client* c, uint64_t* ids, uint32_t most) { return c->drain(ids, most); }          \
  API void expertd_##way##_release(Client* c, uint64_t id) { c->release(id); }                                         \
  API void expertd_##way##_abandon(Client* c, uint64_t id) { c->abandon(id); }                                         \
  API void expertd_##way##_end(Client* c) { c->end(); }                                                                \
  API int expertd_##way##_over(Client* c) { return c->over(); }                                                        \
  API uint64_t expertd_##way##_taken(Client* c) { return c->taken(); }
