#include "core_class.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace expertd {
namespace {

using shm::now_ns;

constexpr uint64_t kCheckNs = 1000000000;
// A batch that takes longer: run() returns, so that its caller looks whether the device is still there.
constexpr uint64_t kLeadNs = 200000;
// A second batch is started behind one that is under way when that is expected to take no longer than this: early
// enough that the device does not wait, late enough that a request of another layer is not behind two long batches.
constexpr int kSleepMs = 1000;
constexpr uint64_t kRestsWorth = 2, kLongestRest = 3;
// Rests that usually take longer than so many times the spinning are slept from the start: it would not see their end, and
// whoever shares these cores waits for it.  Longer ones than that many times it count as that: a pause is forgotten soon.
constexpr uint64_t kCalledSpinNs = 5000000;
constexpr int kCalledSleepMs = 1;
// A device cannot ring: for so long after its last call the core watches for the next, then it looks so often, or is rung
// by the host of a caller that knows of a call to come.

}  // namespace

Core::Core(const Config& config) : config_(config), answers_(busy_), lanes_(config.lanes), accounts_(config_) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  watch(wake_);
  for (uint32_t i = config.lanes; i-- > 0;) {
    lanes_[i].index = i;
    free_.push_back(&lanes_[i]);
  }
}

Core::~Core() {
  end_door();
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

uint32_t Core::submit(const Forward& f, uint64_t* handle, uint32_t* retry_after_us, Work* work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (draining_) return kDraining;
    const Verdict v = accounts_.enter(f, now_ns());
    if (v.reason) {
      *retry_after_us = advice_us(v);
      return v.reason;
    }
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
  }
  if (!compute_here(f)) wake();
  return kComputed;
}

uint32_t Core::admits(const Forward& f, uint32_t* retry_after_us) {
  const Verdict v = accounts_.enter(f, now_ns(), true);
  *retry_after_us = advice_us(v);
  return v.reason;
}

uint32_t Core::advice_us(const Verdict& v) const {
  if (v.reason == kQueueFull) return busy_.retry_after_us();
  return v.reason == kOverloaded ? uint32_t(std::clamp<uint64_t>(v.late_ns / 1000, 1, 1000000000)) : 0;
}

void Core::went_out(uint64_t ns) {
  accounts_.forecast([&](Forecast& f) { f.went_out(now_ns(), double(ns)); });
}

// On the thread that brought the request `f`, while the core's own sleeps: a brief batch is over before that is awake.
// False: something is left for the core's thread.
bool Core::compute_here(const Forward& f) {
  int asleep = kAsleep;
  if (config_.device || !driver_.compare_exchange_strong(asleep, kBorrowed)) return false;
  bool all = false;
  const auto found = layers_.find(f.layer);
  const Layer* layer = found == layers_.end() ? nullptr : found->second.get();
  const double expected = layer && layer->facts.call ? layer->work->times.expect(f.tokens, f.top_k) : 0;  // 0: not known
  if (expected > 0 && expected <= double(config_.brief_ns) && !interrupted_.load() && !free_.empty()) {
    take_inbox();
    refused_ = start(now_ns(), &left_) == kNeedsRun;
    all = !refused_ && busy_.now(busy_.requests) == 0;
  }
  driver_.store(kAsleep);
  return all;
}

void Core::command(Command&& c) {
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
    return l->facts.generation == generation && (!l->lines[0].empty() || !l->lines[1].empty());
  });
}

void Core::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what was put there, then the look at the core's sleep
  if (asleep_.load(std::memory_order_relaxed)) shm::ring(wake_);
}

// ---- the loop --------------------------------------------------------------------------------------------------------

RunCode Core::run(Run* out) {
  take_door();
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
    if (came) rested(now - rests_since);
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
      if (sleep()) idle_since = now_ns();
    } else {
      shm::relax();
    }
  }
}

// For Python to compute, or to launch.
RunCode Core::hand_over(const Run& run) {
  leave_door(*lanes_[run.lane].layer->work, run.rows, run.top_k);
  return kRun;
}

bool Core::waits_for_company(uint64_t now) {
  if (config_.patience <= 0 || !under_way_.empty()) return false;
  const uint64_t waiting = busy_.now(busy_.requests);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (incoming_.load(std::memory_order_relaxed)) return true;  // it may count as waiting, and stands in no line yet
  if (waiting == 0) return false;
  if (now < patience_.until(config_.patience, waiting)) return waited_ = true;
  if (waited_) patience_.waited(waiting);
  return waited_ = false;
}

