// Protobuf's wire format, as the messages of the contract use it, read and written without copies.  Nothing is trusted: every
// length is checked against what is there.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace expertd::wire {

// Reads fields of one message.  After anything wrong `good` is false and there are no fields any more.
class Fields {
 public:
  Fields() = default;
  Fields(const uint8_t* at, uint64_t bytes) : at_(at), end_(at + bytes) {}

  bool good = true;
  uint32_t number = 0, kind = 0;  // of the field: 0 varint, 1 fixed64, 2 bytes, 5 fixed32
  uint64_t value = 0;             // of numbers
  const uint8_t* data = nullptr;  // of bytes
  uint64_t bytes = 0;

  // The next field; false: there is none.
  bool next() {
    if (!good || at_ == end_) return false;
    if (++fields_ > kMostFields) return good = false;
    uint64_t tag = 0;
    if (!varint(&tag, kShort) || tag >> 32) return good = false;
    number = uint32_t(tag >> 3);
    kind = uint32_t(tag & 7);
    if (number == 0) return good = false;
    switch (kind) {
      case 0:
        return good = varint(&value);
      case 1:
        return good = fixed(8);
      case 2:
        if (!varint(&bytes, kShort) || bytes > uint64_t(end_ - at_)) return good = false;
        data = at_;
        at_ += bytes;
        return true;
      case 5:
        return good = fixed(4);
      default:
        return good = false;
    }
  }

  // most: bytes that it may have.
  bool varint(uint64_t* out, uint32_t most = 10) {
    uint64_t v = 0;
    for (uint32_t shift = 0; shift < 7 * most; shift += 7) {
      if (at_ == end_) return false;
      const uint8_t byte = *at_++;
      if (shift == 63 && byte > 1) return false;
      v |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) return *out = v, true;
    }
    return false;
  }
  bool empty() const { return at_ == end_; }
  Fields inside() const { return Fields(data, bytes); }
  std::string_view text() const { return {reinterpret_cast<const char*>(data), bytes}; }

 private:
  static constexpr uint32_t kMostFields = 64;
  static constexpr uint32_t kShort = 5;  // bytes of a tag or a size, as the protobuf readers take them

  bool fixed(uint32_t n) {
    if (uint64_t(end_ - at_) < n) return false;
    value = 0;
    memcpy(&value, at_, n);
    at_ += n;
    return true;
  }

  const uint8_t* at_ = nullptr;
  const uint8_t* end_ = nullptr;
  uint32_t fields_ = 0;
};

// A Tensor.  Places are null where there is nothing.
struct Tensor {
  static constexpr uint32_t kMostRank = 8;  // expertd.common.bounds.MAX_RANK

  bool there = false, has_scales = false;
  bool odd = false, odd_scales = false;  // they are spelled otherwise than as raw bytes
  bool twice = false;                    // a part is given twice, which the generated classes put together
  int32_t dtype = 0;
  uint32_t rank = 0, block = 0;
  uint64_t shape[kMostRank] = {};
  uint32_t spelling = 0;  // number of the field of Tensor.data that is set, 0: none
  const uint8_t *data = nullptr, *raw = nullptr, *scales = nullptr, *scale_floats = nullptr;
  uint64_t data_bytes = 0, bytes = 0, scales_bytes = 0, scale_floats_bytes = 0;

  // False: it is no Tensor.  Of a longer shape the first extents are kept.
  bool read(Fields f) {
    if (there) return false;  // twice
    there = true;
    while (f.next()) {
      if (f.number == 1 && f.kind == 0) {
        dtype = int32_t(f.value);
      } else if (f.number == 2 && f.kind == 0) {
        extent(f.value);
      } else if (f.number == 2 && f.kind == 2) {
        for (Fields packed = f.inside(); !packed.empty();) {
          uint64_t v = 0;
          if (!packed.varint(&v)) return false;
          extent(v);
        }
      } else if (f.number >= 3 && f.number <= 6 && f.kind == 2) {
        read_data(f);
      } else if (f.number == 7 && f.kind == 2) {
        if (!read_scales(f.inside())) return false;
      }
    }
    return f.good;
  }

