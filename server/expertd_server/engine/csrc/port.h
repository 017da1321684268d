// One session in shared memory, as the server sees it.  The other side may write anything anywhere in the region at any
// time: what is read is copied once, then checked, and the copy is used.
#pragma once

#include <cstdint>
#include <cstring>

#include "core.h"
#include "layout.h"
#include "wait.h"

namespace expertd {

class Port {
 public:
  // Lays out `bytes` of zeroed memory.
  Port(uint64_t handle, void* base, uint64_t bytes, uint32_t entries, int bell, int client_bell, uint32_t caller)
      : handle(handle), caller(caller), bell(bell), base_(static_cast<uint8_t*>(base)), entries_(entries),
        client_bell_(client_bell) {
    auto* c = control();
    c->entries = entries;
    c->version = shm::kVersion;
    c->arena_offset = shm::arena_offset(entries);
    c->arena_bytes = arena_bytes_ = bytes - c->arena_offset;
    c->magic = shm::kMagic;
    arena_ = base_ + shm::arena_offset(entries);
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

  // Address of `count` elements at an offset that the other side gave; 0: outside of the arena.
  uint64_t at(uint64_t offset, uint64_t count, uint8_t dtype) const {
    const unsigned __int128 end = (unsigned __int128)count * size_of(dtype) + offset;
    return offset % 16 == 0 && end <= arena_bytes_ ? uint64_t(arena_) + offset : 0;
  }

  shm::Completion& open(uint64_t id) {
    auto& c = completions()[answered_ & (entries_ - 1)];
    c.id = id;
    return c;
  }

  void publish(shm::Completion& c) {
    c.seq.store(++answered_, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the entry, then the look at the client's sleep
    if (control()->client.sleeps.load(std::memory_order_relaxed)) shm::ring(client_bell_);
  }

  void sleeps(bool now) { control()->server.sleeps.store(now, std::memory_order_seq_cst); }
  void end() {
    control()->ended.store(1, std::memory_order_release);
    shm::ring(client_bell_);
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
  const uint32_t entries_;
  const int client_bell_;
  uint64_t taken_ = 0, answered_ = 0;
};

}  // namespace expertd