// A CPU's cores are for its kernels and for the threads that bring requests: it spins only while a caller in shared
// memory may be answered sooner than a thread wakes up, and while their requests come that soon.
bool Core::sleepy(uint64_t now, uint64_t idle_since) const {
  const bool soon = !ports_.empty() && usual_rest_ns_ <= kRestsWorth * config_.spin_ns;
  const uint64_t spin_ns = config_.device || soon ? config_.spin_ns : 0;
  return now - idle_since > spin_ns && now - called_ns_ > kCalledSpinNs && !waited_;
}

void Core::rested(uint64_t ns) {
  const uint64_t most = kLongestRest * config_.spin_ns;
  usual_rest_ns_ = usual_rest_ns_ - usual_rest_ns_ / 8 + std::min(ns, most) / 8;
}

bool Core::sleep() {
  bool woken = true;
  asleep_.store(true, std::memory_order_seq_cst);
  for (auto& p : ports_) p->sleeps(true);
  if (!incoming_.load(std::memory_order_seq_cst) && !poll_ports() && !stopping_.load() && !interrupted_.load()) {
    epoll_event events[16];
    const bool devices = std::any_of(ports_.begin(), ports_.end(), [](const auto& p) { return p->has_pool(); });
    driver_.store(kAsleep);
    const int n = epoll_wait(epoll_, events, 16, devices ? kCalledSleepMs : kSleepMs);
    woken = n > 0;
    for (int asleep = kAsleep; !driver_.compare_exchange_weak(asleep, kOwn); asleep = kAsleep)
      stopping_.load(std::memory_order_relaxed) ? usleep(1000) : sched_yield();  // a kernel may hang there
    take_bells(events, n);
    if (devices && n > 0) called_ns_ = now_ns();  // a host that knows of a call to come
  }
  for (auto& p : ports_) p->sleeps(false);
  asleep_.store(false, std::memory_order_relaxed);
  return woken;
}

// The bells that rang, of what is still here: the descriptor of a port that was removed meanwhile may be another's already.
void Core::take_bells(const epoll_event* events, int n) {
  for (int i = 0; i < n; ++i) {
    const int fd = events[i].data.fd;
    if (fd == wake_ || std::any_of(ports_.begin(), ports_.end(), [&](const auto& p) { return p->bell == fd; }))
      shm::sleep_on(fd, 0);
  }
}

// ---- batches ---------------------------------------------------------------------------------------------------------

bool Core::worth_starting(uint64_t now) const {
  if (under_way_.empty()) return true;
  const Lane* last = under_way_.back();
  const double expected = last->layer->work->times.expect(last->rows, last->top_k);
  return expected <= double(now - last->launch_ns + kLeadNs);
}

// `item` waits no more.
void Core::unqueue(Item* item) {
  accounts_.leave(item->account, item->f);
  item->account = nullptr;
}

// `item`, which is in no line any more, is not computed.
void Core::drop(Item* item, const Layer& layer, uint64_t now) {
  const Forward& f = item->f;
  if (item->foreseen_ns && !item->cancelled)
    accounts_.forecast([&](Forecast& fc) { fc.dropped(now, *layer.work, f.tokens, f.top_k, item->foreseen_ns); });
  unqueue(item);
  busy_.leave(f.tokens);
  if (f.deadline_ns > now && !item->cancelled) {
    const uint64_t left_us = (f.deadline_ns - now) / 1000;
    return answers_.refuse(item, kOverloaded, 1,
                           "request: got %llu us left of its time, want more: what was before it took longer than expected;"
                           " try another replica",
                           static_cast<unsigned long long>(left_us));
  }
  answers_.refuse(item, kDeadlineExceeded, 0,
                  "request: its deadline passed while it waited; want a longer timeout or another replica");
}

Bounds Core::bounds(const Layer& layer, uint64_t now) {
  Bounds b{now, config_.max_tokens, layer.facts.top_k, nullptr, 0, 0};
  if (!config_.refuse_late) return b;
  accounts_.forecast([&](const Forecast& f) {
    if (f.fresh(now)) b.times = &layer.work->times;
    b.before_ns = f.running_ns(now);
    b.after_ns = f.way_out_ns(now);
  });
  return b;
}

// The line with the most urgent request, where urgency is put off by what its caller was served more than others.
Layer* Core::most_urgent(uint32_t* flag) {
  uint64_t least = ~uint64_t(0), first = ~uint64_t(0);
  for (Layer* l : serving_)
    for (const auto& line : l->lines)
      for (const Item* item : line) least = std::min(least, accounts_.share(*item->account));
  if (least != ~uint64_t(0)) accounts_.settle(least);
  Layer* layer = nullptr;
  for (Layer* l : serving_)
    for (uint32_t i : {0u, 1u})
      for (const Item* item : l->lines[i])
        if (const uint64_t u = urgency(item->f) + accounts_.lag_ns(*item->account); u < first) {
          first = u;
          layer = l;
          *flag = i;
        }
  return layer;
}

