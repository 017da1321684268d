// The client's side of a TCP session: tickets for what is in flight, frames out and in, and waiting for answers.
// Thread-safe.
//
// As in shared memory (expertd/shm/csrc/client.cpp) a thread that sent a request may wait for its answer itself: one of
// those that wait reads the socket for all.  Requests that nobody waits for are announced: a thread (watch) or an event
// loop (drain) gets the tickets whose answers have come.
#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "frame.h"
#include "layout.h"
#include "wait.h"
#include "wire.h"

#define API extern "C" __attribute__((visibility("default")))

using expertd::shm::Completion;
using expertd::shm::now_ns;
using expertd::shm::Submission;
using expertd::tcp::Buffer;
using expertd::tcp::Fields;
using expertd::tcp::Head;
using expertd::tcp::Pool;
using expertd::tcp::Tensor;
using expertd::tcp::Writer;

namespace {

constexpr uint32_t kEntries = 256;      // requests in flight, a power of two
constexpr uint64_t kSlack = 64 << 10;   // of an answer, beside its output
constexpr uint64_t kKept = 128 << 20;   // bytes of unused buffers
constexpr uint64_t kMostWaiting = 64 << 20;
// Bytes that wait for the socket: a request beyond them is not taken.
constexpr uint64_t kSliceNs = 100000000;
constexpr uint32_t kE4m3 = 4, kBlock = 128;

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t timeout_ns) {
  const timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &t, nullptr, 0);
}

