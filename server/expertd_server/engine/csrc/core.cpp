#include "core_class.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace expertd {
namespace {

using shm::now_ns;

// After a batch has taken so long, run() returns, so that its caller checks whether the device is still there.
constexpr uint64_t kCheckNs = 1000000000;
// A second batch is started behind one in flight when that one is expected to end within this time: early enough that the
// device does not wait, late enough that a request of another layer does not wait for two long batches.
constexpr uint64_t kLeadNs = 200000;
// The longest sleep of an idle core.
constexpr int kSleepMs = 1000;
// When idle times are usually longer than kRestsWorth times the spinning, the core sleeps at once: spinning would not see
// their end, and others need these cores.  An idle time counts as at most kLongestRest times the spinning, so that one
// long pause is soon forgotten.
constexpr uint64_t kRestsWorth = 2, kLongestRest = 3;
// A device cannot wake the core.  For kCalledSpinNs after its last call the core spins for the next one; then it looks
// every kCalledSleepMs, or is woken by the host of a client that knows of a call to come.
constexpr uint64_t kCalledSpinNs = 5000000;
constexpr int kCalledSleepMs = 1;
// A client that rings before it sends has a request to come: the core spins for it for kExpectedWorth times the spinning.
constexpr uint64_t kExpectedWorth = 4;
// The end of a shorter batching delay is spun for, because a sleep is counted in milliseconds.
constexpr uint64_t kShortDelayNs = 2000000;

}  // namespace

Core::Core(const Config& config) : config_(config), answers_(busy_), batch_slots_(config.batch_slots), accounts_(config_) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  watch(wake_);
  for (uint32_t i = config.batch_slots; i-- > 0;) {
    batch_slots_[i].index = i;
    free_.push_back(&batch_slots_[i]);
  }
}

Core::~Core() {
  end_poller();
  close(epoll_);
  close(wake_);
}

void Core::watch(int fd) {
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.fd = fd;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e);
}

// ---- any thread ------------------------------------------------------------------------------------------------------

Refusal Core::submit(const Forward& f, uint64_t* handle, Work* work, Outcome* at_once) {
  Verdict v = announce(f, handle, work);
  if (v.reason == kQueueFull && sweep()) v = announce(f, handle, work);
  if (v.reason) return refusal_of(v, f, now_ns());
  if (!compute_here(f, *handle, at_once)) wake();
  return {};
}

// Admits `f` and puts it into the inbox, unless the verdict says why not.
Verdict Core::announce(const Forward& f, uint64_t* handle, Work* work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Verdict v;
  if (draining_) return v.reason = kDraining, v;
  v = accounts_.enter(f, now_ns());
  if (v.reason) return v;
  inbox_.emplace_back();
  inbox_.back().kind = Command::kForward;
  inbox_.back().forward = f;
  inbox_.back().account = v.account;
  inbox_.back().foreseen_ns = v.foreseen_ns;
  inbox_.back().work = work;
  inbox_.back().handle = *handle = next_handle_++;
  incoming_.store(true, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_release);  // waits_for_company: whoever is counted has been announced
  busy_.enter(f.tokens);
  busy_.admitted.fetch_add(1, std::memory_order_relaxed);
  return v;
}

Refusal Core::admits(const Forward& f) {
  const uint64_t now = now_ns();
  return refusal_of(accounts_.enter(f, now, true), f, now);
}

Refusal Core::refusal_of(const Verdict& v, const Forward& f, uint64_t now) const {
  constexpr uint64_t kLongestUs = 1000000000;
  Refusal why;
  switch (v.reason) {
    case kComputed:
      break;
    case kDraining:
      why = refusal<Text::draining>();
      break;
    case kDeadlineExceeded:
      why = refusal<Text::came_late>();
      break;
    case kOverloaded: {
      const double left_ms = (double(f.deadline_ns) - double(now)) * 1e-6;
      const double want_ms = left_ms + double(v.late_ns) * 1e-6;
      why = v.retry_ns ? refusal<Text::would_be_late>(tenths(left_ms), tenths(want_ms))
                       : refusal<Text::too_slow>(tenths(left_ms), tenths(want_ms));
      why.retry_after_us = uint32_t(std::min<uint64_t>((v.retry_ns + 999) / 1000, kLongestUs));
      break;
    }
    default: {
      const Shortage& s = v.shortage;
      why = refusal<Text::queue_full>(s.all, s.unit, s.own, s.more, s.most);
      why.retry_after_us = busy_.retry_after_us();
    }
  }
  return why;
}

