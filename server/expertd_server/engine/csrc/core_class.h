// The engine's core: one thread that takes requests of all transports, forms batches, starts them and hands the answers
// out.  No Python between a request and its answer, except where a batch has no graph: then `run` returns to its caller.
//
//   inline requests (submit, cancel: any thread) \                                   / outcomes (any thread, eventfd)
//   sessions in shared memory (ShmConnection)     > queues -> cut -> batch slot -> finish <
//   layers, sessions that come and go (any thread)/                                  \ completions in the region
//
// core.cpp has the loop, batch_slots.cpp the batches, intake.cpp what comes in, polling.cpp who looks at that while a CPU computes,
// answers.cpp what goes out, batch.cpp the memory.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "answers.h"
#include "batch.h"
#include "core.h"
#include "cuda.h"
#include "layer.h"
#include "queues.h"
#include "server_side.h"

namespace expertd {

enum RunCode : uint32_t { kStopped = 0, kRun = 1, kCheck = 2, kInterrupted = 3 };

struct Command {
  enum Kind { kForward, kAddLayer, kRemoveLayer, kDropKept, kAddGraph, kAddPort, kRemovePort, kCancel } kind;
  uint32_t layer = 0, generation = 0;
  bool keeps = false;  // kAddLayer: the layer that it replaces is computed still for requests that ask for its version
  uint64_t handle = 0;
  Forward forward{};
  Account* account = nullptr;
  uint64_t foreseen_ns = 0;
  Work* work = nullptr;
  std::unique_ptr<Layer> made;
  std::vector<Measured> measured;
  std::unique_ptr<ShmConnection> connection;
  Graphs::Key key{};
  uint32_t rows = 0;
  void* exec = nullptr;
};

class Core {
 public:
  explicit Core(const Config& config);
  ~Core();

  // ---- any thread
  // Why not; where nothing is wrong, *handle names the request until its outcome.
  // work: who gets the outcome, null = outcomes().  at_once: it goes there, with its handle, if it is there on return.
  Refusal submit(const Forward& f, uint64_t* handle, Work* work = nullptr, Outcome* at_once = nullptr);
  // What submit() would say now.  Of `f` no address is looked at.
  Refusal admits(const Forward& f);
  // An answer took so long from its outcome to its caller's connection.
  void went_out(uint64_t ns);
  void command(Command&& c);
  // The check of a request, against the layer of that number as the last command leaves it.
  Refusal check(const RequestFacts& r);
  Refusal not_held(uint32_t layer);
  void drain();  // takes nothing new
  void stop();   // run() returns once everything is answered
  void interrupt();  // run() returns kInterrupted when no batch is under way and what was said before is taken
  Load load();
  // What waits, of all callers together and of one.
  void waiting(uint32_t caller, Waiting* all, Waiting* own) const;
  Answers& answers() { return answers_; }
  bool traces() const { return config_.traces != 0; }
  // The batch that was begun last: its layer and rows.  False: none is under way.
  bool computing(uint32_t* layer, uint32_t* rows) const;

  // ---- before run, or on its thread
  void batch_slot(uint32_t index, const BatchSlotMemory& memory) { batch_slots_[index].memory = memory; }
  bool device(void* compute, void* in, void* out) { return cuda_.load(compute, in, out, config_.batch_slots); }
  // Until there is a batch that has no graph (*out says which), the device is silent for long, or all is over.
  RunCode run(Run* out);
  // The batch that run() returned is computed; text: or failed, and why.
  void done(uint32_t batch_slot, uint64_t kernel_ns, const char* text);
  // The batch that run() returned is launched: the device will write the batch slot's word.
  void launched(uint32_t batch_slot) { batch_slots_[batch_slot].launch_ns = shm::now_ns(); }
  // Answers everything that waits or is under way with `reason`, and takes nothing more.
  void fail_all(uint32_t reason, const char* text);
  // None of the graphs added so far is launched again.  While no batch is under way.
  void forget_graphs();
  // Whether a request waits for that generation of a layer.
  bool waited_for(uint32_t generation) const;

 private:
  enum Started { kNothing, kLaunched, kNeedsRun };
  enum Driver { kOwn, kAsleep, kBorrowed, kComputing };
  static constexpr int kNoGraph = -1;

  void watch(int fd);
  void wake();
  bool sleep(int most_ms);  // false: nothing came
  bool take_bells(const epoll_event* events, int n);
  RunCode hand_over(const Run& run);
  bool waits_for_company(uint64_t now);
  uint64_t delayed_until(uint64_t now) const;

