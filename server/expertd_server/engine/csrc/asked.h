// What the core writes and reads of the contract's messages, over TCP and on gRPC streams.
#pragma once

#include <cstring>
#include <string>

#include "check.h"
#include "core.h"
#include "wire.h"

namespace expertd {

// The fields of a ForwardRequest.
struct Asked {
  uint64_t id = 0, timeout_us = 0, sent_us = 0, weights_version = 0;
  uint32_t layer = 0;
  int32_t output_dtype = 0, output_form = 0;
  bool grouped = false, weight_on_input = false, good = true;
  tcp::Tensor hidden, ids, weights;
  const uint8_t* traceparent = nullptr;
  uint64_t traceparent_bytes = 0;

  explicit Asked(tcp::Fields f) {
    while (f.next()) {
      if (f.kind == 0) {
        if (f.number == 1) id = f.value;
        if (f.number == 2) layer = uint32_t(f.value);
        if (f.number == 7) timeout_us = f.value;
        if (f.number == 8) output_dtype = int32_t(f.value);
        if (f.number == 9) output_form = int32_t(f.value);
        if (f.number == 11) weight_on_input = f.value != 0;
        if (f.number == 12) sent_us = f.value;
        if (f.number == 13) weights_version = f.value;
      } else if (f.kind == 2) {
        if (f.number == 3) good &= hidden.read(f.inside());
        if (f.number == 4) good &= ids.read(f.inside());
        if (f.number == 5) good &= weights.read(f.inside());
        if (f.number == 6) grouped = true;
        if (f.number == 10) traceparent = f.data, traceparent_bytes = f.bytes;
      }
    }
    good &= f.good;
  }
};

// Of one without typed and synthetic values, rows grouped by expert and a digest asked for.
RequestFacts facts_of(const Asked& a);

// Why the core does not take it from a message; nothing is looked at that check_request() looks at.
Refusal not_carried(const Asked& a);

// What stands in a ForwardResponse after its output.  decode_ns: until it stood in a queue, since arrival_ns.
std::string answer_tail(const Outcome& o, const Load& load, uint64_t decode_ns, uint64_t arrival_ns);

}  // namespace expertd