void wake_sleeper(std::atomic<uint32_t>& word) {
  word.fetch_add(1);
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void drain_bell(int bell) { expertd::shm::sleep_on(bell, 0); }

enum State : uint32_t { kFree, kInFlight, kAbandoned, kDone };
enum Sent { kSent = 0, kNoRoom = 3, kCrowded = 4 };
enum Waited { kAnswered = 0, kTimedOut = 1, kEnded = 2 };

struct Ticket {
  std::atomic<uint32_t> state{kFree};
  std::atomic<uint32_t> calls{0};   // grows whenever its waiter has to look again
  std::atomic<uint32_t> sleeps{0};  // its waiter sleeps on `calls`, or is about to
  std::atomic<bool> announced{false};
  std::atomic<uint64_t> id{0};
  uint64_t rows = 0, columns = 0, out_bytes = 0;
  uint32_t out_dtype = 0;
  Buffer memory;  // of the answer
  const uint8_t* output = nullptr;
  Completion answer;
};

// Where a request's tensors lie in this process.
struct Tensors {
  const void *hidden, *scales, *ids, *weights;
  uint64_t hidden_bytes, scales_bytes, ids_bytes, weights_bytes, out_bytes;
};

struct Parts {
  iovec at[12];
  size_t n = 0;
  uint64_t bytes = 0;

  void add(const void* from, uint64_t size) {
    if (!size) return;
    at[n++] = {const_cast<void*>(from), size};
    bytes += size;
  }
  // What is left after `sent` bytes.
  void skip(uint64_t sent) {
    bytes -= sent;
    size_t i = 0;
    for (; i < n && sent >= at[i].iov_len; ++i) sent -= at[i].iov_len;
    std::copy(at + i, at + n, at);
    n -= i;
    if (n) at[0] = {static_cast<char*>(at[0].iov_base) + sent, at[0].iov_len - sent};
  }
};

struct Client {
  explicit Client(int fd) : fd(fd), news(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), pool(kKept), tickets(new Ticket[kEntries]) {
    for (uint32_t i = kEntries; i-- > 0;) unused.push_back(i);
  }
  ~Client() {
    for (uint32_t i = 0; i < kEntries; ++i) free(tickets[i].memory.base);
    free(body.base);
    close(news);
  }

  const int fd;    // its owner closes it
  const int news;  // rings for the thread that watches: announced answers have come, or nobody else reads or writes any more

  std::mutex holding;  // unused, made, pool, taken
  std::vector<uint32_t> unused;
  uint64_t made = 0, taken = 0;
  Pool pool;
  std::unique_ptr<Ticket[]> tickets;

  std::mutex writing;  // those below
  uint32_t sent = 0;
  std::deque<std::string> outbox;  // of frames that the socket did not take whole
  uint64_t written = 0;            // of the first
  std::atomic<uint64_t> waiting{0};  // bytes in the outbox

  std::mutex reading;  // those below
  Head head{};
  uint32_t have = 0, received = 0;
  Buffer body;
  uint64_t got = 0;

  std::mutex listing;
  std::vector<uint64_t> ready;  // announced tickets whose answers have come
  std::atomic<uint32_t> readies{0};


  std::atomic<uint64_t> largest{0};    // output that was asked for
  std::atomic<uint32_t> announced{0};  // in flight
  std::atomic<uint32_t> idle{0};       // the thread that watches sleeps until there is something announced
  std::atomic<uint32_t> sleepers{0};   // threads that sleep on their tickets
  std::atomic<uint64_t> usual_ns{0};   // of a wait, recently
  std::atomic<bool> ended{false};

  bool over() const { return ended.load(std::memory_order_acquire); }
  Ticket& ticket(uint64_t id) { return tickets[id & (kEntries - 1)]; }

  void end() {
    if (ended.exchange(true)) return;
    shutdown(fd, SHUT_RDWR);
    ring(news);
    for (uint32_t i = 0; i < kEntries; ++i)
      if (tickets[i].sleeps.load()) wake_sleeper(tickets[i].calls);
  }

  Buffer take(uint64_t bytes, uint64_t lead) {
    const std::lock_guard<std::mutex> lock(holding);
    return pool.take(bytes, lead);
  }

  // ---- tickets

  // 0: as many as there are are in flight.
  uint64_t new_ticket(const Submission& s, uint64_t out_bytes, bool announce) {
    const std::lock_guard<std::mutex> lock(holding);
    if (unused.empty() || over()) return 0;
    const uint32_t index = unused.back();
    unused.pop_back();
    Ticket& t = tickets[index];
    t.id = ++made * kEntries + index;
    t.rows = s.tokens;
    t.columns = s.hidden_size;
    t.out_bytes = out_bytes;
    t.out_dtype = s.out_dtype;
    t.announced = announce;
    t.output = nullptr;
    t.state.store(kInFlight, std::memory_order_release);
    if (announce) announced.fetch_add(1);
    if (out_bytes > largest.load()) largest.store(out_bytes);
    ++taken;
    return t.id;
  }

  void free_ticket(uint64_t id) {
    Ticket& t = ticket(id);
    const std::lock_guard<std::mutex> lock(holding);
    pool.give(&t.memory);
    t.id = 0;
    t.state.store(kFree, std::memory_order_relaxed);
    unused.push_back(uint32_t(id & (kEntries - 1)));
    --taken;
  }

  // ---- frames out, with `writing` held

  // What the socket takes at once.  False: the session is over.
  bool write_some(Parts* parts) {
    while (parts->n) {
      msghdr h{};
      h.msg_iov = parts->at;
      h.msg_iovlen = parts->n;
      const ssize_t n = sendmsg(fd, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN || (end(), false);
      parts->skip(uint64_t(n));
    }
    return true;
  }

  void keep(const Parts& parts) {
    if (!parts.n) return;
    std::string rest;
    rest.reserve(parts.bytes);
    for (size_t i = 0; i < parts.n; ++i) rest.append(static_cast<const char*>(parts.at[i].iov_base), parts.at[i].iov_len);
    waiting.fetch_add(rest.size());
    outbox.push_back(std::move(rest));
  }

  void flush() {
    while (!outbox.empty()) {
      Parts parts;
      parts.add(outbox.front().data() + written, outbox.front().size() - written);
      const uint64_t before = parts.bytes;
      if (!write_some(&parts)) return;
      written += before - parts.bytes;
      waiting.fetch_sub(before - parts.bytes);
      if (parts.n) return;
      outbox.pop_front();
      written = 0;
    }
  }

  // ---- frames in, with `reading` held

  // What has come; false: nothing.
  bool read_some() {
    bool any = false;
    while (!over()) {
      ssize_t n;
      if (have < sizeof head) {
        n = recv(fd, reinterpret_cast<char*>(&head) + have, sizeof head - have, MSG_DONTWAIT);
        if (n > 0 && (have += uint32_t(n)) == sizeof head && !begin()) return end(), any;
      } else {
        n = recv(fd, body.at + got, head.length - got, MSG_DONTWAIT);
        if (n > 0) got += uint64_t(n);
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return any;
      if (n <= 0) return end(), any;
      if (have == sizeof head && got == head.length) {
        have = 0;
        got = 0;
        if (!message()) return end(), any;
        any = true;
        if (!readies.load()) return true;  // one at a time, for whoever waits for it
      }
    }
    return any;
  }

  bool begin() {
    if (head.magic != expertd::tcp::kMagic || head.sequence != received + 1 || head.length == 0) return false;
    if (head.length > largest.load() + kSlack) return false;
    ++received;
    got = 0;
    body = take(head.length, std::min(head.lead, head.length));
    return bool(body);
  }

  // False: it is none.
  bool message() {
    Fields fields(body.at, head.length), inner;
    uint32_t kind = 0;
    while (fields.next())
      if (fields.kind == 2) {
        kind = fields.number;
        inner = fields.inside();
      }
    bool good = fields.good;
    if (good && kind == 1) good = forward(inner);
    if (good && kind == 2) good = error(inner);
    const std::lock_guard<std::mutex> lock(holding);
    pool.give(&body);  // unless a ticket has it
    return good;
  }

  Ticket* in_flight(uint64_t id) {
    Ticket& t = ticket(id);
    const uint32_t state = t.state.load(std::memory_order_acquire);
    return t.id == id && id && (state == kInFlight || state == kAbandoned) ? &t : nullptr;
  }

  bool forward(Fields f) {
    uint64_t id = 0, routes = 0;
    Tensor output;
    Fields timing, load;
    bool good = true;
    while (f.next()) {
      if (f.number == 1 && f.kind == 0) id = f.value;
      if (f.number == 2 && f.kind == 2) good &= output.read(f.inside());
      if (f.number == 4 && f.kind == 0) routes = f.value;
      if (f.number == 5 && f.kind == 2) timing = f.inside();
      if (f.number == 6 && f.kind == 2) load = f.inside();
    }
    if (!good || !f.good) return false;
    Ticket* t = in_flight(id);
    if (!t) return true;
    Completion& c = t->answer;
    memset(static_cast<void*>(&c), 0, offsetof(Completion, text));
    c.id = id;
    c.routes_computed = uint32_t(routes);
    while (timing.next()) {
      const auto ns = uint32_t(timing.value);
      if (timing.number == 2) c.queue_ns = ns;
      if (timing.number == 3) c.collect_ns = ns;
      if (timing.number == 4) c.kernel_ns = ns;
      if (timing.number == 5) c.deliver_ns = ns;
      if (timing.number == 7) c.batch_tokens = ns;
      if (timing.number == 8) c.batch_requests = ns;
      if (timing.number == 9 && timing.kind == 2) memcpy(c.name, timing.data, std::min<uint64_t>(timing.bytes, sizeof c.name - 1));
      if (timing.number == 10) c.arrival_ns = timing.value;
    }
    while (load.next()) {
      if (load.number == 1) c.queued_tokens = uint32_t(load.value);
      if (load.number == 2) c.queued_requests = uint32_t(load.value);
      if (load.number == 3 && load.kind == 5) memcpy(&c.token_ns, &load.value, sizeof c.token_ns);
    }
    const bool fits = output.there && !output.odd && output.dtype == t->out_dtype && output.rank == 2 &&
                      output.shape[0] == t->rows && output.shape[1] == t->columns && output.bytes == t->out_bytes;
    if (fits) {
      std::swap(t->memory, body);
      t->output = output.raw;
    } else {
      refuse(c, "BAD_RESPONSE", 12, "answer: got an output of another type or shape, want those that were asked for", 0);
    }
    done(t, id);
    return true;
  }

  bool error(Fields f) {
    uint64_t id = 0, retry_after_us = 0;
    Fields reason, message;
    const char *r = "", *m = "";
    uint64_t rn = 0, mn = 0;
    while (f.next()) {
      if (f.number == 1 && f.kind == 0) id = f.value;
      if (f.number == 3 && f.kind == 2) r = reinterpret_cast<const char*>(f.data), rn = f.bytes;
      if (f.number == 4 && f.kind == 2) m = reinterpret_cast<const char*>(f.data), mn = f.bytes;
      if (f.number == 6 && f.kind == 0) retry_after_us = f.value;
    }
    if (!f.good || !id) return false;  // without an id nobody knows whose it is
    Ticket* t = in_flight(id);
    if (!t) return true;
    memset(static_cast<void*>(&t->answer), 0, sizeof t->answer);
    t->answer.id = id;
    t->answer.retry_after_us = uint32_t(std::min<uint64_t>(retry_after_us, UINT32_MAX));
    refuse(t->answer, r, rn, m, mn);
    done(t, id);
    return true;
  }

  static void refuse(Completion& c, const char* reason, uint64_t rn, const char* text, uint64_t tn) {
    c.refused = 1;
    if (!tn) tn = strlen(text);
    memset(c.name, 0, sizeof c.name);
    memset(c.text, 0, sizeof c.text);
    memcpy(c.name, reason, std::min<uint64_t>(rn, sizeof c.name - 1));
    memcpy(c.text, text, std::min<uint64_t>(tn, sizeof c.text - 1));
  }

  void done(Ticket* t, uint64_t id) {
    uint32_t expected = kInFlight;
    const bool wanted = t->state.compare_exchange_strong(expected, kDone);
    const bool announce = t->announced.exchange(false);  // after the state: see expertd_tcp_announce
    if (announce) announced.fetch_sub(1);
    if (!wanted)
      free_ticket(id);
    else if (announce)
      list(id);
    else if (t->sleeps.load())
      wake_sleeper(t->calls);
  }

  void list(uint64_t id) {
    const std::lock_guard<std::mutex> lock(listing);
    ready.push_back(id);
    readies.store(uint32_t(ready.size()));
  }

  uint32_t take_ready(uint64_t* ids, uint32_t most) {
    const std::lock_guard<std::mutex> lock(listing);
    const auto n = long(std::min<size_t>(most, ready.size()));
    std::copy_n(ready.begin(), n, ids);
    ready.erase(ready.begin(), ready.begin() + n);
    readies.store(uint32_t(ready.size()));
    return uint32_t(n);
  }

  // Until something comes, what waits can be written, `other` rings, or the time is over.
  void sleep_for_all(int64_t timeout_ns, int other = -1) {
    pollfd p[2] = {{fd, short(POLLIN | (waiting.load() ? POLLOUT : 0)), 0}, {other, POLLIN, 0}};
    const timespec t{timeout_ns / 1000000000, timeout_ns % 1000000000};
    if (ppoll(p, other < 0 ? 1 : 2, &t, nullptr) <= 0) return;
    if (other >= 0 && p[1].revents) drain_bell(other);
    if (p[0].revents & POLLOUT && writing.try_lock()) {
      flush();
      writing.unlock();
    }
    if (p[0].revents & ~POLLOUT) read_some();
  }

  // After `reading` was given back by one who reads no more: somebody else has to.  watches: it is the thread that
  // watches.
  void hand_on(bool watches) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!watches && (announced.load() || waiting.load())) ring(news);
    if (!sleepers.load()) return;
    for (uint32_t i = 0; i < kEntries; ++i)
      if (tickets[i].sleeps.load() && tickets[i].state.load() == kInFlight) return wake_sleeper(tickets[i].calls);
  }

  static void ring(int bell) { expertd::shm::ring(bell); }
};

// The message before, between and after the tensors.
struct Frame {
  std::string head, ids, weights, tail, scales;
  Parts parts;

  Frame(const Submission& s, const Tensors& t, uint64_t id, uint32_t sequence) {
    using expertd::tcp::tensor_head;
    const uint64_t M = s.tokens, k = s.top_k;
    const bool scaled = s.hidden_dtype == kE4m3;
    if (scaled) scales = expertd::tcp::scales_field(kBlock, t.scales_bytes);
    const std::string x = tensor_head(s.hidden_dtype, M, s.hidden_size, t.hidden_bytes);
    const uint64_t x_bytes = x.size() + t.hidden_bytes + scales.size() + (scaled ? t.scales_bytes : 0);
    std::string first;
    Writer w(&first);
    w.number(1, id);
    w.number(2, s.layer);
    w.open(3, x_bytes);
    first += x;
    tensor(&ids, 4, s.ids_dtype, M, k, t.ids_bytes);
    tensor(&weights, 5, s.weights_dtype, M, k, t.weights_bytes);
    const uint64_t now = now_ns();
    Writer last(&tail);
    if (s.deadline_ns) last.number(7, s.deadline_ns > now ? (s.deadline_ns - now) / 1000 + 1 : 1);
    last.number(8, s.out_dtype);
    last.number(11, s.flags & expertd::shm::kRouterWeightOnInput ? 1 : 0);
    const uint64_t inner = first.size() + t.hidden_bytes + scales.size() + (scaled ? t.scales_bytes : 0) + ids.size() +
                           t.ids_bytes + weights.size() + t.weights_bytes + tail.size();
    std::string message;
    Writer(&message).open(1, inner);
    const Head h{expertd::tcp::kMagic, uint32_t(message.size() + inner), sequence, uint32_t(message.size() + first.size())};
    head.assign(reinterpret_cast<const char*>(&h), sizeof h);
    head += message + first;
    parts.add(head.data(), head.size());
    parts.add(t.hidden, t.hidden_bytes);
    if (scaled) {
      parts.add(scales.data(), scales.size());
      parts.add(t.scales, t.scales_bytes);
    }
    parts.add(ids.data(), ids.size());
    parts.add(t.ids, t.ids_bytes);
    parts.add(weights.data(), weights.size());
    parts.add(t.weights, t.weights_bytes);
    parts.add(tail.data(), tail.size());
  }

  static void tensor(std::string* out, uint32_t field, uint32_t dtype, uint64_t rows, uint64_t columns, uint64_t bytes) {
    const std::string inner = expertd::tcp::tensor_head(dtype, rows, columns, bytes);
    Writer(out).open(field, inner.size() + bytes);
    *out += inner;
  }
};

// Whether the answer of `id` has come; false, too, where another thread gave the ticket up.
bool came(const Ticket& t, uint64_t id) {
  return t.state.load(std::memory_order_acquire) == kDone && t.id.load() == id;
}

bool spin_for(Client* c, Ticket& t, uint64_t id, uint64_t until) {
  for (;;) {
    for (int i = 0; i < 4; ++i) {
      if (came(t, id)) return true;
      if (c->reading.try_lock()) {
        c->read_some();
        const bool news = c->readies.load() != 0;
        c->reading.unlock();
        if (news) Client::ring(c->news);
      }
    }
    if (c->over() || now_ns() >= until) return came(t, id);
  }
}

// Sends the rest of a frame while it reads: with `writing` held, until end.  What is left then is copied.
void write_all(Client* c, Parts* parts, uint64_t end) {
  while (parts->n && !c->over()) {
    const uint64_t now = now_ns();
    if (now >= end) break;
    const bool reads = c->reading.try_lock();
    pollfd p{c->fd, short(POLLOUT | (reads ? POLLIN : 0)), 0};
    const timespec t{0, long(std::min<uint64_t>(end - now, kSliceNs))};
    const int n = ppoll(&p, 1, &t, nullptr);
    if (reads) {
      if (n > 0 && p.revents & ~POLLOUT) c->read_some();
      const bool news = c->readies.load() != 0;
      c->reading.unlock();
      if (news) Client::ring(c->news);
    }
    if (n > 0 && p.revents & POLLOUT) c->write_some(parts);
  }
  c->keep(*parts);
}

int send(Client* c, const Submission* s, const Tensors* t, bool announced, uint64_t end, uint64_t* ticket) {
  const std::lock_guard<std::mutex> lock(c->writing);
  if (c->waiting.load() > kMostWaiting) return kNoRoom;
  const uint64_t id = c->new_ticket(*s, t->out_bytes, announced);
  if (!id) return kCrowded;
  Frame frame(*s, *t, id, ++c->sent);
  c->flush();
  if (c->waiting.load())
    c->keep(frame.parts);
  else if (c->write_some(&frame.parts) && frame.parts.n)
    end ? write_all(c, &frame.parts, end) : c->keep(frame.parts);
  *ticket = id;
  return kSent;
}

}  // namespace

