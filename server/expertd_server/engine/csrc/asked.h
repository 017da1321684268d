// What the core writes and reads of the contract's messages, over TCP and on gRPC streams.
#pragma once

#include <cstring>
#include <string>

#include "check.h"
#include "core.h"
#include "messages.h"
#include "write.h"

namespace expertd {

// Of one without typed and synthetic values, rows grouped by expert and a digest asked for.
RequestFacts facts_of(const wire::Request& r);

// Why the core does not take it from a message; nothing is looked at that check_request() looks at.
Refusal not_carried(const wire::Request& r);

// What stands in a ForwardResponse after its output.  decode_ns: until it stood in a queue, since arrival_ns.
std::string answer_tail(const Outcome& o, const Load& load, uint64_t decode_ns, uint64_t arrival_ns);

}  // namespace expertd
