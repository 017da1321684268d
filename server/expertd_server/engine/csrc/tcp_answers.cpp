// Sessions over TCP, frames out: answers and refusals, written as the socket takes them.
#include "tcp_connections.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "asked.h"
#include "core_class.h"

namespace expertd {
namespace {

using shm::now_ns;
using tcp::Head;

constexpr size_t kMostParts = 24;  // of one write

}  // namespace

std::string answer_tail(const Outcome& o, const Load& n, uint64_t decode_ns, uint64_t arrival_ns) {
  std::string timing, load, out;
  wire::Writer t(&timing);
  t.number(1, decode_ns);
  t.number(2, o.queue_ns);
  t.number(3, o.collect_ns);
  t.number(4, o.kernel_ns);
  t.number(5, o.deliver_ns);
  t.number(7, o.batch_tokens);
  t.number(8, o.batch_requests);
  t.text(9, o.text, strlen(o.text));
  t.number(10, arrival_ns);
  wire::Writer l(&load);
  l.number(1, n.queued_tokens);
  l.number(2, n.queued_requests);
  l.real(3, n.token_ns);
  l.number(4, n.draining);
  wire::Writer w(&out);
  w.number(4, o.routes_computed);
  w.message(5, timing);
  w.message(6, load);
  w.number(8, o.weights_version);
  return out;
}

void TcpConnections::refuse(TcpConnection* p, uint64_t id, uint32_t reason, uint32_t retry_after_us, const std::string& text) {
  answers_.count(reason);
  if (p->gone) return;
  std::string error;
  wire::Writer w(&error);
  const char* name = reason_name(reason);
  w.number(1, id);
  w.number(2, bounds_.codes[reason]);
  w.text(3, name, strlen(name));
  w.text(4, text.data(), text.size());
  w.number(5, bounds_.retryable[reason]);
  w.number(6, retry_after_us);
  Message m;
  wire::Writer(&m.head).message(2, error);
  send(p, std::move(m));
}

void TcpConnections::finish(Work* work, const Outcome& o) {
  TcpConnection* p = work->connection;
  --p->in_core;
  if (p->gone) buried_ = true;
  if (work->cancelled || p->gone) return free_work(work);
  p->works.erase(work->id);
  if (o.reason) {
    refuse(p, work->id, o.reason, o.retry_after_us, o.text);
    return free_work(work);
  }
  answers_.count(kComputed);
  std::string id, output;
  Message m;
  m.work = work;
  if (work->f.out_dtype == kE4m3) {
    const uint64_t at = e4m3::scales_at(work->f.tokens, work->hidden_size);
    const uint64_t bytes = e4m3::scales_bytes(work->f.tokens, work->hidden_size);
    m.tail = wire::scales_field(uint32_t(e4m3::kBlock), bytes);
    m.tail.append(reinterpret_cast<const char*>(work->out.at) + at, bytes);
  }
  const uint64_t scales = m.tail.size();
  m.tail += answer_tail(o, core_.load(), work->decode_ns, work->f.arrival_ns);
  wire::Writer(&id).number(1, work->id);
  const std::string inner = wire::tensor_head(work->f.out_dtype, work->f.tokens, work->hidden_size, work->out_bytes);
  wire::Writer(&output).open(2, inner.size() + work->out_bytes + scales);
  wire::Writer(&m.head).open(1, id.size() + output.size() + inner.size() + work->out_bytes + m.tail.size());
  m.head += id + output + inner;
  pool_.give(&work->in);
  send(p, std::move(m));
}

void TcpConnections::send(TcpConnection* p, Message&& m) {
  const Head head{tcp::kMagic, uint32_t(m.bytes()), ++p->sent, uint32_t(m.work ? m.head.size() : 0)};
  m.head.insert(0, reinterpret_cast<const char*>(&head), sizeof head);
  unwritten_.fetch_add(1);
  p->outbox.push_back(std::move(m));
  if (p->outbox.size() == 1) flush(p);
  if (!p->gone) watch(p);
}

// Writes as much as the socket takes.
void TcpConnections::flush(TcpConnection* p) {
  while (!p->outbox.empty()) {
    iovec parts[kMostParts];
    size_t n = 0;
    for (const Message& m : p->outbox) {
      if (n + 3 > kMostParts) break;
      uint64_t skip = m.written;
      const auto part = [&](const void* at, uint64_t bytes) {
        if (skip >= bytes) {
          skip -= bytes;
        } else {
          parts[n++] = {const_cast<char*>(static_cast<const char*>(at)) + skip, bytes - skip};
          skip = 0;
        }
      };
      part(m.head.data(), m.head.size());
      if (m.work) part(m.work->out.at, m.work->out_bytes);
      part(m.tail.data(), m.tail.size());
    }
    msghdr h{};
    h.msg_iov = parts;
    h.msg_iovlen = n;
    const ssize_t sent = sendmsg(p->fd, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) return drop(p);
      if (!p->stuck_ns) p->stuck_ns = now_ns();
      break;
    }
    p->stuck_ns = 0;
    for (uint64_t left = uint64_t(sent); left;) {
      Message& m = p->outbox.front();
      const uint64_t more = std::min(left, m.bytes() - m.written);
      m.written += more;
      left -= more;
      if (m.written < m.bytes()) break;
      written(p, &m);
      p->outbox.pop_front();
    }
  }
  watch(p);
}

void TcpConnections::written(TcpConnection*, Message* m) {
  unwritten_.fetch_sub(1);
  if (m->work) free_work(m->work);
  m->work = nullptr;
}

}  // namespace expertd
