// ForwardRequest and ForwardResponse, written: what stands before, between and after the bytes of their tensors, which
// whoever sends the message copies, or writes from where they lie:
//
//     head elements [scales head, scales] [ids head, ids] [weights head, weights] tail
//
// Fields stand in the order of their numbers and defaults are left out, as in every protobuf serializer, but for padding,
// which stands before the first tensor, and behind everything where the size was fixed before the end was known.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "messages.h"
#include "wire.h"

namespace expertd::wire {

// A Tensor [rows, columns] without its elements.  spelling: number of the field of Tensor.data that they are; block: columns
// that share a scale, 0: it has no scales.
struct TensorOut {
  bool there = false;
  int32_t dtype = 0;
  uint32_t spelling = 3;  // raw bytes
  uint64_t rows = 0, columns = 0, bytes = 0;
  uint32_t block = 0;
  uint64_t scales_bytes = 0;
};

// Where the elements of a message's first tensor are to stand in it: at that byte, or one of these.
constexpr uint64_t kAnywhere = 0, kAligned = UINT64_MAX;

constexpr uint64_t kAlignedBytes = 16;  // where the memory of Python's bytes begins, and what the core reads in place
constexpr uint64_t kPaddedBytes = 16 << 10;  // a message from this size on is worth it: less is copied in a microsecond

inline uint64_t varint_bytes(uint64_t v) {
  uint64_t n = 1;
  for (; v >= 0x80; v >>= 7) ++n;
  return n;
}

// A field that means nothing, of so many bytes: any number but 1, below 16 KiB.
inline std::string padding(uint64_t bytes) {
  if (!bytes) return {};
  std::string out = "\x7a";
  const uint64_t size = bytes - (bytes < 0x82 ? 2 : 3);
  if (bytes < 0x82) {
    out += char(size);
  } else {  // two bytes also where one would do: it is the whole's size that counts
    out += char(size & 0x7f | 0x80);
    out += char(size >> 7);
  }
  return out.append(size, '\0');
}

// A field of a Tensor: what stands before its elements, and before its scales.
struct TensorText {
  std::string head, scales;
  uint64_t bytes = 0;  // of the field, elements and scales included

  TensorText() = default;
  TensorText(uint32_t field, const TensorOut& t) {
    if (!t.there) return;
    std::string shape, inner, block;
    Writer(&shape).varint(t.rows);
    Writer(&shape).varint(t.columns);
    Writer w(&inner);
    w.number(1, uint64_t(int64_t(t.dtype)));
    w.message(2, shape);
    w.open(t.spelling, t.bytes);
    if (t.block) {
      Writer(&block).number(1, t.block);
      if (t.scales_bytes) Writer(&block).open(2, t.scales_bytes);
      Writer(&scales).open(7, block.size() + t.scales_bytes);
      scales += block;
    }
    const uint64_t elements = t.bytes + scales.size() + t.scales_bytes;
    Writer(&head).open(field, inner.size() + elements);
    head += inner;
    bytes = head.size() + elements;
  }
};

// The first `at` bytes of a message: the wrapper of a stream's message, `fields`, padding, and `tensor`, which stands
// before the elements of the first tensor.  behind: bytes from there on.
inline std::string head_of(const std::string& fields, const std::string& tensor, uint64_t behind, bool stream, uint64_t at) {
  std::string out;
  const uint64_t inner = fields.size() + tensor.size();
  const auto wrapper = [&](uint64_t first) { return stream ? 1 + varint_bytes(first + behind) : 0; };
  if (at == kAligned && (tensor.empty() || inner + behind < kPaddedBytes)) at = kAnywhere;
  if (at == kAnywhere) {
    if (stream) Writer(&out).open(1, inner + behind);
    return out + fields + tensor;
  }
  if (at == kAligned) {
    at = (inner + kAlignedBytes - 1) / kAlignedBytes * kAlignedBytes;
    while (at < inner + wrapper(at) || at == inner + wrapper(at) + 1) at += kAlignedBytes;
  }
  if (stream) {  // the size in as many bytes as that of the whole has, where it could do with less, too
    uint64_t size = at + behind - wrapper(at);
    out = "\x0a";
    for (uint64_t n = varint_bytes(at + behind); n > 1; --n, size >>= 7) out += char(size & 0x7f | 0x80);
    out += char(size);
  }
  out += fields;
  out += padding(at - out.size() - tensor.size());
  return out += tensor;
}

// ---- requests

struct RequestOut {
  uint64_t id = 0, timeout_us = 0, sent_us = 0, weights_version = 0;
  uint32_t layer = 0;
  int32_t output_dtype = 0, output_form = 0;
  bool weight_on_input = false;
  TensorOut hidden, ids, weights;   // only hidden states have scales
  std::string_view grouped;         // a GroupedRows; at null: there is none
  std::string_view traceparent;
};

struct RequestText {
  std::string head, scales, ids, weights, tail;

