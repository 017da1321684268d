// The C ABI of the engine's core.  server/expertd_server/engine/abi.py says the same to ctypes; a test holds the sizes
// together.
#pragma once

#include <cstdint>
#include <cstring>

#include "refusal_texts.h"

namespace expertd {

// expertd.v1.DataType
enum Dtype : uint8_t { kF32 = 1, kF16 = 2, kBf16 = 3, kE4m3 = 4, kI32 = 5, kI64 = 6 };

inline uint32_t size_of(uint8_t dtype) {
  switch (dtype) {
    case kF32: case kI32: return 4;
    case kF16: case kBf16: return 2;
    case kE4m3: return 1;
    case kI64: return 8;
    default: return 0;
  }
}

inline bool is_float(uint32_t dtype) { return dtype == kF32 || dtype == kF16 || dtype == kBf16; }

// What becomes of hidden states and router weights that are NaN or infinite.
enum NonFinite : uint8_t {
  kPass = 0,    // hidden states are computed as they are; a weight refuses its request
  kRefuse = 1,  // either refuses its request
  kZero = 2,    // either counts as 0
};

// One request of a transport that has its tensors in this process.  Addresses stay valid until its outcome.
struct Forward {
  uint64_t hidden;   // [M, H] of hidden_dtype
  uint64_t scales;   // of e4m3 hidden states: f32 [M, ceil(H / 128)]; else 0
  uint64_t ids;      // [M, top_k] of ids_dtype
  uint64_t weights;  // [M, top_k] of weights_dtype; 0 = all ones
  uint64_t out;      // [M, H] of out_dtype; of e4m3 with its scales behind it, as e4m3.h has them in one piece
  uint64_t bytes;    // of memory that the request holds until it is answered; 0 = none of this process's own
  uint64_t arrival_ns, deadline_ns;  // CLOCK_MONOTONIC; deadline 0 = none
  uint64_t weights_version;          // that must compute it; 0 = the one that is served
  uint32_t layer, tokens, top_k, caller;
  uint32_t hidden_size;  // H that the request was checked with; 0 = not told
  uint8_t hidden_dtype, ids_dtype, weights_dtype, out_dtype;
  uint8_t router_weight_on_input;
  uint8_t on_device;  // the addresses are the device's; only of sessions
  uint8_t named;      // its outcome's text is the backend, where it is computed
  uint8_t spare;
  uint8_t trace[24];  // W3C trace id and the caller's span id where its way is told of (TraceRecord), else zeros

