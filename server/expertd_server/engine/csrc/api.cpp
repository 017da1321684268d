// The C functions of the core; server/expertd_server/engine/core.py calls them.
#include <algorithm>

#include "core_class.h"
#include "tcp_connections.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd;

// Of the structs, for the test that holds abi.py to core.h.
API void expertd_core_sizes(uint64_t* out) {
  const uint64_t sizes[] = {sizeof(Config), sizeof(Forward), sizeof(Outcome), sizeof(LayerFacts),
                            sizeof(BatchSlotMemory), sizeof(Run), sizeof(BatchRecord), sizeof(Load), sizeof(Waiting), sizeof(Measured),
                            sizeof(TcpBounds), sizeof(TraceRecord), sizeof(InlineMessage), sizeof(RequestFacts)};
  for (uint64_t size : sizes) *out++ = size;
}

API Core* expertd_core(const Config* config) { return new Core(*config); }
API void expertd_core_free(Core* c) { delete c; }
API void expertd_core_batch_slot(Core* c, uint32_t batch_slot, const BatchSlotMemory* m) { c->batch_slot(batch_slot, *m); }
API int expertd_core_device(Core* c, void* compute, void* in, void* out) { return c->device(compute, in, out); }
API uint32_t expertd_core_run(Core* c, Run* out) { return c->run(out); }
API void expertd_core_done(Core* c, uint32_t batch_slot, uint64_t kernel_ns, const char* text) { c->done(batch_slot, kernel_ns, text); }
API void expertd_core_launched(Core* c, uint32_t batch_slot) { c->launched(batch_slot); }
API void expertd_core_fail_all(Core* c, uint32_t reason, const char* text) { c->fail_all(reason, text); }
// why: its reason, text and retry_after_us.
API uint32_t expertd_core_submit(Core* c, const Forward* f, uint64_t* handle, Outcome* why) {
  const Refusal refused = c->submit(*f, handle);
  if (refused) put(refused, why);
  return refused.reason;
}
API uint32_t expertd_core_admits(Core* c, const Forward* f, Outcome* why) {
  const Refusal refused = c->admits(*f);
  if (refused) put(refused, why);
  return refused.reason;
}
// text: of `size` bytes, why not.
API uint32_t expertd_core_check(Core* c, const RequestFacts* request, char* text, uint32_t size) {
  const Refusal bad = c->check(*request);
  snprintf(text, size, "%s", bad.text.c_str());
  return bad.reason;
}
API void expertd_core_not_held(Core* c, uint32_t layer, char* text, uint32_t size) {
  snprintf(text, size, "%s", c->not_held(layer).text.c_str());
}
API void expertd_core_went_out(Core* c, uint64_t ns) { c->went_out(ns); }
API void expertd_core_drain(Core* c) { c->drain(); }
API void expertd_core_stop(Core* c) { c->stop(); }
API uint32_t expertd_core_outcomes(Core* c, Outcome* out, uint32_t most) { return c->answers().outcomes(out, most); }
API uint32_t expertd_core_records(Core* c, BatchRecord* out, uint32_t most) { return c->answers().records(out, most); }
API uint32_t expertd_core_traces(Core* c, TraceRecord* out, uint32_t most) { return c->answers().traces(out, most); }
API void expertd_core_interrupt(Core* c) { c->interrupt(); }
API void expertd_core_forget_graphs(Core* c) { c->forget_graphs(); }
API int expertd_core_waited_for(Core* c, uint32_t generation) { return c->waited_for(generation); }
API int expertd_core_computing(Core* c, uint32_t* layer, uint32_t* rows) { return c->computing(layer, rows); }
API void expertd_core_answered(Core* c, uint64_t* counts) { c->answers().answered(counts); }
API void expertd_core_wait_bounds(uint64_t* out) { std::copy_n(kWaitBoundsNs, kWaitBounds, out); }
API int expertd_core_bell(Core* c) { return c->answers().bell(); }
API void expertd_core_load(Core* c, Load* out) { *out = c->load(); }
API void expertd_core_waiting(Core* c, uint32_t caller, Waiting* all, Waiting* own) { c->waiting(caller, all, own); }

API void expertd_core_cancel(Core* c, uint64_t handle) {
  Command x{};
  x.kind = Command::kCancel;
  x.handle = handle;
  c->command(std::move(x));
}

