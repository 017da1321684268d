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
  static constexpr uint32_t kE4m3 = 4, kBlock = 128;

  std::string head, ids, weights, tail, scales;
  Parts parts;

  Frame(const shm::Submission& s, const shm::Tensors& t, uint64_t id, uint32_t sequence) {
    const uint64_t M = s.tokens, k = s.top_k;
    const bool scaled = s.hidden_dtype == kE4m3;
    if (scaled) scales = scales_field(kBlock, t.scales_bytes);
    const std::string x = tensor_head(s.hidden_dtype, M, s.hidden_size, t.hidden_bytes);
    const uint64_t x_bytes = x.size() + t.hidden_bytes + scales.size() + (scaled ? t.scales_bytes : 0);
    std::string first;
    Writer w(&first);
    w.number(1, id);
    w.number(2, s.layer);
    w.open(3, x_bytes);
    first += x;
    tensor(&ids, 4, s.ids_dtype, M, k, t.ids_bytes);
    tensor(&weights, 5, s.weights_dtype, M, k, t.weights_bytes);
    const uint64_t now = shm::now_ns();
    Writer last(&tail);
    if (s.deadline_ns) last.number(7, s.deadline_ns > now ? (s.deadline_ns - now) / 1000 + 1 : 1);
    last.number(8, s.out_dtype);
    const std::string traceparent = traceparent_of(s.trace);
    last.text(10, traceparent.data(), traceparent.size());
    last.number(11, s.flags & shm::kRouterWeightOnInput ? 1 : 0);
    last.number(13, s.weights_version);
    const uint64_t inner = first.size() + t.hidden_bytes + scales.size() + (scaled ? t.scales_bytes : 0) + ids.size() +
                           t.ids_bytes + weights.size() + t.weights_bytes + tail.size();
    std::string message;
    Writer(&message).open(1, inner);
    const Head h{kMagic, uint32_t(message.size() + inner), sequence, uint32_t(message.size() + first.size())};
    head.assign(reinterpret_cast<const char*>(&h), sizeof h);
    head += message + first;
    parts.add(head.data(), head.size());
    parts.add(t.hidden, t.hidden_bytes);
    if (scaled) {
      parts.add(scales.data(), scales.size());
      parts.add(t.scales, t.scales_bytes);
    }
    parts.add(ids.data(), ids.size());
    parts.add(t.ids, t.ids_bytes);
    parts.add(weights.data(), weights.size());
    parts.add(t.weights, t.weights_bytes);
    parts.add(tail.data(), tail.size());
  }

  static void tensor(std::string* out, uint32_t field, uint32_t dtype, uint64_t rows, uint64_t columns, uint64_t bytes) {
    const std::string inner = tensor_head(dtype, rows, columns, bytes);
    Writer(out).open(field, inner.size() + bytes);
    *out += inner;
  }
};

// One that takes a request back.
inline std::string cancel_frame(uint64_t id, uint32_t sequence) {
  std::string inner, message;
  Writer(&inner).number(1, id);
  Writer(&message).message(2, inner);
  const Head h{kMagic, uint32_t(message.size()), sequence, 0};
  return std::string(reinterpret_cast<const char*>(&h), sizeof h) + message;
}

}  // namespace expertd::tcp