// Of the structs, for the test that holds layout.py to them.
API void expertd_tcp_sizes(uint64_t* out) {
  out[0] = sizeof(Submission);
  out[1] = sizeof(Completion);
  out[2] = sizeof(Tensors);
  out[3] = sizeof(Head);
}

// fd: of a session that was entered; nonblocking, and closed by its owner after free().
API Client* expertd_tcp_client(int fd) { return new Client(fd); }
API void expertd_tcp_free(Client* c) { delete c; }

// Sends *s with its tensors, which are read before this returns.  announced: nobody waits for it, watch() or drain()
// names it; else wait().  kSent, kNoRoom or kCrowded: then nothing was sent.
API int expertd_tcp_send(Client* c, const Submission* s, const Tensors* t, int announced, uint64_t* ticket) {
  const int how = send(c, s, t, announced != 0, 0, ticket);
  if (how == kSent && (c->waiting.load() || (announced && c->idle.load() && c->idle.exchange(0)))) Client::ring(c->news);
  return how;
}

// Waits for a ticket's answer, which is not announced: spins for spin_ns, then sleeps; timeout_ns < 0: for ever.
API int expertd_tcp_wait(Client* c, uint64_t id, int64_t timeout_ns, int64_t spin_ns, Completion* answer) {
  Ticket& t = c->ticket(id);
  const uint64_t begin = now_ns(), end = timeout_ns < 0 ? ~uint64_t(0) : begin + uint64_t(timeout_ns);
  if (c->usual_ns.load(std::memory_order_relaxed) > 4 * uint64_t(spin_ns)) spin_ns = 0;
  bool there = spin_for(c, t, id, std::min(end, begin + uint64_t(spin_ns)));
  int how = kAnswered;
  while (!there) {
    if (c->over()) how = kEnded;
    const uint64_t now = now_ns();
    if (now >= end) how = kTimedOut;
    if (how != kAnswered) break;
    const int64_t left = int64_t(std::min<uint64_t>(end - now, kSliceNs));
    bool read = false;
    const uint32_t calls = t.calls.load();
    t.sleeps.store(1);
    if (t.state.load() != kDone && !c->over()) {
      if (c->reading.try_lock()) {
        read = true;
        c->sleep_for_all(left);
        const bool news = c->readies.load() != 0;
        c->reading.unlock();
        if (news) Client::ring(c->news);
      } else {
        c->sleepers.fetch_add(1);
        sleep_while(t.calls, calls, left);
        c->sleepers.fetch_sub(1);
      }
    }
    t.sleeps.store(0);
    there = came(t, id);
    if (read && there) c->hand_on(false);
  }
  if (!there) return c->hand_on(false), how;
  const uint64_t usual = c->usual_ns.load(std::memory_order_relaxed), took = now_ns() - begin;
  c->usual_ns.store(usual - usual / 8 + took / 8, std::memory_order_relaxed);
  memcpy(static_cast<void*>(answer), &t.answer, sizeof t.answer);
  return kAnswered;
}

