// Sessions over TCP: one thread that reads frames, gives their requests to the core, and writes the answers.  A request
// that the core finds time for at once is computed on this thread (Core::compute_here), and nothing is handed over.
//
//   frame -> Work -> Core::submit ... outcome (any thread) -> done_ -> this thread -> frame
//
// Room is reserved before it is taken: a peer that has too much of it, unread answers included, is read no further.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "answers.h"
#include "check.h"
#include "core.h"
#include "frame.h"
#include "wire.h"

namespace expertd {

class Core;

// What every peer must keep to.  How an error travels by its Reason: code and whether it may be retried.
struct TcpBounds {
  uint64_t most_message;  // bytes of one
  uint64_t most_bytes;    // of messages and answers of all peers together; one alone may have it, n of them 4/(3n + 1) each
  uint32_t most_in_flight;
  uint32_t half_ms, unread_ms;  // until half a frame must have grown, and an answer must have been read further
  uint32_t codes[kReasons], retryable[kReasons];
};

struct TcpConnection;

// One request on its way.
struct Work {
  TcpConnection* connection = nullptr;
  uint64_t id = 0, handle = 0;  // the peer's, the core's
  tcp::Buffer in, out;
  uint64_t held = 0, out_bytes = 0;  // of the room for all; of the output's elements
  Forward f{};
  uint32_t hidden_size = 0;
  uint64_t decode_ns = 0;
  bool cancelled = false;
};

// Bytes that a peer is to read: head, the output of a Work, tail.
struct Message {
  std::string head, tail;
  Work* work = nullptr;
  uint64_t written = 0;

  uint64_t bytes() const { return head.size() + (work ? work->out_bytes : 0) + tail.size(); }
};

struct TcpConnection {
  uint64_t handle = 0;
  int fd = -1;
  uint32_t caller = 0;
  tcp::Head head{};
  uint32_t have = 0, received = 0, sent = 0;  // bytes of the head; frames
  tcp::Buffer body;
  uint64_t got = 0, held = 0;  // bytes of the body; room that it has
  uint64_t begun_ns = 0, grown_ns = 0, stuck_ns = 0;  // of half a frame; since when nothing could be written
  std::unordered_map<uint64_t, Work*> works;
  std::deque<Message> outbox;
  uint32_t in_core = 0, watched = 0;
  bool paused = false, gone = false;
};

class TcpConnections : public Sink {
 public:
  TcpConnections(Core& core, Answers& answers, const TcpBounds& bounds);
  ~TcpConnections() override;

  // ---- any thread
  void add(uint64_t handle, int fd, uint32_t caller);  // fd is theirs from now on
  void remove(uint64_t handle);
  void outcome(Work* work, const Outcome& o) override;
  // Handles of peers that are gone; bell() rings when there are some.
  uint32_t gone(uint64_t* handles, uint32_t most);
  int bell() const { return bell_; }
  uint64_t unwritten() const { return unwritten_.load(); }  // answers
  // Nothing is read or written any more.  False: after wait_ms their thread has not ended, because a kernel that it called
  // has not.  They are not to be destroyed then, nor the core: it reads their memory.
  bool stop(uint64_t wait_ms);

 private:
  void run();
  void take_news();
  void tick(uint64_t now);
  void bury();
  void watch(TcpConnection* p);
  void drop(TcpConnection* p);

  void read(TcpConnection* p);
  bool begin(TcpConnection* p);
  void resume();
  void handle(TcpConnection* p);
  void forward(TcpConnection* p, wire::Fields fields, tcp::Buffer in, uint64_t bytes, uint64_t arrival_ns);
  void cancel(TcpConnection* p, wire::Fields fields);
  void finish(Work* work, const Outcome& o);
  void refuse(TcpConnection* p, uint64_t id, uint32_t reason, uint32_t retry_after_us, const std::string& text);
  void refuse(TcpConnection* p, uint64_t id, const Refusal& why) { refuse(p, id, why.reason, 0, why.text); }
  void send(TcpConnection* p, Message&& m);
  void flush(TcpConnection* p);
  void written(TcpConnection* p, Message* m);
  void free_work(Work* work);
  bool reserve(TcpConnection* p, uint64_t bytes);
  void give_back(TcpConnection* p, uint64_t bytes);
  Work* new_work();

  Core& core_;
  Answers& answers_;
  const TcpBounds bounds_;
  tcp::Pool pool_;
  std::vector<std::unique_ptr<TcpConnection>> connections_;
  std::unordered_map<uint64_t, TcpConnection*> by_handle_;
  std::vector<std::unique_ptr<Work>> works_;  // all
  std::vector<Work*> unused_;
  uint64_t held_ = 0;  // room, of all
  bool freed_ = false, buried_ = false;
  int epoll_ = -1, wake_ = -1, bell_ = -1;

  std::mutex mutex_;  // those below
  std::vector<std::pair<Work*, Outcome>> done_, taken_;
  std::vector<std::unique_ptr<TcpConnection>> added_;
  std::vector<uint64_t> removed_, gone_;
  std::atomic<uint64_t> unwritten_{0};
  std::atomic<bool> news_{false}, asleep_{false}, stopping_{false};
  std::promise<void> end_;
  std::future<void> ended_ = end_.get_future();
  std::thread thread_;
};

}  // namespace expertd
