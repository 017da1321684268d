// A ForwardRequest in a frame becomes a request of the core.
#include <algorithm>
#include <cstdio>

#include "asked.h"
#include "core_class.h"
#include "tcp_connections.h"
#include "wait.h"

namespace expertd {
namespace {

constexpr int32_t kDigest = 2;

TensorFacts facts_of(const wire::Tensor& t) {
  TensorFacts out{};
  out.present = t.there;
  out.dtype = t.dtype;
  out.spelling = t.raw ? kRaw : kNone;
  out.rank = t.rank;
  std::copy(t.shape, t.shape + kMostRank, out.shape);
  out.amount = t.bytes;
  out.scaled = t.has_scales;
  out.scale_block = t.block;
  out.scale_bytes = t.scales_bytes;
  return out;
}

}  // namespace

RequestFacts facts_of(const wire::Request& a) {
  RequestFacts r{};
  r.layer = a.layer;
  r.output_dtype = a.output_dtype;
  r.output_form = a.output_form;
  r.weight_on_input = a.weight_on_input;
  r.hidden = facts_of(a.hidden);
  r.ids = facts_of(a.ids);
  r.weights = facts_of(a.weights);
  return r;
}

Refusal not_carried(const wire::Request& a) {
  if (!a.good) return refusal<Text::malformed>("StreamForwardRequest");
  if (!a.id) return refusal<Text::missing_request_id>();
  if (a.grouped) return refusal<Text::not_over_tcp>("rows grouped by expert");
  if (a.output_form == kDigest) return refusal<Text::not_over_tcp>("a digest asked for");
  if (a.hidden.odd || a.hidden.odd_scales) return refusal<Text::values_not_over_tcp>("hidden_states");
  if (a.ids.odd || a.ids.odd_scales) return refusal<Text::values_not_over_tcp>("topk_ids");
  if (a.weights.odd || a.weights.odd_scales) return refusal<Text::values_not_over_tcp>("topk_weights");
  return {};
}

// `in` of `bytes`, reserved, holds the fields.
void TcpConnections::forward(TcpConnection* p, wire::Fields fields, tcp::Buffer in, uint64_t bytes, uint64_t arrival_ns) {
  const wire::Request a(fields);
  Refusal bad = not_carried(a);
  if (!bad && p->works.count(a.id)) bad = refusal<Text::duplicate_request_id>(a.id);
  const RequestFacts facts = facts_of(a);
  if (!bad) bad = core_.check(facts);
  const uint8_t out_dtype = output_dtype(facts);
  const uint64_t out_bytes = bad ? 0 : tensor_bytes(out_dtype, a.hidden.shape[0], a.hidden.shape[1]);
  if (!bad && p->works.size() >= bounds_.most_in_flight)
    bad = refusal<Text::too_many_in_flight>(p->works.size(), p->outbox.size(), bounds_.most_in_flight);
  if (!bad && !reserve(p, out_bytes))
    bad = refusal<Text::unread_bytes>(p->held, held_, out_bytes, bounds_.most_bytes);
  if (bad && core_.traces() && a.traceparent) {
    Forward f{};
    wire::read_traceparent(a.traceparent.at, a.traceparent.bytes, f.trace);
    f.arrival_ns = arrival_ns;
    f.layer = a.layer;
    f.tokens = uint32_t(a.hidden.shape[0]);
    f.top_k = uint32_t(a.ids.shape[1]);
    if (f.traced()) core_.answers().refused_outside(f, bad.reason);
  }
  if (bad) {
    pool_.give(&in);
    give_back(p, bytes);
    return refuse(p, a.id, bad);
  }
  Work* work = new_work();
  work->connection = p;
  work->id = a.id;
  work->in = in;
  work->held = bytes + out_bytes;
  work->out_bytes = a.hidden.shape[0] * a.hidden.shape[1] * size_of(out_dtype);
  work->out = pool_.take(out_bytes);
  work->hidden_size = uint32_t(a.hidden.shape[1]);
  Forward& f = work->f;
  f.hidden = uint64_t(a.hidden.raw);
  f.scales = uint64_t(a.hidden.scales);
  f.ids = uint64_t(a.ids.raw);
  f.weights = uint64_t(a.weights.raw);
  f.out = uint64_t(work->out.at);
  f.bytes = bytes + out_bytes;
  f.arrival_ns = shm::now_ns();
  f.deadline_ns = a.timeout_us ? arrival_ns + std::min<uint64_t>(a.timeout_us, uint64_t(1) << 50) * 1000 : 0;
  f.weights_version = a.weights_version;
  f.layer = a.layer;
  f.tokens = uint32_t(a.hidden.shape[0]);
  f.top_k = uint32_t(a.ids.shape[1]);
  f.caller = p->caller;
  f.hidden_size = work->hidden_size;
  f.hidden_dtype = uint8_t(a.hidden.dtype);
  f.ids_dtype = uint8_t(a.ids.dtype);
  f.weights_dtype = uint8_t(a.weights.dtype);
  f.out_dtype = out_dtype;
  f.router_weight_on_input = a.weight_on_input;
  f.named = 1;
  if (core_.traces()) wire::read_traceparent(a.traceparent.at, a.traceparent.bytes, f.trace);
  work->decode_ns = f.arrival_ns - arrival_ns;
  p->works[a.id] = work;
  ++p->in_core;
  const Refusal refused = work->out ? core_.submit(f, &work->handle, work) : refusal<Text::no_memory>(out_bytes);
  if (!refused) return;
  Outcome o{};
  put(refused, &o);
  finish(work, o);
}

}  // namespace expertd
