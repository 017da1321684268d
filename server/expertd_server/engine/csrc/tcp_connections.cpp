#include "tcp_connections.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "core_class.h"
#include "wait.h"

namespace expertd {
namespace {

using shm::now_ns;
using tcp::Head;

constexpr int kTickMs = 200;
constexpr uint64_t kMs = 1000000;
constexpr uint64_t kForEver = uint64_t(1) << 40;  // ms
constexpr uint64_t kWholeFactor = 6;   // half_ms times this is what a whole frame may take
constexpr size_t kMostUnread = 256;    // answers that a peer may leave unread before he is read no further
constexpr uint64_t kKept = 128 << 20;  // bytes of unused buffers

}  // namespace

TcpConnections::TcpConnections(Core& core, Answers& answers, const TcpBounds& bounds)
    : core_(core), answers_(answers), bounds_(bounds), pool_(kKept) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  bell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  epoll_event e{};
  e.events = EPOLLIN;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &e);
  thread_ = std::thread([this] {
    run();
    end_.set_value();
  });
}

TcpConnections::~TcpConnections() {
  stop(kForEver);
  for (auto& p : connections_) {
    if (p->fd >= 0) close(p->fd);
    pool_.give(&p->body);
  }
  for (auto& p : added_) close(p->fd);
  for (auto& work : works_) {  // also what the core has, or had and told of when nobody listened any more
    pool_.give(&work->in);
    pool_.give(&work->out);
  }
  for (int fd : {epoll_, wake_, bell_}) close(fd);
}

// ---- any thread ------------------------------------------------------------------------------------------------------

void TcpConnections::add(uint64_t handle, int fd, uint32_t caller) {
  auto p = std::make_unique<TcpConnection>();
  p->handle = handle;
  p->fd = fd;
  p->caller = caller;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    added_.push_back(std::move(p));
    news_.store(true);
  }
  shm::ring(wake_);
}

void TcpConnections::remove(uint64_t handle) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    removed_.push_back(handle);
    news_.store(true);
  }
  shm::ring(wake_);
}

void TcpConnections::outcome(Work* work, const Outcome& o) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_.emplace_back(work, o);
    news_.store(true);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what was put there, then the look at the sleep
  if (asleep_.load(std::memory_order_relaxed) && asleep_.exchange(false)) shm::ring(wake_);
}

uint32_t TcpConnections::gone(uint64_t* handles, uint32_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  shm::sleep_on(bell_, 0);
  const auto n = long(std::min<size_t>(most, gone_.size()));
  std::copy_n(gone_.begin(), n, handles);
  gone_.erase(gone_.begin(), gone_.begin() + n);
  if (!gone_.empty()) shm::ring(bell_);
  return uint32_t(n);
}

bool TcpConnections::stop(uint64_t wait_ms) {
  if (!thread_.joinable()) return true;
  stopping_.store(true);
  shm::ring(wake_);
  if (ended_.wait_for(std::chrono::milliseconds(std::min(wait_ms, kForEver))) != std::future_status::ready) return false;
  thread_.join();
  return true;
}

// ---- the thread ------------------------------------------------------------------------------------------------------

void TcpConnections::run() {
  uint64_t next_tick = now_ns() + kTickMs * kMs;
  epoll_event events[64];
  while (!stopping_.load()) {
    asleep_.store(true, std::memory_order_seq_cst);
    const int n = epoll_wait(epoll_, events, 64, news_.load(std::memory_order_seq_cst) ? 0 : kTickMs);
    asleep_.store(false, std::memory_order_relaxed);
    for (int i = 0; i < n; ++i) {
      auto* p = static_cast<TcpConnection*>(events[i].data.ptr);
      if (!p) {
        shm::sleep_on(wake_, 0);
        continue;
      }
      if (p->gone) continue;
      if (events[i].events & EPOLLOUT) flush(p);
      if (!p->gone && events[i].events & EPOLLIN) read(p);
      if (!p->gone && events[i].events & (EPOLLERR | EPOLLHUP)) drop(p);
    }
    take_news();
    if (freed_) resume();
    const uint64_t now = now_ns();
    if (now >= next_tick) {
      tick(now);
      next_tick = now + kTickMs * kMs;
    }
    if (buried_) bury();
  }
}

