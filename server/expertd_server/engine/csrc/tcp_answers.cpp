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
  wire::Timing t;
  t.decode_ns = decode_ns;
  t.queue_ns = o.queue_ns;
  t.copy_in_ns = o.collect_ns;
  t.kernel_ns = o.kernel_ns;
  t.copy_out_ns = o.deliver_ns;
  t.batch_tokens = o.batch_tokens;
  t.batch_requests = o.batch_requests;
  t.backend = o.text;
  t.arrival_ns = arrival_ns;
  wire::Load l;
  l.queued_tokens = n.queued_tokens;
  l.queued_requests = n.queued_requests;
  l.token_ns = n.token_ns;
  l.draining = n.draining;
  const std::string timing = wire::timing_message(t), load = wire::load_message(l);
  wire::ResponseOut r;
  r.routes_computed = o.routes_computed;
  r.weights_version = o.weights_version;
  r.timing = timing;
  r.load = load;
  return wire::response_tail(r);
}

void TcpConnections::refuse(TcpConnection* p, uint64_t id, uint32_t reason, uint32_t retry_after_us, const std::string& text) {
  answers_.count(reason);
  if (p->gone) return;
  wire::RequestError e;
  e.id = id;
  e.code = bounds_.codes[reason];
  e.reason = reason_name(reason);
  e.text = text;
  e.retryable = bounds_.retryable[reason];
  e.retry_after_us = retry_after_us;
  Message m;
  m.head = wire::error_message(e);
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
  wire::TensorOut output{true, work->f.out_dtype, kRaw, work->f.tokens, work->hidden_size, work->out_bytes, 0, 0};
  std::string_view scales;
  if (work->f.out_dtype == kE4m3) {
    output.block = uint32_t(e4m3::kBlock);
    output.scales_bytes = e4m3::scales_bytes(work->f.tokens, work->hidden_size);
    const uint64_t at = e4m3::scales_at(work->f.tokens, work->hidden_size);
    scales = {reinterpret_cast<const char*>(work->out.at) + at, output.scales_bytes};
  }
  const std::string tail = answer_tail(o, core_.load(), work->decode_ns, work->f.arrival_ns);
  wire::ResponseText text(work->id, output, tail.size(), true);
  Message m;
  m.work = work;
  m.head = std::move(text.head);
  m.tail = std::move(text.scales);
  m.tail += scales;
  m.tail += tail;
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