// backends: `count` pairs (rows up to, 0 = any; the caller's number for it), ascending, and their names.  keeps: the layer
// that it replaces is held for requests that ask for its version, until another is kept or expertd_core_drop_kept.
API void expertd_core_add_layer(Core* c, const LayerFacts* facts, const uint32_t* backends, const char* const* names,
                                uint32_t count, const Measured* measured, uint32_t measurements, int keeps) {
  Command x{};
  x.kind = Command::kAddLayer;
  x.layer = facts->layer;
  x.keeps = keeps != 0;
  x.made = std::make_unique<Layer>();
  x.made->facts = *facts;
  x.made->slots.assign(facts->slots, facts->slots + facts->num_experts + 1);
  x.made->facts.slots = x.made->slots.data();
  for (uint32_t i = 0; i < count; ++i) {
    x.made->backends.emplace_back(backends[2 * i], backends[2 * i + 1]);
    x.made->names.emplace_back(names[i]);
  }
  x.measured.assign(measured, measured + measurements);
  c->command(std::move(x));
}

// Experts that answer with what they get (LayerFacts.call): for `expertd-echo`.  pace: microseconds that a batch takes,
// in its upper half, and those of a row.
API int32_t expertd_core_copy(void* pace, const void*, const Call* c) {
  if (const uint64_t us = (uint64_t(pace) >> 32) + uint64_t(c->m) * (uint64_t(pace) & 0xffffffff))
    usleep(useconds_t(us));
  memcpy(c->out, c->x, uint64_t(c->m) * uint64_t(c->x_stride) * (c->x_f32 ? 4 : 2));
  return 0;
}

API void expertd_core_remove_layer(Core* c, uint32_t layer) {
  Command x{};
  x.kind = Command::kRemoveLayer;
  x.layer = layer;
  c->command(std::move(x));
}

API void expertd_core_drop_kept(Core* c) {
  Command x{};
  x.kind = Command::kDropKept;
  c->command(std::move(x));
}

// last: router weight on input for kWhole and kExperts, the hidden size for the other parts, which any layer takes.
API void expertd_core_add_graph(Core* c, uint32_t layer, uint32_t generation, uint32_t part, uint32_t batch_slot, uint32_t rows,
                                uint32_t top_k, uint32_t last, void* exec) {
  Command x{};
  x.kind = Command::kAddGraph;
  x.layer = layer;
  x.generation = generation;
  x.key = {part, batch_slot, part == kDeliver ? 0 : top_k, last};
  x.rows = rows;
  x.exec = exec;
  c->command(std::move(x));
}

// entries: a power of two; bytes: of zeroed memory that holds both rings and an arena; pool: memory on the device, or 0.
API void expertd_core_add_session(Core* c, uint64_t handle, void* base, uint64_t bytes, uint32_t entries, int bell,
                                  uint32_t caller, uint64_t pool, uint64_t pool_bytes) {
  Command x{};
  x.kind = Command::kAddPort;
  x.connection = std::make_unique<ShmConnection>(Session{handle, base, bytes, pool, pool_bytes, entries, caller, bell});
  c->command(std::move(x));
}

// Its Outcome with session_gone says when the memory may be unmapped.
API void expertd_core_remove_session(Core* c, uint64_t handle) {
  Command x{};
  x.kind = Command::kRemovePort;
  x.handle = handle;
  c->command(std::move(x));
}

// For the test that holds it to expertd/common/trace_context.py.
API void expertd_read_traceparent(const uint8_t* text, uint64_t n, uint8_t* out) { wire::read_traceparent(text, n, out); }

// ---- sessions over TCP.  They are freed before the core, after whatever runs it.

API TcpConnections* expertd_tcp_connections(Core* c, const TcpBounds* bounds) {
  auto* p = new TcpConnections(*c, c->answers(), *bounds);
  c->answers().sink(p);
  return p;
}
API void expertd_tcp_connections_free(TcpConnections* p) { delete p; }
API void expertd_tcp_connections_add(TcpConnections* p, uint64_t handle, int fd, uint32_t caller) { p->add(handle, fd, caller); }
API void expertd_tcp_connections_remove(TcpConnections* p, uint64_t handle) { p->remove(handle); }
API uint32_t expertd_tcp_connections_gone(TcpConnections* p, uint64_t* handles, uint32_t most) { return p->gone(handles, most); }
API int expertd_tcp_connections_bell(TcpConnections* p) { return p->bell(); }
API uint64_t expertd_tcp_connections_unwritten(TcpConnections* p) { return p->unwritten(); }
API int expertd_tcp_connections_stop(TcpConnections* p, uint64_t wait_ms) { return p->stop(wait_ms); }