  bool take_inbox();
  void enqueue(const Command& c);
  void obey(Command& c);
  void add_layer(Command& c);
  void remove_layer(uint32_t number);
  void drop_kept();
  Layer* held(uint32_t number, uint64_t version) const;
  Refusal missing(uint32_t number, uint64_t version);
  void remove_port(uint64_t handle);
  void drop_waiting(const ShmConnection* p);
  void forget_closed();
  void retire(std::unique_ptr<Layer> layer);
  void forget_retired();
  void list_serving();
  template <class Which>
  void take_back(const Which& which);
  bool sweep();
  Verdict announce(const Forward& f, uint64_t* handle, Work* work);
  bool poll_ports();
  void accept(ShmConnection* p, const shm::Submission& s, bool called);
  void prepare(ShmConnection* p, const shm::Submission& s, Item* item);
  bool place(const ShmConnection* p, const shm::Submission& s, Item* item, uint32_t hidden_size);
  void echo(Item* item, const LayerFacts& layer);

  Refusal refusal_of(const Verdict& v, const Forward& f, uint64_t now) const;
  void unqueue(Item* item);
  void drop(Item* item, const Layer& layer, uint64_t now);
  bool worth_starting(uint64_t now) const;
  Started start(uint64_t now, Run* out);
  bool call(const BatchSlot& batch_slot, const Run& run);
  bool compute_here(const Forward& f, uint64_t handle, Outcome* at_once);
  void lend_to_poller(const LayerWork& work, uint32_t rows, uint32_t top_k);
  void take_from_poller();
  void run_poller();
  void end_poller();
  Started start_on_device(BatchSlot* batch_slot, bool alone, Run* out);
  int launch_whole(BatchSlot* batch_slot);
  bool sleepy(uint64_t now, uint64_t idle_since) const;
  void rested(uint64_t ns);
  int launch_parts(BatchSlot* batch_slot, bool streamed);
  bool over(const BatchSlot& batch_slot) const;
  BatchSlot* pop();
  void finish(BatchSlot* batch_slot, uint64_t now);
  void fail(BatchSlot* batch_slot, uint32_t reason, const char* text);
  BatchRecord record_of(const BatchSlot& batch_slot) const;
  void leave(BatchSlot* batch_slot, const BatchRecord& r);

  const Config config_;
  Busy busy_;
  Answers answers_;
  std::vector<BatchSlot> batch_slots_;
  std::vector<BatchSlot*> free_;
  std::deque<BatchSlot*> under_way_;  // in the order in which they were started
  std::unordered_map<uint32_t, std::unique_ptr<Layer>> layers_;
  std::unordered_map<uint32_t, std::unique_ptr<Layer>> kept_;    // of the version before, for those who ask for it
  std::vector<std::unique_ptr<Layer>> retired_;  // held no more, but requests wait for them or are computed
  std::vector<Layer*> serving_;  // of layers_, kept_ and retired_
  std::vector<std::unique_ptr<ShmConnection>> shm_connections_;
  Graphs shared_;  // those of any layer
  Accounts accounts_;
  Cut cut_;
  Cuda cuda_;
  Patience patience_;
  // Who may touch what is the core's thread's: it, nobody while it sleeps or computes for long, somebody else meanwhile.
  std::atomic<int> driver_{kOwn};
  std::mutex poller_mutex_;  // closing_ and driver_ where they become true and kComputing
  std::condition_variable computing_;
  std::thread poller_;
  std::atomic<bool> closing_{false};
  bool lent_ = false;
  Run left_{};                     // of a batch that a submitter began and could not compute
  bool refused_ = false;           // there is one
  bool waited_ = false;
  bool expects_ = true;  // a request of whoever rings: the last ring was followed by one
  uint64_t delay_end_ns_ = 0;       // while requests wait for the maximum batching delay; 0 = none does
  std::atomic<uint64_t> begun_{0};  // 1 << 63 | layer << 31 | rows of the batch that was begun last, 0 = it is over
  uint64_t checked_ns_ = 0, last_end_ns_ = 0, called_ns_ = 0, expected_until_ns_ = 0;
  uint64_t usual_rest_ns_ = 0;  // from when there was nothing to do until something came, recently
  int epoll_ = -1, wake_ = -1;

  std::mutex held_mutex_;
  std::map<uint32_t, LayerFacts> held_;  // without their memory; layers_ follows when its command is obeyed

  std::mutex mutex_;  // inbox_, next_handle_
  std::vector<Command> inbox_, taken_;  // in the order in which it came
  uint64_t next_handle_ = 1;
  std::atomic<bool> incoming_{false}, draining_{false}, stopping_{false}, asleep_{false}, interrupted_{false};
};

}  // namespace expertd