// A ticket that was to be waited for is announced from now on.  1: its answer is there already, and nobody names it.
API int expertd_tcp_announce(Client* c, uint64_t id) {
  Ticket& t = c->ticket(id);
  if (t.id.load() != id) return 0;
  c->announced.fetch_add(1);
  t.announced.store(true);
  if (t.state.load() == kDone && t.announced.exchange(false)) {
    c->announced.fetch_sub(1);
    return 1;
  }
  c->idle.store(0);
  Client::ring(c->news);
  return 0;
}

// send() and then wait().
API int expertd_tcp_call(Client* c, const Submission* s, const Tensors* tensors, int64_t timeout_ns, int64_t spin_ns,
                         Completion* answer, uint64_t* ticket) {
  const uint64_t begin = now_ns(), end = timeout_ns < 0 ? ~uint64_t(0) : begin + uint64_t(timeout_ns);
  const int how = send(c, s, tensors, false, end, ticket);
  if (how != kSent) return how;
  const uint64_t now = now_ns();
  return expertd_tcp_wait(c, *ticket, timeout_ns < 0 ? -1 : int64_t(end > now ? end - now : 0), spin_ns, answer);
}

// For one thread that looks after what is announced, and after bytes that wait for the socket: the tickets whose answers
// have come, at most `most`; 0: the time was over, or the session is.
API uint32_t expertd_tcp_watch(Client* c, uint64_t* ids, uint32_t most, int64_t timeout_ns) {
  const uint64_t end = now_ns() + uint64_t(timeout_ns);
  for (;;) {
    if (const uint32_t n = c->take_ready(ids, most)) return n;
    const uint64_t now = now_ns();
    if (c->over() || now >= end) return 0;
    if ((c->announced.load() || c->waiting.load()) && c->reading.try_lock()) {
      c->read_some();
      if (!c->readies.load() && !c->over()) c->sleep_for_all(int64_t(end - now), c->news);
      c->reading.unlock();
      c->hand_on(true);
      continue;
    }  // else nothing is to be read, or whoever reads rings when he has something, or reads no more
    c->idle.store(1);  // then the look at what is there
    const bool writes = c->waiting.load();
    if (c->readies.load() || (c->announced.load() && c->reading.try_lock() && (c->reading.unlock(), true))) continue;
    pollfd p[2] = {{c->news, POLLIN, 0}, {c->fd, short(POLLRDHUP | (writes ? POLLOUT : 0)), 0}};
    const timespec t{int64_t(end - now) / 1000000000, int64_t(end - now) % 1000000000};
    if (ppoll(p, 2, &t, nullptr) <= 0) continue;
    if (p[0].revents) drain_bell(c->news);
    if (p[1].revents & POLLOUT && c->writing.try_lock()) {
      c->flush();
      c->writing.unlock();
    }
    if (p[1].revents & ~POLLOUT && c->reading.try_lock()) {  // what it still sent, then its end
      while (c->read_some()) {
      }
      c->reading.unlock();
    }
  }
}