void Core::went_out(uint64_t ns) {
  accounts_.forecast([&](Forecast& f) { f.went_out(now_ns(), double(ns)); });
}

// Takes requests that are cancelled or whose deadline has passed out of their queues, so that they hold no room in a full queue: while the core's
// thread sleeps or computes a long batch.  Otherwise it cuts a batch soon, which drops them.  False: nothing has changed.
bool Core::sweep() {
  int before = kComputing;
  if (!driver_.compare_exchange_strong(before, kBorrowed) &&
      (before != kAsleep || !driver_.compare_exchange_strong(before, kBorrowed)))
    return false;
  const uint64_t now = now_ns();
  bool any = take_inbox();  // cancels are there
  for (Layer* layer : serving_)
    for (auto& queue : layer->queues) {
      const auto dead = std::stable_partition(queue.begin(), queue.end(), [&](const Item* i) { return !expired(i->f, now); });
      for (auto it = dead; it != queue.end(); ++it) drop(*it, *layer, now);
      any |= dead != queue.end();
      queue.erase(dead, queue.end());
    }
  if (any) answers_.flush();
  driver_.store(before);
  return any;
}

// On the thread that brought the request `f`, while the core's own sleeps: a brief batch is over before that is awake.
// False: something is left for the core's thread.
bool Core::compute_here(const Forward& f, uint64_t handle, Outcome* at_once) {
  int asleep = kAsleep;
  if (config_.device || config_.max_wait_ns || !driver_.compare_exchange_strong(asleep, kBorrowed)) return false;
  bool all = false;
  const Layer* layer = held(f.layer, f.weights_version);
  const double expected = layer && layer->facts.call ? layer->work->times.expect(f.tokens, f.top_k) : 0;  // 0: not known
  if (expected > 0 && expected <= double(config_.brief_ns) && !interrupted_.load() && !free_.empty()) {
    answers_.await(handle, at_once);
    take_inbox();
    refused_ = start(now_ns(), &left_) == kNeedsRun;
    answers_.await(0, nullptr);
    all = !refused_ && busy_.now(busy_.requests) == 0;
  }
  driver_.store(kAsleep);
  return all;
}

void Core::command(Command&& c) {
  if (c.kind == Command::kAddLayer || c.kind == Command::kRemoveLayer) {
    const std::lock_guard<std::mutex> lock(held_mutex_);
    held_.erase(c.layer);
    if (c.made) held_.emplace(c.layer, c.made->facts);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    inbox_.push_back(std::move(c));
    incoming_.store(true, std::memory_order_seq_cst);
  }
  wake();
}

void Core::drain() {
  const std::lock_guard<std::mutex> lock(mutex_);
  draining_ = true;
}

void Core::stop() {
  stopping_.store(true);
  shm::ring(wake_);
}

Load Core::load() {
  Load l{};
  l.wait_ns = uint64_t(accounts_.forecast([](const Forecast& f) { return f.running_ns(now_ns()) + f.waiting_ns(); }));
  l.queued_tokens = uint32_t(busy_.all_tokens());
  l.queued_requests = uint32_t(busy_.all_requests());
  l.waiting_tokens = uint32_t(busy_.now(busy_.tokens));
  l.waiting_requests = uint32_t(busy_.now(busy_.requests));
  l.token_ns = busy_.token_ns.load(std::memory_order_relaxed);
  l.draining = draining_;
  l.admitted = busy_.admitted.load(std::memory_order_relaxed);
  l.batches = busy_.batches.load(std::memory_order_relaxed);
  l.tokens = busy_.served_tokens.load(std::memory_order_relaxed);
  return l;
}

void Core::waiting(uint32_t caller, Waiting* all, Waiting* own) const {
  *all = accounts_.all();
  *own = accounts_.of(caller);
}

void Core::interrupt() {
  interrupted_.store(true);
  shm::ring(wake_);
}

void Core::forget_graphs() {
  shared_ = Graphs();
  for (Layer* layer : serving_) layer->graphs = Graphs();
}

bool Core::computing(uint32_t* layer, uint32_t* rows) const {
  const uint64_t begun = begun_.load(std::memory_order_relaxed);
  *layer = uint32_t(begun >> 31);
  *rows = uint32_t(begun & 0x7fffffff);
  return begun != 0;
}

