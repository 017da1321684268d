// Blocks of the arena: first fit; neighbours that are free are one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace expertd::shm {

class Arena {
 public:
  static constexpr uint64_t kAlign = 256;
  static constexpr int64_t kNoRoom = -1;

  explicit Arena(uint64_t bytes) { free_[0] = bytes; }

  // Offset of a block; kNoRoom: there is none so large.
  int64_t take(uint64_t bytes) {
    if (bytes > uint64_t(1) << 62) return kNoRoom;
    bytes = rounded(std::max<uint64_t>(bytes, 1));
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < bytes) continue;
      const uint64_t at = it->first, left = it->second - bytes;
      free_.erase(it);
      if (left) free_[at + bytes] = left;
      taken_[at] = bytes;
      return int64_t(at);
    }
    return kNoRoom;
  }

  void give(uint64_t at) {
    const auto found = taken_.find(at);
    if (found == taken_.end()) return;
    uint64_t bytes = found->second;
    taken_.erase(found);
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + bytes) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free_[at] = bytes;
  }

  uint64_t blocks() const { return taken_.size(); }

  static uint64_t rounded(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

 private:
  std::map<uint64_t, uint64_t> free_, taken_;
};

}  // namespace expertd::shm
