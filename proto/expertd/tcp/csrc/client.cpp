// The client's side of a TCP session: frames out and in, and tickets for what is in flight (expertd/shm/csrc/tickets.h).
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>

#include "e4m3.h"
#include "frame.h"
#include "layout.h"
#include "read_answer.h"
#include "request_frame.h"
#include "tickets.h"
#include "wait.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd::tcp;
using expertd::shm::Completion;
using expertd::shm::now_ns;
using expertd::shm::Sent;
using expertd::shm::Submission;
using expertd::shm::Tensors;

namespace {

constexpr uint32_t kEntries = 256;      // requests in flight, a power of two
constexpr uint64_t kSlack = 64 << 10;   // of an answer, beside its output
constexpr uint64_t kKept = 128 << 20;   // bytes of unused buffers
constexpr uint64_t kMostWaiting = 64 << 20;
// Bytes that wait for the socket: a request beyond them is not taken.

timespec timespec_of(int64_t ns) { return {ns / 1000000000, ns % 1000000000}; }

struct Request : expertd::shm::Ticket {
  uint64_t rows = 0, columns = 0, out_bytes = 0;
  uint32_t out_dtype = 0;
  Buffer memory;  // of the answer
  const uint8_t* output = nullptr;

  bool asked_for(const Tensor& t) const {
    const bool scaled = out_dtype == Frame::kE4m3;
    const uint64_t before_scales = expertd::e4m3::scales_at(rows, columns);
    const uint64_t bytes = scaled ? rows * columns : out_bytes, scales_bytes = scaled ? out_bytes - before_scales : 0;
    return t.there && !t.odd && uint32_t(t.dtype) == out_dtype && t.rank == 2 && t.shape[0] == rows && t.shape[1] == columns &&
           t.bytes == bytes && t.scales_bytes == scales_bytes && (!scales_bytes || t.scales >= t.raw + before_scales);
  }

  // Where it was asked for: its scales to where they lie in one piece of memory with the codes, 1 to 4 bytes further up.
  void join(const Tensor& t) const {
    if (!t.scales_bytes) return;
    auto* codes = const_cast<uint8_t*>(t.raw);  // of memory that is this ticket's
    memmove(codes + expertd::e4m3::scales_at(rows, columns), t.scales, t.scales_bytes);
  }
};

struct Client : expertd::shm::Tickets<Client, Request> {
  static constexpr int kLooks = 4;  // a look is a call of the kernel
  static constexpr uint64_t kWatchSpinNs = 0;

  explicit Client(int fd) : Tickets(kEntries), fd(fd), pool(kKept) {}
  ~Client() {
    for (uint32_t i = 0; i < kEntries; ++i) free(ticket(i).memory.base);
    free(body.base);
  }

  const int fd;  // its owner closes it

  Pool pool;  // under `holding`

  std::mutex writing;  // those below
  uint32_t sent = 0;
  std::deque<std::string> outbox;  // of frames that the socket did not take whole
  uint64_t written = 0;            // of the first
  std::atomic<uint64_t> waiting{0};  // bytes in the outbox

  // Under `reading`:
  Head head{};
  uint32_t have = 0, received = 0;
  Buffer body;
  uint64_t got = 0;

  std::atomic<uint64_t> largest{0};  // output that was asked for

  bool over() const { return ended(); }
  bool unwritten() const { return waiting.load() != 0; }

  void give_back(Request& t) { pool.give(&t.memory); }