bool Core::waited_for(uint32_t generation) const {
  return std::any_of(serving_.begin(), serving_.end(), [&](const Layer* l) {
    return l->facts.generation == generation && (!l->queues[0].empty() || !l->queues[1].empty());
  });
}

void Core::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what was put there, then the look at the core's sleep
  if (asleep_.load(std::memory_order_relaxed)) shm::ring(wake_);
}

// ---- the loop --------------------------------------------------------------------------------------------------------

RunCode Core::run(Run* out) {
  take_from_poller();
  uint64_t now = now_ns(), idle_since = now, rests_since = now;
  for (;;) {
    bool moved = false;
    if (refused_) {
      refused_ = false;
      return hand_over(*out = left_);
    }
    while (!under_way_.empty() && over(*under_way_.front())) {
      finish(pop(), now_ns());
      moved = true;
    }
    const bool told = take_inbox(), came = poll_ports();
    moved |= told || came;
    if (moved) answers_.flush();
    now = now_ns();
    if (came) {
      rested(now - rests_since);
      expected_until_ns_ = 0;
      expects_ = true;
    }
    const bool interrupted = interrupted_.load(std::memory_order_relaxed);
    if (interrupted && under_way_.empty()) {
      interrupted_.exchange(false);  // then what was said before it
      if (take_inbox()) answers_.flush();
      return kInterrupted;
    }
    if (!interrupted && !free_.empty() && worth_starting(now) && !waits_for_company(now)) {
      const Started s = start(now, out);
      if (s == kNeedsRun) return hand_over(*out);
      moved |= s == kLaunched;
    }
    if (moved) {
      idle_since = rests_since = now_ns();
    } else if (!under_way_.empty()) {
      if (now - std::max(under_way_.front()->launch_ns, checked_ns_) > kCheckNs) {
        checked_ns_ = now;
        return kCheck;
      }
      shm::relax();
    } else if (stopping_.load(std::memory_order_relaxed) && busy_.all_requests() == 0) {
      return kStopped;
    } else if (sleepy(now, idle_since)) {
      if (sleep(delay_end_ns_ ? int((delay_end_ns_ - std::min(now, delay_end_ns_)) / 1000000) : kSleepMs)) idle_since = now_ns();
    } else {
      shm::relax();
    }
  }
}

// For Python to compute, or to launch.
RunCode Core::hand_over(const Run& run) {
  lend_to_poller(*batch_slots_[run.batch_slot].layer->work, run.rows, run.top_k);
  return kRun;
}

bool Core::waits_for_company(uint64_t now) {
  delay_end_ns_ = 0;
  if (!under_way_.empty()) return false;
  if (config_.max_wait_ns) {
    delay_end_ns_ = delayed_until(now);
    if (delay_end_ns_) return true;
  }
  if (config_.patience <= 0) return false;
  const uint64_t waiting = busy_.now(busy_.requests);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (incoming_.load(std::memory_order_relaxed)) return true;  // it may count as waiting, and stands in no queue yet
  if (waiting == 0) return false;
  if (now < patience_.until(config_.patience, waiting)) return waited_ = true;
  if (waited_) patience_.waited(waiting);
  return waited_ = false;
}

// Until when a batch waits for more requests although the engine is idle: for max_wait_ns from the arrival of its first,
// unless it is full before.  0 = no longer, or nothing waits.
uint64_t Core::delayed_until(uint64_t now) const {
  uint64_t first = ~uint64_t(0);
  for (const Layer* l : serving_)
    for (const auto& queue : l->queues) {
      uint64_t tokens = 0, top_k = 0;
      for (const Item* item : queue) {
        first = std::min(first, item->f.arrival_ns);
        tokens += item->f.tokens;
        top_k = std::max<uint64_t>(top_k, item->f.top_k);
      }
      const uint64_t most = config_.max_tokens;
      if (tokens >= most || (l->facts.top_k && tokens * top_k > most * l->facts.top_k)) return 0;
    }
  return first != ~uint64_t(0) && now < first + config_.max_wait_ns ? first + config_.max_wait_ns : 0;
}

// A CPU's cores are for its kernels and for the threads that bring requests: it spins only while a caller in shared
// memory may be answered sooner than a thread wakes up, and while their requests come that soon.
bool Core::sleepy(uint64_t now, uint64_t idle_since) const {
  const bool soon = !shm_connections_.empty() && usual_rest_ns_ <= kRestsWorth * config_.spin_ns;
  const uint64_t spin_ns = config_.device || soon ? config_.spin_ns : 0;
  if (delay_end_ns_ && delay_end_ns_ - std::min(now, delay_end_ns_) < kShortDelayNs) return false;
  return now - idle_since > spin_ns && now - called_ns_ > kCalledSpinNs && now >= expected_until_ns_ && !waited_;
}

