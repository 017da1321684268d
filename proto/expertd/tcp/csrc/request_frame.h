// A request as a frame: what stands before, between and after its tensors, which are written from where they lie.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "frame.h"
#include "layout.h"
#include "tickets.h"
#include "wire.h"
#include "write.h"

namespace expertd::tcp {

// Pieces of memory that are written one after another.
struct Parts {
  iovec at[12];
  size_t n = 0;
  uint64_t bytes = 0;

  void add(const void* from, uint64_t size) {
    if (!size) return;
    at[n++] = {const_cast<void*>(from), size};
    bytes += size;
  }
  // What is left after `sent` bytes.
  void skip(uint64_t sent) {
    bytes -= sent;
    size_t i = 0;
    for (; i < n && sent >= at[i].iov_len; ++i) sent -= at[i].iov_len;
    std::copy(at + i, at + n, at);
    n -= i;
    if (n) at[0] = {static_cast<char*>(at[0].iov_base) + sent, at[0].iov_len - sent};
  }
};

struct Frame {
  static constexpr uint32_t kE4m3 = 4, kBlock = 128, kRaw = 3;

  std::string head;
  wire::RequestText text;
  Parts parts;

  Frame(const shm::Submission& s, const shm::Tensors& t, uint64_t id, uint32_t sequence) : text(request(s, t, id)) {
    const bool scaled = s.hidden_dtype == kE4m3;
    const uint64_t length = text.head.size() + t.hidden_bytes + text.scales.size() + (scaled ? t.scales_bytes : 0) +
                            text.ids.size() + t.ids_bytes + text.weights.size() + t.weights_bytes + text.tail.size();
    const Head h{kMagic, uint32_t(length), sequence, uint32_t(text.head.size())};
    head.assign(reinterpret_cast<const char*>(&h), sizeof h);
    head += text.head;
    parts.add(head.data(), head.size());
    parts.add(t.hidden, t.hidden_bytes);
    if (scaled) {
      parts.add(text.scales.data(), text.scales.size());
      parts.add(t.scales, t.scales_bytes);
    }
    parts.add(text.ids.data(), text.ids.size());
    parts.add(t.ids, t.ids_bytes);
    parts.add(text.weights.data(), text.weights.size());
    parts.add(t.weights, t.weights_bytes);
    parts.add(text.tail.data(), text.tail.size());
  }

 private:
  static wire::RequestText request(const shm::Submission& s, const shm::Tensors& t, uint64_t id) {
    const uint64_t M = s.tokens, k = s.top_k, now = shm::now_ns();
    const std::string traceparent = wire::traceparent_of(s.trace);
    wire::RequestOut r;
    r.id = id;
    r.layer = s.layer;
    r.hidden = {true, s.hidden_dtype, kRaw, M, s.hidden_size, t.hidden_bytes, 0, 0};
    if (s.hidden_dtype == kE4m3) r.hidden.block = kBlock, r.hidden.scales_bytes = t.scales_bytes;
    r.ids = {true, s.ids_dtype, kRaw, M, k, t.ids_bytes, 0, 0};
    r.weights = {true, s.weights_dtype, kRaw, M, k, t.weights_bytes, 0, 0};
    if (s.deadline_ns) r.timeout_us = s.deadline_ns > now ? (s.deadline_ns - now) / 1000 + 1 : 1;
    r.output_dtype = s.out_dtype;
    r.traceparent = traceparent;
    r.weight_on_input = s.flags & shm::kRouterWeightOnInput;
    r.weights_version = s.weights_version;
    return wire::RequestText(r, true);
  }
};

// One that takes a request back.
inline std::string cancel_frame(uint64_t id, uint32_t sequence) {
  const std::string message = wire::cancel_message(id);
  const Head h{kMagic, uint32_t(message.size()), sequence, 0};
  return std::string(reinterpret_cast<const char*>(&h), sizeof h) + message;
}

}  // namespace expertd::tcp