  RequestText(const RequestOut& r, bool stream, uint64_t at = kAnywhere) {
    TensorText x(3, r.hidden), i(4, r.ids), w(5, r.weights);
    Writer last(&tail);
    if (r.grouped.data()) last.message(6, r.grouped);
    last.number(7, r.timeout_us);
    last.number(8, uint64_t(int64_t(r.output_dtype)));
    last.number(9, uint64_t(int64_t(r.output_form)));
    last.text(10, r.traceparent);
    last.number(11, r.weight_on_input);
    last.number(12, r.sent_us);
    last.number(13, r.weights_version);
    std::string first;
    Writer(&first).number(1, r.id);
    Writer(&first).number(2, r.layer);
    head = head_of(first, x.head, x.bytes - x.head.size() + i.bytes + w.bytes + tail.size(), stream, at);
    scales = std::move(x.scales);
    ids = std::move(i.head);
    weights = std::move(w.head);
  }
};

// A stream's message that takes a request back.
inline std::string cancel_message(uint64_t id) {
  std::string inner, out;
  Writer(&inner).number(1, id);
  Writer(&out).message(2, inner);
  return out;
}

// ---- answers

struct ResponseOut {
  uint64_t routes_computed = 0, placement_epoch = 0, weights_version = 0;
  std::string_view digest, timing, load;  // messages; at null: there is none
};

// What stands behind the output.
inline std::string response_tail(const ResponseOut& r) {
  std::string out;
  Writer w(&out);
  if (r.digest.data()) w.message(3, r.digest);
  w.number(4, r.routes_computed);
  if (r.timing.data()) w.message(5, r.timing);
  if (r.load.data()) w.message(6, r.load);
  w.number(7, r.placement_epoch);
  w.number(8, r.weights_version);
  return out;
}

struct ResponseText {
  std::string head, scales;

  // tail_bytes: of what stands behind the output.
  ResponseText(uint64_t id, const TensorOut& output, uint64_t tail_bytes, bool stream, uint64_t at = kAnywhere) {
    TensorText x(2, output);
    std::string first;
    Writer(&first).number(1, id);
    head = head_of(first, x.head, x.bytes - x.head.size() + tail_bytes, stream, at);
    scales = std::move(x.scales);
  }
};

inline std::string timing_message(const Timing& t) {
  std::string out;
  Writer w(&out);
  w.number(1, t.decode_ns);
  w.number(2, t.queue_ns);
  w.number(3, t.copy_in_ns);
  w.number(4, t.kernel_ns);
  w.number(5, t.copy_out_ns);
  w.number(7, t.batch_tokens);
  w.number(8, t.batch_requests);
  w.text(9, t.backend);
  w.number(10, t.arrival_ns);
  return out;
}

inline std::string load_message(const Load& l) {
  std::string out;
  Writer w(&out);
  w.number(1, l.queued_tokens);
  w.number(2, l.queued_requests);
  w.real(3, l.token_ns);
  w.number(4, l.draining);
  return out;
}

// A stream's message: the request failed.
inline std::string error_message(const RequestError& e) {
  std::string inner, out;
  Writer w(&inner);
  w.number(1, e.id);
  w.number(2, e.code);
  w.text(3, e.reason);
  w.text(4, e.text);
  w.number(5, e.retryable);
  w.number(6, e.retry_after_us);
  Writer(&out).message(2, inner);
  return out;
}

}  // namespace expertd::wire
