// What lies in the memory that a client and a server of one host share.  expertd/shm/layout.py says the same in Python;
// a test holds the two together.
//
//   Control | Submission[entries] | Completion[entries] | arena
//
// The client puts tensors into the arena, fills the next submission and stores its `seq` last; the server copies the
// submission, works on the copy alone, and answers with a completion whose `seq` it stores last.  Entry i of either ring
// (counted from 0, for ever) lies at i % entries and is there once its seq is i + 1.
//
// A caller on a device starts its requests by words in the control page, which its stream writes and waits for: it
// prepares them once (kPrepare), and from then on a call is a number in `called` and the end of it a value in `answered`.
// One call of a session is under way at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace expertd::shm {

constexpr uint64_t kMagic = 0x31306d6873707865;  // "expshm01"
constexpr uint32_t kVersion = 2;
constexpr uint64_t kPage = 4096;
constexpr uint32_t kSaysVersion = 0x017677ff;
// No text begins so: a server that knows no versions leaves there what was there before.

// One side's sleep: it sets `sleeps`, looks once more, then waits at its socket; who writes an entry rings if it is set,
// and clears it, so that a sleep is rung for once.
struct alignas(64) Bell {
  std::atomic<uint32_t> sleeps;
};

// Submissions and completions lie on cache lines of their own in a region; Python's, which calls fill in or copy from, are
// aligned to 8 bytes, so the types ask for no more.
struct Completion {
  std::atomic<uint64_t> seq;
  uint64_t id;
  uint32_t refused;  // 0 = computed; 1 = `reason` and `text` say why not
  uint32_t routes_computed;
  uint32_t queue_ns, collect_ns, kernel_ns, deliver_ns;
  uint32_t batch_tokens, batch_requests;
  uint32_t queued_tokens, queued_requests;
  float token_ns;
  uint32_t retry_after_us;
  uint64_t arrival_ns;
  char name[36];  // refused: row of the error table; computed: the backend
  union {
    char text[404];  // of one that is refused
    struct {         // of one that is computed: set_version
      uint32_t says_version, version_low, version_high;
      uint32_t says_decode, decode_ns;  // kSaysVersion: decode_ns is Timing's, else it is not known
    };
  };

  // Of the weights that computed it; decode_ns: 0 = it is not known.
  void set_version(uint64_t version, uint32_t decode = 0) {
    says_version = kSaysVersion;
    version_low = uint32_t(version);
    version_high = uint32_t(version >> 32);
    says_decode = decode ? kSaysVersion : 0;
    decode_ns = decode;
  }
};
static_assert(offsetof(Completion, says_version) == 108 && offsetof(Completion, version_low) == 112, "layout.py says so");
static_assert(offsetof(Completion, decode_ns) == 124, "layout.py says so");
static_assert(sizeof(Completion) == 512, "the first 128 bytes hold all of an answer but an error's text");

struct alignas(64) Word {
  std::atomic<uint32_t> value;
};

enum Answered : uint32_t {
  kNotYet = 0,
  kGood = 1,
  kRefused = 2,  // `failure` says why
  kLost = 3,     // written by the client's side when the server is gone
};

struct alignas(4096) Control {
  uint64_t magic;
  uint32_t version;
  uint32_t entries;  // of each ring, a power of two
  uint64_t arena_offset;
  uint64_t arena_bytes;
  Bell client;
  Bell server;
  alignas(64) std::atomic<uint64_t> taken;  // submissions that the server has copied: their entries are free
  alignas(64) std::atomic<uint32_t> ended;  // either side: nothing more is taken from here on
  // Of calls from a device:
  Word called;    // number of a prepared request that starts now; the server takes it and writes 0
  Word answered;  // Answered; the caller writes 0 before it calls again
  alignas(64) std::atomic<uint64_t> calls;  // answered so far, and those of them that were refused
  std::atomic<uint64_t> refusals;
  alignas(512) Completion last;  // of the last call
  Completion failure;            // of the last that was refused
};
static_assert(sizeof(Control) == kPage, "one page");
static_assert(offsetof(Control, last) == 512, "layout.py says so");

enum Kind : uint8_t {
  kForward = 1,
  kCancel = 2,
  kEcho = 3,
  kPrepare = 4,  // as kForward, to be computed whenever `number` is called; deadline_ns counts from the call
};
enum Flag : uint16_t {
  kRouterWeightOnInput = 1,
  kOnDevice = 2,  // offsets are those of the session's memory on the device
};
constexpr uint32_t kMostPrepared = 1 << 16;

struct Submission {
  std::atomic<uint64_t> seq;
  uint64_t id;           // the client's, given back
  uint64_t deadline_ns;  // CLOCK_MONOTONIC, the same for both sides; 0 = none
  uint64_t hidden;       // offsets in the arena: [M, H]
  uint64_t ids;          // [M, top_k]
  uint64_t weights;      // [M, top_k]
  uint64_t out;          // [M, H], written by the server
  uint64_t scales;       // of e4m3 hidden states, f32 [M, ceil(H / 128)]
  uint32_t layer;
  uint32_t tokens;
  uint32_t top_k;
  uint8_t kind;
  uint8_t hidden_dtype, ids_dtype, weights_dtype, out_dtype;  // expertd.v1.DataType
  uint8_t spare;
  uint16_t flags;
  uint8_t trace[24];  // W3C trace id and parent id, zeros = none
  uint32_t number;    // of kPrepare, 1 to kMostPrepared: which one it is, or replaces
  uint32_t hidden_size;  // what the client takes H for; 0 = not told
  uint8_t reserved[4];
  uint64_t weights_version;  // that must compute it; 0 = the one that is served
};
static_assert(sizeof(Submission) == 128, "two cache lines");

inline uint64_t completions_offset(uint32_t entries) { return kPage + sizeof(Submission) * uint64_t(entries); }
inline uint64_t arena_offset(uint32_t entries) {
  const uint64_t end = completions_offset(entries) + sizeof(Completion) * uint64_t(entries);
  return (end + kPage - 1) / kPage * kPage;
}

}  // namespace expertd::shm
