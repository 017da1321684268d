// Frames of a TCP session, and the memory that they are read into.
//
// A frame is a Head and then a message of the contract: StreamForwardRequest from the client, StreamForwardResponse from
// the server.  Either side counts its own frames from 1.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

namespace expertd::tcp {

constexpr uint32_t kMagic = 0x31667865;  // "exf1"
constexpr uint64_t kAlign = 64;

struct Head {
  uint32_t magic;
  uint32_t length;    // of the message, bytes
  uint32_t sequence;  // of this frame, modulo 2^32
  uint32_t lead;      // bytes of the message before the elements of its largest tensor, which are best read to an aligned place
};
static_assert(sizeof(Head) == 16, "as expertd/tcp/entry.py says");

// A piece of memory for one message, so that what stands `lead` bytes into it is aligned.
struct Buffer {
  uint8_t* base = nullptr;
  uint64_t room = 0;  // bytes behind base
  uint8_t* at = nullptr;

  explicit operator bool() const { return base != nullptr; }
};

// Buffers that were used are kept for the next messages: fresh pages cost more than the copy into them.  One thread.
class Pool {
 public:
  explicit Pool(uint64_t most_kept) : most_kept_(most_kept) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    for (Buffer& b : free_) free(b.base);
  }

  // Without a base where there is no memory.
  Buffer take(uint64_t bytes, uint64_t lead = 0) {
    const uint64_t need = bytes + kAlign;
    Buffer found;
    for (size_t i = free_.size(); i-- > 0;) {
      if (free_[i].room < need || free_[i].room > 4 * need + kSmall) continue;
      found = free_[i];
      free_[i] = free_.back();
      free_.pop_back();
      kept_ -= found.room;
      break;
    }
    if (!found) {
      found.room = (need + kSmall - 1) / kSmall * kSmall;
      found.base = static_cast<uint8_t*>(aligned_alloc(kAlign, found.room));
    }
    found.at = found.base + (kAlign - lead % kAlign) % kAlign;
    return found;
  }

  void give(Buffer* b) {
    if (!b->base) return;
    if (free_.size() >= kMost || kept_ + b->room > most_kept_) {
      free(b->base);
    } else {
      kept_ += b->room;
      free_.push_back(*b);
    }
    *b = Buffer{};
  }

 private:
  static constexpr uint64_t kSmall = 4096;
  static constexpr size_t kMost = 64;

  const uint64_t most_kept_;
  uint64_t kept_ = 0;
  std::vector<Buffer> free_;
};

}  // namespace expertd::tcp