// The answer of a ticket that watch() or drain() named.
API void expertd_tcp_answer(Client* c, uint64_t id, Completion* answer) {
  memcpy(static_cast<void*>(answer), &c->ticket(id).answer, sizeof *answer);
}

// Address of the output of a ticket that was answered and not refused, until it is released.
API uint64_t expertd_tcp_output(Client* c, uint64_t id) { return uint64_t(c->ticket(id).output); }

// For an event loop that watches the socket: the tickets whose answers came, at most `most`.  Writes what waits, too.
API uint32_t expertd_tcp_drain(Client* c, uint64_t* ids, uint32_t most) {
  if (c->waiting.load()) {
    const std::lock_guard<std::mutex> lock(c->writing);
    c->flush();
  }
  const std::lock_guard<std::mutex> lock(c->reading);
  c->read_some();
  return c->take_ready(ids, most);
}

// Bytes that wait for the socket.
API uint64_t expertd_tcp_waiting(Client* c) { return c->waiting.load(); }

// Gives the ticket, and the memory of its answer, back.
API void expertd_tcp_release(Client* c, uint64_t id) {
  Ticket& t = c->ticket(id);
  if (t.id == id && t.state.load(std::memory_order_acquire) == kDone) c->free_ticket(id);
}

// Nobody waits any more: the server is told, and the ticket is given back when it has answered.
API void expertd_tcp_abandon(Client* c, uint64_t id) {
  Ticket& t = c->ticket(id);
  uint32_t expected = kInFlight;
  if (t.id != id) return;
  if (!t.state.compare_exchange_strong(expected, kAbandoned, std::memory_order_acq_rel)) {
    if (expected == kDone) c->free_ticket(id);
    return;
  }
  std::string inner, message, frame;
  Writer(&inner).number(1, id);
  Writer(&message).message(2, inner);
  const std::lock_guard<std::mutex> lock(c->writing);
  const Head h{expertd::tcp::kMagic, uint32_t(message.size()), ++c->sent, 0};
  frame.assign(reinterpret_cast<const char*>(&h), sizeof h);
  frame += message;
  Parts parts;
  parts.add(frame.data(), frame.size());
  c->flush();
  if (!c->waiting.load()) c->write_some(&parts);
  c->keep(parts);
  if (c->waiting.load()) Client::ring(c->news);
}

// Everybody who waits learns that the session is over.
API void expertd_tcp_end(Client* c) { c->end(); }
API int expertd_tcp_over(Client* c) { return c->over(); }

// Tickets that are taken.
API uint64_t expertd_tcp_taken(Client* c) {
  const std::lock_guard<std::mutex> lock(c->holding);
  return c->taken;
}
