// What stands in an answer's message, as a completion.  Nothing is trusted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "layout.h"
#include "messages.h"

namespace expertd::tcp {

using wire::Fields;
using wire::Tensor;

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
    return kind == 1 ? forward(inner) : kind == 2 ? error(wire::RequestError(inner)) : true;
  }

  void refuse(std::string_view reason, std::string_view text) {
    shm::Completion& c = completion;
    c.refused = 1;
    memset(c.name, 0, sizeof c.name);
    memset(c.text, 0, sizeof c.text);
    reason.copy(c.name, sizeof c.name - 1);
    text.copy(c.text, sizeof c.text - 1);
  }

 private:
  bool forward(Fields f) {
    const wire::Response r(f);
    completion.id = r.id;
    completion.routes_computed = uint32_t(r.routes_computed);
    output = r.output;
    const wire::Timing t(r.timing.fields());
    completion.set_version(r.weights_version, uint32_t(t.decode_ns));
    timing(t);
    load(wire::Load(r.load.fields()));
    return r.good;
  }

  void timing(const wire::Timing& t) {
    shm::Completion& c = completion;
    c.queue_ns = uint32_t(t.queue_ns);
    c.collect_ns = uint32_t(t.copy_in_ns);
    c.kernel_ns = uint32_t(t.kernel_ns);
    c.deliver_ns = uint32_t(t.copy_out_ns);
    c.batch_tokens = t.batch_tokens;
    c.batch_requests = t.batch_requests;
    c.arrival_ns = t.arrival_ns;
    t.backend.copy(c.name, sizeof c.name - 1);
  }

  void load(const wire::Load& l) {
    completion.queued_tokens = l.queued_tokens;
    completion.queued_requests = l.queued_requests;
    completion.token_ns = l.token_ns;
  }

  // Without an id nobody knows whose it is: false.
  bool error(const wire::RequestError& e) {
    completion.id = e.id;
    completion.retry_after_us = uint32_t(std::min<uint64_t>(e.retry_after_us, UINT32_MAX));
    refuse(e.reason, e.text);
    return e.good && e.id;
  }
};

}  // namespace expertd::tcp