  void end() {
    if (end_all()) shutdown(fd, SHUT_RDWR);
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

  // Sends the rest of a frame while it reads, until end.  What is left then is copied.
  void write_all(Parts* parts, uint64_t end) {
    while (parts->n && !over()) {
      const uint64_t now = now_ns();
      if (now >= end) break;
      const bool reads = reading.try_lock();
      pollfd p{fd, short(POLLOUT | (reads ? POLLIN : 0)), 0};
      const timespec t = timespec_of(int64_t(std::min<uint64_t>(end - now, expertd::shm::kSliceNs)));
      const int n = ppoll(&p, 1, &t, nullptr);
      if (reads) {
        if (n > 0 && p.revents & ~POLLOUT) look();
        reading.unlock();
        tell_news();
      }
      if (n > 0 && p.revents & POLLOUT) write_some(parts);
    }
    keep(*parts);
  }

  void flush_if_nobody_writes() {
    if (!writing.try_lock()) return;
    flush();
    writing.unlock();
  }

  // ---- and without

  // The tensors are read before this returns.  end: until when it may wait for the socket, 0 = not at all.
  Sent send(const Submission* s, const Tensors* t, bool announce, uint64_t end, uint64_t* id) {
    {
      const std::lock_guard<std::mutex> lock(writing);
      if (waiting.load() > kMostWaiting) return expertd::shm::kNoRoom;
      *id = new_ticket(*s, t->out_bytes, announce);
      if (!*id) return expertd::shm::kCrowded;
      Frame frame(*s, *t, *id, ++sent);
      flush();
      if (waiting.load())
        keep(frame.parts);
      else if (write_some(&frame.parts) && frame.parts.n)
        end ? write_all(&frame.parts, end) : keep(frame.parts);
    }
    if (waiting.load())
      expertd::shm::ring(news);
    else if (announce)
      ring_if_idle();
    return expertd::shm::kSent;
  }

  uint64_t new_ticket(const Submission& s, uint64_t out_bytes, bool announce) {
    const std::lock_guard<std::mutex> lock(holding);
    if (out_bytes > largest.load()) largest.store(out_bytes);
    return open(announce, [&](Request& t) {
      t.rows = s.tokens;
      t.columns = s.hidden_size;
      t.out_bytes = out_bytes;
      t.out_dtype = s.out_dtype;
      t.output = nullptr;
    });
  }

  void tell_cancel(uint64_t id) {
    const std::lock_guard<std::mutex> lock(writing);
    const std::string frame = cancel_frame(id, ++sent);
    Parts parts;
    parts.add(frame.data(), frame.size());
    flush();
    if (!waiting.load()) write_some(&parts);
    keep(parts);
    if (waiting.load()) expertd::shm::ring(news);
  }

  // ---- frames in, with `reading` held

  void look() { read_some(); }

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
        if (!any_ready()) return true;  // one at a time, for whoever waits for it
      }
    }
    return any;
  }

  bool begin() {
    if (head.magic != kMagic || head.sequence != received + 1 || head.length == 0) return false;
    if (head.length > largest.load() + kSlack) return false;
    ++received;
    got = 0;
    const std::lock_guard<std::mutex> lock(holding);
    body = pool.take(head.length, std::min(head.lead, head.length));
    return bool(body);
  }

  // False: it is none.
  bool message() {
    Answer answer;
    const bool good = answer.read(Fields(body.at, head.length));
    Request* t = good ? in_flight(answer.completion.id) : nullptr;
    if (t) {
      if (!answer.completion.refused && t->asked_for(answer.output)) {
        t->join(answer.output);
        std::swap(t->memory, body);
        t->output = answer.output.raw;
      } else if (!answer.completion.refused) {
        answer.refuse("BAD_RESPONSE", "answer: got an output of another type or shape, want those that were asked for");
      }
      expertd::shm::copy_answer(answer.completion, &t->answer);
      done(*t, answer.completion.id);
    }
    const std::lock_guard<std::mutex> lock(holding);
    pool.give(&body);  // unless a ticket has it
    return good;
  }

  void sleep_for_all(int64_t timeout_ns) { sleep_reading(timeout_ns, -1); }

  void sleep_watching(int64_t timeout_ns) { sleep_reading(timeout_ns, news); }

  // Until something comes, what waits can be written, `bell` rings, or the time is over.
  void sleep_reading(int64_t timeout_ns, int bell) {
    pollfd p[2] = {{fd, short(POLLIN | (waiting.load() ? POLLOUT : 0)), 0}, {bell, POLLIN, 0}};
    const timespec t = timespec_of(timeout_ns);
    if (ppoll(p, bell < 0 ? 1 : 2, &t, nullptr) <= 0) return;
    if (bell >= 0 && p[1].revents) expertd::shm::sleep_on(bell, 0);
    if (p[0].revents & POLLOUT) flush_if_nobody_writes();
    if (p[0].revents & ~POLLOUT) look();
  }

  // ---- for the thread that watches, or an event loop

  void look_for_end() {}  // who reads sees it, and sleep_idle()

  void sleep_idle(int64_t timeout_ns) {
    pollfd p[2] = {{news, POLLIN, 0}, {fd, short(POLLRDHUP | (waiting.load() ? POLLOUT : 0)), 0}};
    const timespec t = timespec_of(timeout_ns);
    if (ppoll(p, 2, &t, nullptr) <= 0) return;
    if (p[0].revents) expertd::shm::sleep_on(news, 0);
    if (p[1].revents & POLLOUT) flush_if_nobody_writes();
    if (p[1].revents & ~POLLOUT && reading.try_lock()) {  // what it still sent, then its end
      while (read_some()) {
      }
      reading.unlock();
    }
  }

  void unbell() {}  // the socket is readable by itself

  // Writes what waits, too.
  uint32_t drain(uint64_t* ids, uint32_t most) {
    if (waiting.load()) {
      const std::lock_guard<std::mutex> lock(writing);
      flush();
    }
    const std::lock_guard<std::mutex> lock(reading);
    look();
    return take_ready(ids, most);
  }
};

}  // namespace

EXPERTD_TICKETS(tcp, Client)

// Of the structs, for the test that holds layout.py to them.
API void expertd_tcp_sizes(uint64_t* out) {
  out[0] = sizeof(Submission);
  out[1] = sizeof(Completion);
  out[2] = sizeof(Tensors);
  out[3] = sizeof(Head);
}

// fd: of a session that was entered; nonblocking, and closed by its owner after free().
API Client* expertd_tcp_client(int fd) { return new Client(fd); }

// Address of the output of a ticket that was answered and not refused, until it is released.
API uint64_t expertd_tcp_output(Client* c, uint64_t id) { return uint64_t(c->ticket(id).output); }

// Bytes that wait for the socket.
API uint64_t expertd_tcp_waiting(Client* c) { return c->waiting.load(); }
