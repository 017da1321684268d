// What stands in an answer's message, as a completion.  Nothing is trusted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layout.h"
#include "wire.h"

namespace expertd::tcp {

// One answer.  id 0: there is none in it, or it is no answer.
struct Answer {
  shm::Completion completion;  // its text, unless it is refused, is not written
  Tensor output;               // there: it was computed

  // False: it is none.
  bool read(Fields message) {
    uint32_t kind = 0;
    Fields inner;
    while (message.next())
      if (message.kind == 2) {
        kind = message.number;
        inner = message.inside();
      }
    memset(static_cast<void*>(&completion), 0, offsetof(shm::Completion, text));
    completion.set_version(0);
    if (!message.good) return false;
    return kind == 1 ? forward(inner) : kind == 2 ? error(inner) : true;
  }

  void refuse(const char* reason, uint64_t reason_bytes, const char* text, uint64_t text_bytes) {
    shm::Completion& c = completion;
    c.refused = 1;
    memset(c.name, 0, sizeof c.name);
    memset(c.text, 0, sizeof c.text);
    memcpy(c.name, reason, std::min<uint64_t>(reason_bytes, sizeof c.name - 1));
    memcpy(c.text, text, std::min<uint64_t>(text_bytes, sizeof c.text - 1));
  }

 private:
  bool forward(Fields f) {
    shm::Completion& c = completion;
    bool good = true;
    while (f.next()) {
      if (f.number == 1 && f.kind == 0) c.id = f.value;
      if (f.number == 2 && f.kind == 2) good &= output.read(f.inside());
      if (f.number == 4 && f.kind == 0) c.routes_computed = uint32_t(f.value);
      if (f.number == 5 && f.kind == 2) timing(f.inside());
      if (f.number == 6 && f.kind == 2) load(f.inside());
      if (f.number == 8 && f.kind == 0) c.set_version(f.value);
    }
    return good && f.good;
  }

  void timing(Fields f) {
    shm::Completion& c = completion;
    while (f.next()) {
      const auto n = uint32_t(f.value);
      if (f.number == 2) c.queue_ns = n;
      if (f.number == 3) c.collect_ns = n;
      if (f.number == 4) c.kernel_ns = n;
      if (f.number == 5) c.deliver_ns = n;
      if (f.number == 7) c.batch_tokens = n;
      if (f.number == 8) c.batch_requests = n;
      if (f.number == 9 && f.kind == 2) memcpy(c.name, f.data, std::min<uint64_t>(f.bytes, sizeof c.name - 1));
      if (f.number == 10) c.arrival_ns = f.value;
    }
  }

  void load(Fields f) {
    shm::Completion& c = completion;
    while (f.next()) {
      if (f.number == 1) c.queued_tokens = uint32_t(f.value);
      if (f.number == 2) c.queued_requests = uint32_t(f.value);
      if (f.number == 3 && f.kind == 5) memcpy(&c.token_ns, &f.value, sizeof c.token_ns);
    }
  }

  // Without an id nobody knows whose it is: false.
  bool error(Fields f) {
    const char *reason = "", *text = "";
    uint64_t reason_bytes = 0, text_bytes = 0;
    while (f.next()) {
      if (f.number == 1 && f.kind == 0) completion.id = f.value;
      if (f.number == 3 && f.kind == 2) reason = reinterpret_cast<const char*>(f.data), reason_bytes = f.bytes;
      if (f.number == 4 && f.kind == 2) text = reinterpret_cast<const char*>(f.data), text_bytes = f.bytes;
      if (f.number == 6 && f.kind == 0) completion.retry_after_us = uint32_t(std::min<uint64_t>(f.value, UINT32_MAX));
    }
    refuse(reason, reason_bytes, text, text_bytes);
    return f.good && completion.id;
  }
};

}  // namespace expertd::tcp
