// Requests of gRPC streams as the bytes they came in, and answers as the bytes that go out: what Python neither decodes nor
// checks nor encodes, because nothing about them is unusual and nothing is wrong.
//
// An answer is a piece of memory of its final size: a head, the output, written there by the batch itself, and a tail;
// padding fills what the two leave.
#include <algorithm>
#include <cstring>

#include "asked.h"
#include "core_class.h"
#include "tcp_connections.h"

namespace expertd {
namespace {

constexpr uint64_t kHead = 64, kTail = 160;  // bytes, at least as many as their fields can have
constexpr size_t kMostName = 52;             // of a backend; what is longer is cut
constexpr uint64_t kMostTraceparent = 64;

// Until the tail is written, what it is made of stands in its place.
struct Draft {
  uint64_t begun_ns, arrival_ns;
};

bool ascii(const uint8_t* at, uint64_t n) {
  return std::all_of(at, at + n, [](uint8_t c) { return c < 0x80; });
}

void write_head(uint8_t* answer, const InlineMessage& m) {
  const wire::TensorOut output{true, m.out_dtype, kRaw, m.tokens, m.hidden_size, m.output_bytes, 0, 0};
  const wire::ResponseText text(m.request_id, output, kTail, true, kHead);
  memcpy(answer, text.head.data(), kHead);
}

void write_tail(uint8_t* answer, uint64_t bytes, Outcome o, const Load& load) {
  Draft d;
  uint8_t* at = answer + bytes - kTail;
  memcpy(&d, at, sizeof d);
  o.text[kMostName] = 0;
  std::string tail = answer_tail(o, load, d.arrival_ns - d.begun_ns, d.begun_ns);
  tail += wire::padding(kTail - tail.size());
  memcpy(at, tail.data(), kTail);
}

// False: it holds something else, something unusual or something wrong, which Python is to look at.
bool look(Core* core, const uint8_t* at, uint64_t n, InlineMessage* m) {
  wire::Fields stream(at, n);
  if (!stream.next() || stream.number != 1 || stream.kind != 2 || !stream.empty()) return false;
  const wire::Request a(stream.inside());
  if (not_carried(a)) return false;
  const RequestFacts facts = facts_of(a);
  const uint8_t out = output_dtype(facts);
  if (out == kE4m3 || !a.hidden.shape[0] || !a.hidden.shape[1] || core->check(facts)) return false;
  if (a.traceparent && (a.traceparent.bytes > kMostTraceparent || !ascii(a.traceparent.at, a.traceparent.bytes))) return false;
  const auto place = [&](const uint8_t* data) { return data ? uint64_t(data - at) : 0; };
  *m = InlineMessage{};
  m->layer = a.layer;
  m->tokens = uint32_t(a.hidden.shape[0]);
  m->hidden_size = uint32_t(a.hidden.shape[1]);
  m->top_k = uint32_t(a.ids.shape[1]);
  m->hidden_dtype = uint8_t(a.hidden.dtype);
  m->ids_dtype = uint8_t(a.ids.dtype);
  m->weights_dtype = uint8_t(a.weights.dtype);
  m->out_dtype = out;
  m->router_weight_on_input = a.weight_on_input;
  m->traced = a.traceparent.bytes != 0;
  m->request_id = a.id;
  m->timeout_us = a.timeout_us;
  m->sent_us = a.sent_us;
  m->weights_version = a.weights_version;
  m->hidden = place(a.hidden.raw);
  m->scales = a.hidden.dtype == kE4m3 ? place(a.hidden.scales) : 0;
  m->ids = place(a.ids.raw);
  m->weights = place(a.weights.raw);
  m->output_bytes = uint64_t(m->tokens) * m->hidden_size * size_of(out);
  m->answer_bytes = kHead + m->output_bytes + kTail;
  return true;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int expertd_message_look(Core* core, const uint8_t* at, uint64_t n, InlineMessage* m) { return look(core, at, n, m); }

// message: as it was looked at; answer: its memory.  Both stay until the outcome, which is at *out, with the answer written
// where it is computed, if it is there already: then its handle is not 0.  Where it is refused, *out says why.
API uint32_t expertd_message_submit(Core* core, const InlineMessage* m, const uint8_t* message, uint8_t* answer, uint32_t caller,
                                    uint64_t begun_ns, uint64_t deadline_ns, uint64_t* handle, Outcome* out) {
  const auto address = [&](uint64_t place) { return uint64_t(message + place); };
  Forward f{};
  f.hidden = address(m->hidden);
  f.scales = m->scales ? address(m->scales) : 0;
  f.ids = address(m->ids);
  f.weights = address(m->weights);
  f.out = uint64_t(answer + kHead);
  f.weights_version = m->weights_version;
  f.layer = m->layer;
  f.tokens = m->tokens;
  f.top_k = m->top_k;
  f.caller = caller;
  f.hidden_size = m->hidden_size;
  f.hidden_dtype = m->hidden_dtype;
  f.ids_dtype = m->ids_dtype;
  f.weights_dtype = m->weights_dtype;
  f.out_dtype = m->out_dtype;
  f.router_weight_on_input = m->router_weight_on_input;
  f.named = 1;
  f.deadline_ns = deadline_ns;
  f.arrival_ns = shm::now_ns();
  f.bytes = tensor_bytes(f.hidden_dtype, f.tokens, m->hidden_size) + m->output_bytes +
            routes_of(f) * (size_of(f.ids_dtype) + size_of(f.weights_dtype));
  write_head(answer, *m);
  const Draft d{begun_ns, f.arrival_ns};
  memcpy(answer + m->answer_bytes - kTail, &d, sizeof d);
  out->handle = 0;
  const Refusal refused = core->submit(f, handle, nullptr, out);
  if (refused)
    put(refused, out);
  else if (out->handle && !out->reason)
    write_tail(answer, m->answer_bytes, *out, core->load());
  return refused.reason;
}

// The answer of a request whose outcome came later.
API void expertd_message_answer(Core* core, uint8_t* answer, uint64_t bytes, const Outcome* o) {
  write_tail(answer, bytes, *o, core->load());
}

}  // namespace expertd
