// One session in shared memory, as the server sees it, or who stands for one.  The other side may write anything anywhere in the region at any
// time: what is read is copied once, then checked, and the copy is used.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>

#include "layout.h"
#include "wait.h"

namespace expertd {

// What a session is made of.  pool: memory on the device that client and server share, by the server's address; 0 = none.
struct Session {
  uint64_t handle;
  void* base;
  uint64_t bytes, pool, pool_bytes;
  uint32_t entries, caller;
  int bell;  // a socket, whose other end is the client's
};

class ShmConnection {
 public:
  // Lays out `bytes` of zeroed memory.
  explicit ShmConnection(const Session& s)
      : handle(s.handle), caller(s.caller), bell(s.bell), base_(static_cast<uint8_t*>(s.base)), pool_(s.pool),
        pool_bytes_(s.pool_bytes), entries_(s.entries) {
    auto* c = control();
    c->entries = entries_;
    c->version = shm::kVersion;
    c->arena_offset = shm::arena_offset(entries_);
    c->arena_bytes = arena_bytes_ = s.bytes - c->arena_offset;
    c->magic = shm::kMagic;
    arena_ = base_ + shm::arena_offset(entries_);
  }

  const uint64_t handle;
  const uint32_t caller;
  const int bell;
  uint32_t in_flight = 0;  // taken and not answered
  bool closing = false;

  // The next submission, copied; false: none, or as many as there are entries are in flight.
  bool take(shm::Submission* s) {
    if (in_flight >= entries_) return false;
    const auto& from = submissions()[taken_ & (entries_ - 1)];
    if (from.seq.load(std::memory_order_acquire) != taken_ + 1) return false;
    memcpy(static_cast<void*>(s), &from, sizeof from);
    control()->taken.store(++taken_, std::memory_order_release);
    return true;
  }

  // Address of `bytes` at an offset that the other side gave; 0: outside of the arena, or of the device's pool.
  uint64_t at(uint64_t offset, uint64_t bytes, bool on_device) const {
    const unsigned __int128 end = (unsigned __int128)bytes + offset;
    const uint64_t base = on_device ? pool_ : uint64_t(arena_);
    return offset % 16 == 0 && end <= (on_device ? pool_bytes_ : arena_bytes_) ? base + offset : 0;
  }

  // ---- calls from a device: at most one is under way
  bool has_pool() const { return pool_bytes_ != 0; }

  // False: it has no such number.
  bool prepare(const shm::Submission& s) {
    if (s.number < 1 || s.number > shm::kMostPrepared) return false;
    while (prepared_.size() < s.number) prepared_.emplace_back();
    memcpy(static_cast<void*>(&prepared_[s.number - 1]), &s, sizeof s);
    prepared_[s.number - 1].kind = shm::kForward;
    return true;
  }

  // The prepared request that starts now, copied; of kind 0 where nothing was prepared.
  bool called(shm::Submission* s) {
    auto& word = control()->called.value;
    if (calling_) return false;
    const uint32_t number = word.load(std::memory_order_acquire);
    if (!number) return false;
    word.store(0, std::memory_order_relaxed);
    calling_ = true;
    memset(static_cast<void*>(s), 0, sizeof *s);
    if (number <= prepared_.size()) memcpy(static_cast<void*>(s), &prepared_[number - 1], sizeof *s);
    return true;
  }

  // Where the answer to the call goes; then it is published.
  shm::Completion& open_call(bool refused) { return refused ? control()->failure : control()->last; }
  void publish_call(bool refused) {
    auto* c = control();
    calling_ = false;
    c->refusals.fetch_add(refused, std::memory_order_relaxed);
    c->calls.fetch_add(1, std::memory_order_relaxed);
    c->answered.value.store(refused ? shm::kRefused : shm::kGood, std::memory_order_release);
  }

  shm::Completion& open(uint64_t id) {
    auto& c = completions()[answered_ & (entries_ - 1)];
    c.id = id;
    return c;
  }

  void publish(shm::Completion& c) {
    c.seq.store(++answered_, std::memory_order_release);
    shm::wake(control()->client, bell);
  }

  void sleeps(bool now) { control()->server.sleeps.store(now, std::memory_order_seq_cst); }
  void end() {
    control()->ended.store(1, std::memory_order_release);
    shm::ring_peer(bell);
  }

 private:
  shm::Control* control() const { return reinterpret_cast<shm::Control*>(base_); }
  shm::Submission* submissions() const { return reinterpret_cast<shm::Submission*>(base_ + shm::kPage); }
  shm::Completion* completions() const {
    return reinterpret_cast<shm::Completion*>(base_ + shm::completions_offset(entries_));
  }

  uint8_t* base_;
  uint8_t* arena_;
  uint64_t arena_bytes_;
  const uint64_t pool_, pool_bytes_;
  const uint32_t entries_;
  uint64_t taken_ = 0, answered_ = 0;
  std::deque<shm::Submission> prepared_;
  bool calling_ = false;
};

}  // namespace expertd