 private:
  void read_data(const Fields& f) {
    twice |= spelling != 0;
    spelling = f.number;
    data = f.data;
    data_bytes = f.bytes;
    if (f.number == 3) {
      raw = f.data;
      bytes = f.bytes;
    } else {
      odd = true;
    }
  }

  bool read_scales(Fields f) {
    twice |= has_scales;
    has_scales = true;
    while (f.next()) {
      if (f.number == 1 && f.kind == 0) block = uint32_t(f.value);
      if (f.number == 2 && f.kind == 2) scales = f.data, scales_bytes = f.bytes;
      if (f.number != 3 || f.kind != 2) continue;
      twice |= scale_floats != nullptr;
      scale_floats = f.data;
      scale_floats_bytes = f.bytes;
      odd_scales = true;
    }
    return f.good;
  }

  void extent(uint64_t v) {
    if (rank < kMostRank) shape[rank] = uint32_t(v);
    ++rank;
  }
};

// Writes fields.
class Writer {
 public:
  explicit Writer(std::string* out) : out_(out) {}

  void varint(uint64_t v) {
    for (; v >= 0x80; v >>= 7) out_->push_back(char(v | 0x80));
    out_->push_back(char(v));
  }
  // Left out where it is 0.
  void number(uint32_t field, uint64_t v) {
    if (!v) return;
    varint(field << 3);
    varint(v);
  }
  void real(uint32_t field, float v) {
    if (v == 0) return;
    varint(field << 3 | 5);
    out_->append(reinterpret_cast<const char*>(&v), sizeof v);
  }
  void text(uint32_t field, std::string_view v) {
    if (!v.empty()) message(field, v);
  }
  // Also where it is empty.
  void message(uint32_t field, std::string_view m) {
    open(field, m.size());
    out_->append(m);
  }
  // What comes before `bytes` bytes.
  void open(uint32_t field, uint64_t bytes) {
    varint(field << 3 | 2);
    varint(bytes);
  }

 private:
  std::string* out_;
};

// Of a traceparent whose caller records, trace id and span id into out[24]; zeros where it is none.  As
// expertd/common/trace_context.py.
inline void read_traceparent(const uint8_t* text, uint64_t n, uint8_t* out) {
  constexpr uint64_t kBytes = 55;
  memset(out, 0, 24);
  if (n < kBytes || text[2] != '-' || text[35] != '-' || text[52] != '-' || (n > kBytes && text[kBytes] != '-')) return;
  const auto digit = [](uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  uint8_t bytes[26], *to = bytes;
  bool trace = false, parent = false;
  for (uint64_t i = 0; i < kBytes; i += i == 0 || i == 33 || i == 50 ? 3 : 2) {
    const int high = digit(text[i]), low = digit(text[i + 1]);
    if (high < 0 || low < 0) return;
    *to = uint8_t(high << 4 | low);
    if (*to && to > bytes && to <= bytes + 16) trace = true;
    if (*to && to > bytes + 16 && to <= bytes + 24) parent = true;
    ++to;
  }
  if (bytes[0] == 0xff || (bytes[0] == 0 && n > kBytes) || !trace || !parent || !(bytes[25] & 1)) return;
  memcpy(out, bytes + 1, 24);
}

// The text of such 24 bytes; nothing where they are zeros.
inline std::string traceparent_of(const uint8_t* trace) {
  std::string out;
  uint64_t id[2];
  memcpy(id, trace, sizeof id);
  if (!(id[0] | id[1])) return out;
  out = "00-";
  for (int i = 0; i < 24; ++i) {
    out += "0123456789abcdef"[trace[i] >> 4];
    out += "0123456789abcdef"[trace[i] & 15];
    if (i == 15) out += '-';
  }
  return out + "-01";
}

}  // namespace expertd::wire
