// A ForwardRequest in a frame becomes a request of the core: every check that needs no look at the layer, which the core
// does (Core::enqueue), or at elements, which the batch does.  service/intake.py says the same in Python.
#include <cstdarg>
#include <cstdio>

#include "asked.h"
#include "core_class.h"
#include "peers.h"
#include "wait.h"

namespace expertd {
namespace {

constexpr uint32_t kDigest = 2, kScaleBlock = e4m3::kBlock;

bool is_integer(uint32_t dtype) { return dtype == kI32 || dtype == kI64; }

struct Refusal {
  uint32_t reason = kComputed;
  std::string text;

  __attribute__((format(printf, 3, 4))) void operator()(uint32_t why, const char* format, ...) {
    char line[320];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    reason = why;
    text = line;
  }
};

void check_hidden(const tcp::Tensor& t, Refusal& refuse) {
  const bool scaled = t.dtype == kE4m3;
  if (!t.there) return refuse(kMalformed, "hidden_states: absent, want a Tensor [M, H]");
  if (!is_float(t.dtype) && !scaled)
    return refuse(kBadDtype, "hidden_states.dtype: got %u, want F32, F16, BF16, or E4M3 with scales", t.dtype);
  if (t.has_scales && !scaled) return refuse(kScalesUnsupported, "hidden_states: got block scales, want them with E4M3 alone");
  if (t.rank != 2) return refuse(kBadShape, "hidden_states: got %u extents, want [M, H]", t.rank);
  if (t.odd) return refuse(kBadTensorSpelling, "hidden_states: spelled as numbers or synthetic, want raw bytes: others travel on the stream");
  const unsigned __int128 want = (unsigned __int128)t.shape[0] * t.shape[1] * size_of(uint8_t(t.dtype));
  if (t.bytes != want)
    return refuse(kBadByteCount, "hidden_states.raw: got %llu bytes, want %llu for [%llu, %llu]", (unsigned long long)t.bytes,
                  (unsigned long long)want, (unsigned long long)t.shape[0], (unsigned long long)t.shape[1]);
  const uint64_t scales = e4m3::scales_bytes(t.shape[0], t.shape[1]);
  if (!scaled || (!t.has_scales && !scales)) return;
  if (!t.has_scales) return refuse(kBadTensorSpelling, "hidden_states: E4M3: got no scales, want f32 for blocks of %u columns", kScaleBlock);
  if (t.block != kScaleBlock) return refuse(kBadShape, "hidden_states.scales.block: got %u, want %u", t.block, kScaleBlock);
  if (t.odd_scales) return refuse(kBadTensorSpelling, "hidden_states.scales: spelled as numbers, want raw bytes: others travel on the stream");
  if (t.scales_bytes != scales)
    refuse(kBadByteCount, "hidden_states.scales: got %llu bytes, want %llu", (unsigned long long)t.scales_bytes, (unsigned long long)scales);
}

void check_routes(const char* name, const tcp::Tensor& t, uint64_t M, uint64_t k, bool integers, Refusal& refuse) {
  if (!t.there) return refuse(kMalformed, "%s: absent, want topk_ids and topk_weights [M, top_k]", name);
  if (t.has_scales || t.dtype == kE4m3) return refuse(kScalesUnsupported, "%s: got E4M3 or block scales: hidden_states alone take them", name);
  if (integers ? !is_integer(t.dtype) : !is_float(t.dtype))
    return refuse(kBadDtype, "%s.dtype: got %u, want %s", name, t.dtype, integers ? "I32 or I64" : "F32, F16 or BF16");
  if (t.rank != 2 || t.shape[0] != M || t.shape[1] != k)
    return refuse(kBadShape, "%s: got %u extents [%llu, %llu], want [%llu, %llu]", name, t.rank, (unsigned long long)t.shape[0],
                  (unsigned long long)t.shape[1], (unsigned long long)M, (unsigned long long)k);
  if (t.odd) return refuse(kBadTensorSpelling, "%s: spelled as numbers or synthetic, want raw bytes: others travel on the stream", name);
  const unsigned __int128 want = (unsigned __int128)M * k * size_of(uint8_t(t.dtype));
  if (t.bytes != want)
    refuse(kBadByteCount, "%s.raw: got %llu bytes, want %llu", name, (unsigned long long)t.bytes, (unsigned long long)want);
}

void check(const Asked& a, Refusal& refuse) {
  if (!a.good) return refuse(kMalformed, "forward: got bytes that are no ForwardRequest; want a serialized protobuf message");
  if (!a.id) return refuse(kMissingRequestId, "request_id: got 0, want a number that is unique among those in flight");
  if (a.grouped || a.output_form == kDigest)
    return refuse(kUnsupportedCombination, "forward: got %s, which travels on the stream itself; want topk_ids, topk_weights and a tensor",
                  a.grouped ? "grouped rows" : "a digest asked for");
  if (a.output_form > kDigest) return refuse(kMalformed, "output_form: got %u, want TENSOR (1, or 0)", a.output_form);
  check_hidden(a.hidden, refuse);
  if (refuse.reason) return;
  check_routes("topk_ids", a.ids, a.hidden.shape[0], a.ids.shape[1], true, refuse);
  if (refuse.reason) return;
  check_routes("topk_weights", a.weights, a.hidden.shape[0], a.ids.shape[1], false, refuse);
  if (!refuse.reason && a.output_dtype && !is_float(a.output_dtype) && a.output_dtype != kE4m3)
    refuse(kOutputDtypeUnsupported, "output_dtype: got %u, want F32, F16, BF16, E4M3 or 0", a.output_dtype);
}

}  // namespace

bool sound(const Asked& a) {
  Refusal refusal;
  check(a, refusal);
  return !refusal.reason;
}

// `in` of `bytes`, reserved, holds the fields.
void Peers::forward(Peer* p, tcp::Fields fields, tcp::Buffer in, uint64_t bytes, uint64_t arrival_ns) {
  const Asked a(fields);
  Refusal refusal;
  check(a, refusal);
  if (!refusal.reason && p->works.count(a.id))
    refusal(kDuplicateRequestId, "request_id: got one that is in flight, want another one");
  const uint64_t out_bytes = refusal.reason ? 0 : tensor_bytes(output_dtype(a), a.hidden.shape[0], a.hidden.shape[1]);
  if (!refusal.reason && (p->works.size() >= bounds_.most_in_flight || !reserve(p, out_bytes)))
    refusal(kTooManyRequests, "session: got %zu requests in flight with %llu bytes, and one more; read answers first", p->works.size(),
            (unsigned long long)p->held);
  if (refusal.reason) {
    pool_.give(&in);
    give_back(p, bytes);
    return refuse(p, a.id, refusal.reason, 0, refusal.text);
  }
  Work* work = new_work();
  work->peer = p;
  work->id = a.id;
  work->in = in;
  work->held = bytes + out_bytes;
  work->out_bytes = a.hidden.shape[0] * a.hidden.shape[1] * size_of(output_dtype(a));
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
  f.hidden_dtype = uint8_t(a.hidden.dtype);
  f.ids_dtype = uint8_t(a.ids.dtype);
  f.weights_dtype = uint8_t(a.weights.dtype);
  f.out_dtype = output_dtype(a);
  f.router_weight_on_input = a.weight_on_input;
  f.named = 1;
  if (core_.traces()) tcp::read_traceparent(a.traceparent, a.traceparent_bytes, f.trace);
  work->decode_ns = f.arrival_ns - arrival_ns;
  p->works[a.id] = work;
  ++p->in_core;
  uint32_t retry_after_us = 0;
  const uint32_t reason = work->out ? core_.submit(f, &work->handle, &retry_after_us, work) : uint32_t(kQueueFull);
  if (!reason) return;
  Outcome o{};
  o.reason = reason;
  o.retry_after_us = retry_after_us;
  snprintf(o.text, sizeof o.text, "%s",
           reason == kDraining    ? "server: it drains and takes no new requests; ask another replica"
           : reason == kOverloaded
               ? "request: it would be answered too late, with what runs and waits before it; try again after retry_after_us, or another replica"
           : reason == kQueueFull ? "queue: it is full, of this caller's requests or of all; try again after retry_after_us, or another replica"
                                  : "request: its deadline had passed when it came; want time left to compute it");
  finish(work, o);
}

}  // namespace expertd