void TcpConnections::take_news() {
  while (news_.load()) {
    std::vector<std::unique_ptr<TcpConnection>> added;
    std::vector<uint64_t> removed;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      news_.store(false);
      taken_.swap(done_);
      added.swap(added_);
      removed.swap(removed_);
    }
    for (auto& p : added) {
      by_handle_[p->handle] = p.get();
      watch(p.get());
      connections_.push_back(std::move(p));
    }
    for (const auto& [work, o] : taken_) finish(work, o);
    taken_.clear();
    for (uint64_t handle : removed)
      if (const auto found = by_handle_.find(handle); found != by_handle_.end()) drop(found->second);
  }
}

// Connections that hold others' room: half a frame that does not grow, answers that are not read.
void TcpConnections::tick(uint64_t now) {
  for (auto& p : connections_) {
    if (p->gone) continue;
    const bool half = p->have && !p->paused;
    if (half && (now - p->grown_ns > bounds_.half_ms * kMs || now - p->begun_ns > kWholeFactor * bounds_.half_ms * kMs))
      drop(p.get());
    else if (p->stuck_ns && now - p->stuck_ns > bounds_.unread_ms * kMs)
      drop(p.get());
  }
}

// What is gone and not in the core any more.
void TcpConnections::bury() {
  buried_ = false;
  const auto over = [&](const std::unique_ptr<TcpConnection>& p) {
    if (!p->gone) return false;
    if (p->in_core) return false;
    by_handle_.erase(p->handle);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      gone_.push_back(p->handle);
    }
    shm::ring(bell_);
    return true;
  };
  connections_.erase(std::remove_if(connections_.begin(), connections_.end(), over), connections_.end());
}

void TcpConnections::watch(TcpConnection* p) {
  epoll_event e{};
  const bool full = p->outbox.size() > kMostUnread;
  e.events = (p->paused || full ? 0u : EPOLLIN) | (p->outbox.empty() ? 0u : EPOLLOUT);
  e.data.ptr = p;
  const uint32_t want = e.events | 1u << 30;  // never 0
  if (p->watched == want) return;
  epoll_ctl(epoll_, p->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, p->fd, &e);
  p->watched = want;
}

void TcpConnections::drop(TcpConnection* p) {
  if (p->gone) return;
  p->gone = buried_ = true;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, p->fd, nullptr);  // not by close(): a child that is being started has a copy
  close(p->fd);
  p->fd = -1;
  pool_.give(&p->body);
  for (Message& m : p->outbox) written(p, &m);
  p->outbox.clear();
  if (p->have == sizeof p->head && !p->paused) give_back(p, p->head.length);
  for (auto& [id, work] : p->works) {
    work->cancelled = true;
    Command c{};
    c.kind = Command::kCancel;
    c.handle = work->handle;
    core_.command(std::move(c));
  }
  p->works.clear();
}

// ---- frames in -------------------------------------------------------------------------------------------------------

void TcpConnections::read(TcpConnection* p) {
  if (p->paused) return;
  if (p->have < sizeof p->head) {
    const ssize_t n = recv(p->fd, reinterpret_cast<char*>(&p->head) + p->have, sizeof p->head - p->have, MSG_DONTWAIT);
    if (n <= 0) {
      if (n == 0 || (errno != EAGAIN && errno != EINTR)) drop(p);
      return;
    }
    p->grown_ns = now_ns();
    if (p->have == 0) p->begun_ns = p->grown_ns;
    p->have += uint32_t(n);
    if (p->have < sizeof p->head) return;
    if (!begin(p)) return;
  }
  const ssize_t n = recv(p->fd, p->body.at + p->got, p->head.length - p->got, MSG_DONTWAIT);
  if (n <= 0) {
    if (n == 0 || (errno != EAGAIN && errno != EINTR)) drop(p);
    return;
  }
  p->grown_ns = now_ns();
  p->got += uint64_t(n);
  if (p->got == p->head.length) handle(p);
}