  bool traced() const {
    uint64_t id[2];
    memcpy(id, trace, sizeof id);
    return id[0] | id[1];
  }
};

// A message of a gRPC stream that holds a request with raw tensors and nothing unusual, checked (messages.cpp).
struct InlineMessage {
  uint32_t layer, tokens, hidden_size, top_k;
  uint8_t hidden_dtype, ids_dtype, weights_dtype, out_dtype;  // out: as it is answered
  uint8_t router_weight_on_input;
  uint8_t traced;  // it has a traceparent
  uint8_t spare[2];
  uint64_t request_id, timeout_us, sent_us;
  uint64_t hidden, scales, ids, weights;  // where they begin in the message
  uint64_t output_bytes;                  // of the output
  uint64_t answer_bytes;                  // of the message that answers it
  uint64_t weights_version;               // as in Forward
};

// What became of one Forward, or that a session is gone (then `handle` is the session's).
struct Outcome {
  uint64_t handle;
  uint64_t posted_ns;  // when it was there to be taken
  uint64_t weights_version;  // that computed it; 0 = the layer has none
  uint32_t reason;  // Reason
  uint32_t routes_computed;
  uint32_t queue_ns, collect_ns, kernel_ns, deliver_ns;
  uint32_t batch_tokens, batch_requests;
  uint32_t backend;
  uint32_t retry_after_us;
  uint32_t session_gone;
  char text[228];  // why it is refused; the backend of one that is computed and asks for it (Forward::named)
};

// A batch for the experts of a layer on a CPU: expertd_call of kernels/expertd_kernels/native/csrc/abi.h.
struct Call {
  const void* x;         // [M, H]
  const int32_t* slots;  // [M, top_k]
  const float* weights;  // [M, top_k]
  void* out;             // [M, H]
  int64_t m, x_stride;   // x_stride: H
  int32_t top_k;
  int32_t x_f32, out_f32;  // 1: f32, 0: bf16
  int32_t weight_on_input;
};

// What a layer is.  slots: [num_experts + 1] int32, position of each expert here, -1 = elsewhere; the last stands for -1.
struct LayerFacts {
  uint32_t layer, generation;
  uint32_t hidden_size, num_experts;
  uint32_t held;  // experts here
  uint32_t top_k;          // of the model; a batch has at most max_tokens times as many routes.  0 = no bound
  uint32_t takes_e4m3;     // on a device: its experts take hidden states as codes and scales
  const int32_t* slots;
  uint64_t* expert_tokens;  // [held] counts of routes, or null: on a CPU, which this process counts on
  uint64_t device_slots, device_counts;  // the same on a device: slots [num_experts + 1] int32, counts [held] int64 or 0
  int32_t (*call)(void* context, const void* experts, const Call*);  // computes a batch on a CPU; null: Python does
  void* context;
  const void* experts;
  uint64_t weights_version;  // 0 = it has none
};

// What a batch of a layer took before it was served.
struct Measured {
  uint32_t rows, top_k;
  uint64_t ns;
};

// Memory of one batch slot, on the host; where a device reads it, pinned.
struct BatchSlotMemory {
  uint64_t* table;    // [rows, kWords], for devices; null on a CPU
  uint32_t* verdicts; // [rows, 2], written by the device; null on a CPU
  uint32_t* done;     // one word, written by the device at the end of a batch; null on a CPU
  void* hidden;       // [rows, H] of the compute dtype: batches of several requests, and staging
  int32_t* slots;     // [rows, top_k]; for devices: ids as they came, i32
  float* weights;     // [rows, top_k]
  void* out;          // [rows, H] of the compute dtype
  uint64_t hidden_bytes, slots_bytes, weights_bytes, out_bytes;
  uint64_t device_hidden, device_out;  // the device's [rows, H] of the compute dtype, for batches moved by copy engines
  uint64_t device_codes, device_scales;  // e4m3 [rows, H] and f32 [rows, H / 128], where a layer takes them; else 0
};

// What a core is for.
struct Config {
  uint32_t batch_slots, max_tokens, max_queue_requests;
  uint32_t streamed_rows;  // from so many rows on copy engines move a batch, beside the kernels of another; 0 = never
  uint64_t max_queue_tokens, max_queue_routes, max_queue_bytes, spin_ns;
  uint64_t brief_ns;  // a CPU's batch that takes no longer may be computed by the thread that brings it; 0 = none
  uint64_t max_wait_ns;  // maximum batching delay while nothing is under way; 0 = none
  float patience;  // part of the last batch's time for which its callers are waited for; 0 = not at all
  uint8_t compute_dtype, device;  // device: batches are described by a table and end by a word
  uint8_t refuse_late;  // what cannot be answered by its deadline is refused, and dropped before that has passed
  uint8_t traces;       // requests that have a trace are told of
  uint8_t nonfinite;    // NonFinite
  uint8_t spare[7];
};

// A piece of a batch as a CUDA graph, for one batch slot and up to `rows` rows.
enum Part : uint32_t {
  kWhole = 0,          // collect, experts, deliver, word: when the device is idle
  kExperts = 1,        // the experts alone: while another batch is under way
  kCollect = 2,        // of any layer of this hidden size and top_k, as are those below
  kCollectRoutes = 3,  // ids and weights alone: copy engines bring the hidden states
  kDeliver = 4,        // and the word
  kCollectE4m3 = 5,    // kCollect for layers that take codes and scales
  kCollectStaged = 6,  // kCollectRoutes for them: what copy engines bring is rounded
};

// A batch that the owner of the thread has to run (what has no graph).
struct Run {
  uint32_t batch_slot, layer, generation;
  uint32_t tokens;  // rows that hold something
  uint32_t rows;    // rows to compute
  uint32_t top_k, router_weight_on_input, requests;
  uint32_t whole;                        // to be captured in one piece
  uint32_t launch_error;                 // of CUDA: its graphs could not be launched; 0 = it has none
  uint64_t hidden, slots, weights, out;  // on a CPU: what the experts take and give
};

constexpr uint32_t kWaitBounds = 18;
constexpr uint64_t kWaitBoundsNs[kWaitBounds] = {
    10000,     20000,     50000,     100000,     200000,     500000,     1000000,    2000000,    5000000,
    10000000,  20000000,  50000000,  100000000,  200000000,  500000000,  1000000000, 2000000000, 5000000000,
};

// Batches of one layer that are alike: as many tokens and requests each, times within the same bounds.
struct BatchRecord {
  uint32_t layer, generation, backend, tokens, requests, failed;
  uint32_t batches;
  uint32_t waits[kWaitBounds + 1];  // requests by how long they waited: up to each bound, and longer
  uint64_t routes, queue_ns, collect_ns, kernel_ns, deliver_ns;  // of all of them together
};

// The way of one request of a session in shared memory (transport 1) or over TCP (2) that its caller traces.
struct TraceRecord {
  uint8_t trace[24];
  uint64_t arrival_ns, computed_ns, answered_ns;  // CLOCK_MONOTONIC; computed: end of the kernel, 0 = it was not computed
  uint32_t layer, tokens, top_k, reason, backend;
  uint32_t queue_ns, collect_ns, kernel_ns;  // from arrival to the cut of its batch; to the launch; in the kernel
  uint32_t batch_tokens, batch_requests, transport, deliver_ns;  // deliver: of its whole batch
};

// What waits, of all callers or of one.
struct Waiting {
  uint64_t requests, tokens, routes, bytes;
};

struct Load {
  uint32_t queued_tokens, queued_requests;  // waiting or under way
  uint32_t waiting_tokens, waiting_requests;
  float token_ns;
  uint32_t draining;
  uint64_t admitted, batches, tokens;
  uint64_t wait_ns;  // until what waits and runs now is computed, as far as is known
};

}  // namespace expertd