void Core::rested(uint64_t ns) {
  const uint64_t most = kLongestRest * config_.spin_ns;
  usual_rest_ns_ = usual_rest_ns_ - usual_rest_ns_ / 8 + std::min(ns, most) / 8;
}

bool Core::sleep(int most_ms) {
  bool woken = true;
  asleep_.store(true, std::memory_order_seq_cst);
  for (auto& p : shm_connections_) p->sleeps(true);
  if (!incoming_.load(std::memory_order_seq_cst) && !poll_ports() && !stopping_.load() && !interrupted_.load()) {
    epoll_event events[16];
    const bool devices = std::any_of(shm_connections_.begin(), shm_connections_.end(), [](const auto& p) { return p->has_pool(); });
    driver_.store(kAsleep);
    const int n = epoll_wait(epoll_, events, 16, devices ? kCalledSleepMs : std::min(most_ms, kSleepMs));
    woken = n > 0;
    for (int asleep = kAsleep; !driver_.compare_exchange_weak(asleep, kOwn); asleep = kAsleep)
      stopping_.load(std::memory_order_relaxed) ? usleep(1000) : sched_yield();  // a kernel may hang there
    if (take_bells(events, n) && expects_) {
      expected_until_ns_ = now_ns() + kExpectedWorth * config_.spin_ns;
      expects_ = false;  // who rings in vain is not waited for again
    }
    if (devices && n > 0) called_ns_ = now_ns();  // a host that knows of a call to come
  }
  for (auto& p : shm_connections_) p->sleeps(false);
  asleep_.store(false, std::memory_order_relaxed);
  return woken;
}

// The bells that rang, of what is still here: the descriptor of a connection that was removed meanwhile may be another's already.
// A client that closed its end would ring for ever: who opened its session removes it.  True: a client rang.
bool Core::take_bells(const epoll_event* events, int n) {
  bool rang = false;
  for (int i = 0; i < n; ++i) {
    const int fd = events[i].data.fd;
    if (fd == wake_) {
      shm::hear(fd);
    } else if (std::any_of(shm_connections_.begin(), shm_connections_.end(), [&](const auto& p) { return p->bell == fd; })) {
      if (shm::hear_peer(fd))
        rang = true;
      else
        epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    }
  }
  return rang;
}

// ---- batches ---------------------------------------------------------------------------------------------------------

bool Core::worth_starting(uint64_t now) const {
  if (under_way_.empty()) return true;
  const BatchSlot* last = under_way_.back();
  const double expected = last->layer->work->times.expect(last->rows, last->top_k);
  return expected <= double(now - last->launch_ns + kLeadNs);
}

// `item` waits no more.
void Core::unqueue(Item* item) {
  accounts_.leave(item->account, item->f);
  item->account = nullptr;
}

// `item`, which is in no queue any more, is not computed.
void Core::drop(Item* item, const Layer& layer, uint64_t now) {
  const Forward& f = item->f;
  if (item->foreseen_ns && !item->cancelled)
    accounts_.forecast([&](Forecast& fc) { fc.dropped(now, *layer.work, f.tokens, f.top_k, item->foreseen_ns); });
  unqueue(item);
  busy_.leave(f.tokens);
  if (item->cancelled) return answers_.refuse(item, refusal<Text::cancelled>());
  if (f.deadline_ns <= now) return answers_.refuse(item, refusal<Text::expired>(tenths(double(now - f.arrival_ns) * 1e-6)));
  Refusal overtaken = refusal<Text::overtaken>((f.deadline_ns - now) / 1000);
  overtaken.retry_after_us = 1;
  answers_.refuse(item, overtaken);
}

void Core::fail_all(uint32_t reason, const char* text) {
  take_from_poller();
  drain();
  while (!under_way_.empty()) fail(pop(), reason, text);
  take_inbox();
  for (Layer* layer : serving_)
    for (auto& queue : layer->queues) {
      for (Item* item : queue) {
        unqueue(item);
        busy_.leave(item->f.tokens);
        answers_.refuse(item, {reason, text});
      }
      queue.clear();
    }
  answers_.flush();
  forget_retired();
}

}  // namespace expertd