// The head is there: room for the rest.  False: not now, or never.
bool TcpConnections::begin(TcpConnection* p) {
  const Head& h = p->head;
  if (h.magic != tcp::kMagic || h.sequence != p->received + 1 || h.length == 0 || h.length > bounds_.most_message) {
    p->have = 0;  // nothing was reserved for it
    return drop(p), false;
  }
  if (!reserve(p, h.length)) {
    p->paused = true;
    return watch(p), false;
  }
  p->body = pool_.take(h.length, std::min(h.lead, h.length));
  p->got = 0;
  if (p->body) return true;
  drop(p);  // there is no memory
  return false;
}

// Those who had to wait for room.
void TcpConnections::resume() {
  freed_ = false;
  for (auto& p : connections_) {
    if (!p->paused || p->gone) continue;
    p->paused = false;
    p->begun_ns = p->grown_ns = now_ns();
    if (begin(p.get())) watch(p.get());
  }
}

void TcpConnections::handle(TcpConnection* p) {
  const uint64_t arrival_ns = now_ns(), bytes = p->head.length;
  tcp::Buffer in = p->body;
  p->body = tcp::Buffer{};
  p->have = 0;
  p->got = 0;
  ++p->received;
  wire::Fields fields(in.at, bytes), forwarded;
  uint32_t kind = 0;
  while (fields.next()) {
    if (fields.kind != 2 || fields.number > 3) continue;
    kind = fields.number;
    forwarded = fields.inside();
  }
  if (fields.good && kind == 1) return forward(p, forwarded, in, bytes, arrival_ns);
  pool_.give(&in);
  give_back(p, bytes);
  if (!fields.good)
    refuse(p, 0, refusal<Text::malformed>("StreamForwardRequest"));
  else if (kind == 2)
    cancel(p, forwarded);
  else
    refuse(p, 0, refusal<Text::no_kind>("forward or cancel"));
}

void TcpConnections::cancel(TcpConnection* p, wire::Fields fields) {
  uint64_t id = 0;
  while (fields.next())
    if (fields.number == 1 && fields.kind == 0) id = fields.value;
  const auto found = p->works.find(id);
  if (found == p->works.end()) return;  // answered before the cancel came
  Work* work = found->second;
  work->cancelled = true;
  p->works.erase(found);
  Command c{};
  c.kind = Command::kCancel;
  c.handle = work->handle;
  core_.command(std::move(c));
  refuse(p, id, kCancelled, 0, "request: cancelled by its caller");
}

// ---- room ------------------------------------------------------------------------------------------------------------

// A peer alone may have all; n who want as much as they can get have 4/(3n + 1) of it each (see Accounts).
bool TcpConnections::reserve(TcpConnection* p, uint64_t bytes) {
  if (held_ && p->held + bytes + 3 * (held_ + bytes) > 4 * bounds_.most_bytes) return false;
  p->held += bytes;
  held_ += bytes;
  return true;
}

void TcpConnections::give_back(TcpConnection* p, uint64_t bytes) {
  p->held -= bytes;
  held_ -= bytes;
  freed_ = true;
}

Work* TcpConnections::new_work() {
  if (unused_.empty()) return works_.emplace_back(std::make_unique<Work>()).get();
  Work* work = unused_.back();
  unused_.pop_back();
  return work;
}

void TcpConnections::free_work(Work* work) {
  pool_.give(&work->in);
  pool_.give(&work->out);
  give_back(work->connection, work->held);
  *work = Work{};
  unused_.push_back(work);
}

}  // namespace expertd