Core::Started Core::start(uint64_t now, Run* out) {
  uint32_t flag = 0;
  Layer* layer = most_urgent(&flag);
  if (!layer) return kNothing;
  cut(layer->lines[flag], bounds(*layer, now), accounts_, cut_);
  for (Item* item : cut_.dropped) drop(item, *layer, now);
  if (cut_.run.empty()) return answers_.flush(), kLaunched;
  Lane* lane = free_.back();
  free_.pop_back();
  lane->items.swap(cut_.run);
  lane->layer = layer;
  lane->tokens = lane->rows = cut_.tokens;
  lane->router_weight_on_input = flag;
  lane->cut_ns = now;
  lane->top_k = 0;
  for (Item* item : lane->items) {
    lane->top_k = std::max(lane->top_k, item->f.top_k);
    unqueue(item);
    busy_.begin(item->f.tokens);
  }
  accounts_.forecast([&](Forecast& f) { f.begin(now, *layer->work, lane->tokens, lane->top_k); });
  accounts_.tidy();
  const bool alone = under_way_.empty();
  under_way_.push_back(lane);
  begun_.store(1ull << 63 | uint64_t(layer->facts.layer) << 31 | (lane->tokens & 0x7fffffff), std::memory_order_relaxed);
  *out = Run{lane->index, layer->facts.layer, layer->facts.generation, lane->tokens, lane->tokens, lane->top_k, flag,
             uint32_t(lane->items.size()), 0, 0, 0, 0, 0, 0};
  if (config_.device) return start_on_device(lane, alone, out);
  gather_here(*lane, config_, out);
  lane->launch_ns = now_ns();
  return call(*lane, *out) ? kLaunched : kNeedsRun;
}

// Without Python.  False: it cannot be, or what was called refuses; Python then calls it again, and finds the words.
bool Core::call(const Lane& lane, const Run& run) {
  const LayerFacts& layer = lane.layer->facts;
  if (!layer.call) return false;
  const bool wide = config_.compute_dtype == kF32;
  const Call c{reinterpret_cast<void*>(run.hidden), reinterpret_cast<int32_t*>(run.slots),
               reinterpret_cast<float*>(run.weights), reinterpret_cast<void*>(run.out), run.rows, layer.hidden_size,
               int32_t(run.top_k), wide, wide, int32_t(run.router_weight_on_input)};
  leave_door(*lane.layer->work, run.rows, run.top_k);
  const int32_t refused = layer.call(layer.context, layer.experts, &c);
  take_door();
  if (refused) return false;
  done(lane.index, now_ns() - lane.launch_ns, nullptr);
  return true;
}

Core::Started Core::start_on_device(Lane* lane, bool alone, Run* out) {
  write_table(*lane, config_);
  *static_cast<volatile uint32_t*>(lane->memory.done) = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  lane->launch_ns = now_ns();
  const bool streamed = config_.streamed_rows && movable(*lane, config_);
  const int error = alone && !streamed ? launch_whole(lane) : launch_parts(lane, streamed);
  if (!error) return kLaunched;
  pad_table(*lane, lane->tokens);
  out->rows = lane->rows;
  out->whole = error == kNoGraph && alone && on_device(*lane);
  out->launch_error = error == kNoGraph ? 0 : uint32_t(error);
  return kNeedsRun;
}

int Core::launch_whole(Lane* lane) {
  const auto [rows, exec] = lane->layer->graphs.at_least({kWhole, lane->index, lane->top_k, lane->router_weight_on_input}, lane->tokens);
  if (!exec) return on_device(*lane) ? kNoGraph : launch_parts(lane, false);
  pad_table(*lane, rows);
  return cuda_.launch(exec, cuda_.compute);
}

// Inputs, experts and outputs on streams of their own: beside the experts of another batch.
int Core::launch_parts(Lane* lane, bool streamed) {
  const auto [rows, experts] =
      lane->layer->graphs.at_least({kExperts, lane->index, lane->top_k, lane->router_weight_on_input}, lane->tokens);
  const uint32_t H = lane->layer->facts.hidden_size;
  void* collect = shared_.exactly({streamed ? kCollectRoutes : kCollect, lane->index, lane->top_k, H}, rows);
  void* deliver = shared_.exactly({kDeliver, lane->index, 0, H}, rows);
  if (!experts || !collect || !deliver) return kNoGraph;
  pad_table(*lane, rows);
  int error = streamed ? copy_in(*lane, config_, cuda_) : 0;
  error |= cuda_.launch(collect, cuda_.in);
  error |= cuda_.record(cuda_.there[lane->index], cuda_.in);
  error |= cuda_.wait(cuda_.compute, cuda_.there[lane->index], 0);
  error |= cuda_.launch(experts, cuda_.compute);
  error |= cuda_.record(cuda_.computed[lane->index], cuda_.compute);
  error |= cuda_.wait(cuda_.out, cuda_.computed[lane->index], 0);
  if (!streamed) return error | cuda_.launch(deliver, cuda_.out);
  error |= copy_out(*lane, config_, cuda_);
  return error | cuda_.write(cuda_.out, uint64_t(lane->memory.done), 1, 0);
}

bool Core::over(const Lane& lane) const {
  if (!config_.device || !*static_cast<volatile uint32_t*>(lane.memory.done)) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

Lane* Core::pop() {
  Lane* lane = under_way_.front();
  under_way_.pop_front();
  return lane;
}

void Core::done(uint32_t lane, uint64_t kernel_ns, const char* text) {
  take_door();
  Lane* l = &lanes_[lane];
  under_way_.erase(std::find(under_way_.begin(), under_way_.end(), l));
  l->kernel_ns = kernel_ns;
  if (text)
    fail(l, kBackendFailed, text);
  else
    finish(l, now_ns());
}

void Core::finish(Lane* lane, uint64_t now) {
  const uint64_t begin = std::max(lane->launch_ns, last_end_ns_);  // before that the device computed another batch
  if (config_.device) lane->kernel_ns = now - begin;
  last_end_ns_ = lane->computed_ns = now;
  BatchRecord r = record_of(*lane);
  uint64_t row = 0, staged = 0, asked = 0;
  double behind_ns = 0;
  for (size_t i = 0; i < lane->items.size(); ++i) {
    Item* item = lane->items[i];
    const Forward& f = item->f;
    Bad bad;
    const uint32_t routes = scatter(*lane, config_, i, row, staged, &bad);
    row += f.tokens;
    asked += routes_of(f);
    staged += is_output_staged(*item) ? f.tokens : 0;
    if (item->foreseen_ns) behind_ns = std::max(behind_ns, double(now) - double(item->foreseen_ns));
    r.routes += routes;
    const uint64_t waited = lane->cut_ns > f.arrival_ns ? lane->cut_ns - f.arrival_ns : 0;
    r.queue_ns += waited;
    ++r.waits[std::lower_bound(kWaitBoundsNs, kWaitBoundsNs + kWaitBounds, waited) - kWaitBoundsNs];
    busy_.end(f.tokens);
    if (bad.any)
      answers_.refuse_bad(item, lane->layer->facts, bad);
    else
      answers_.answer(item, lane, routes, waited);
  }
  r.kernel_ns = lane->kernel_ns;
  r.deliver_ns = now_ns() - now;
  answers_.delivered(uint32_t(r.deliver_ns));
  accounts_.forecast([&](Forecast& f) {
    f.computed(now, lane->layer->work, lane->rows, lane->top_k, now - begin, behind_ns);
  });
  patience_.batch_ended(now_ns(), now - lane->cut_ns, lane->items.size());
  busy_.saw(lane->tokens, now - begin);
  accounts_.saw(asked, now - begin);
  leave(lane, r);
}

void Core::fail(Lane* lane, uint32_t reason, const char* text) {
  BatchRecord r = record_of(*lane);
  r.failed = 1;
  for (Item* item : lane->items) {
    busy_.end(item->f.tokens);
    answers_.refuse(item, reason, 0, "%s", text);
  }
  leave(lane, r);
}

BatchRecord Core::record_of(const Lane& lane) const {
  BatchRecord r{};
  r.batches = 1;
  r.layer = lane.layer->facts.layer;
  r.generation = lane.layer->facts.generation;
  r.backend = lane.layer->backend_at(lane.rows);
  r.tokens = lane.tokens;
  r.requests = uint32_t(lane.items.size());
  r.collect_ns = lane.launch_ns - lane.cut_ns;
  return r;
}

void Core::leave(Lane* lane, const BatchRecord& r) {
  accounts_.forecast([](Forecast& f) { f.end(now_ns()); });
  answers_.record(r);
  if (under_way_.empty()) begun_.store(0, std::memory_order_relaxed);
  busy_.batches.fetch_add(1, std::memory_order_relaxed);
  busy_.served_tokens.fetch_add(lane->tokens, std::memory_order_relaxed);
  lane->items.clear();
  lane->layer = nullptr;
  free_.push_back(lane);
  forget_closed();
  answers_.flush();
  forget_retired();
}

void Core::fail_all(uint32_t reason, const char* text) {
  take_door();
  drain();
  while (!under_way_.empty()) fail(pop(), reason, text);
  take_inbox();
  for (Layer* layer : serving_)
    for (auto& line : layer->lines) {
      for (Item* item : line) {
        unqueue(item);
        busy_.leave(item->f.tokens);
        answers_.refuse(item, reason, 0, "%s", text);
      }
      line.clear();
    }
  answers_.flush();
  forget_retired();
}

}  // namespace expertd
