// The C ABI of the CPU kernel: raw pointers and plain structs, no C++ and no Python types, so that ctypes is enough.
// Sizes: M tokens, H hidden, I intermediate, E experts, K columns and N rows of a matrix. All memory belongs to the caller.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXPERTD_CPU_ABI 4
#define EXPERTD_API __attribute__((visibility("default")))

enum { EXPERTD_OK = 0, EXPERTD_BAD_ARGUMENT = 1, EXPERTD_NO_MEMORY = 2, EXPERTD_NO_LEVEL = 3, EXPERTD_READ_FAILED = 4 };
enum { EXPERTD_INT4, EXPERTD_INT8, EXPERTD_E4M3, EXPERTD_E2M1, EXPERTD_BF16, EXPERTD_F16, EXPERTD_F32 };
enum { EXPERTD_SCALE_NONE, EXPERTD_SCALE_F32, EXPERTD_SCALE_F16, EXPERTD_SCALE_BF16, EXPERTD_SCALE_E8M0, EXPERTD_SCALE_E4M3 };
enum { EXPERTD_SILU, EXPERTD_GELU, EXPERTD_GELU_TANH, EXPERTD_SWIGLUOAI, EXPERTD_RELU2 };
// INT8: activations may be rounded to 8 bits with a scale for 16 columns; INT8_TOKEN: they are, with one scale for a row. Both for int4
// weights alone.
// READ, for the benchmark: nothing is computed or written; each thread only reads the weights that it would compute with, in their order.
enum { EXPERTD_COMPUTE_BF16, EXPERTD_COMPUTE_F32, EXPERTD_COMPUTE_INT8, EXPERTD_COMPUTE_READ, EXPERTD_COMPUTE_INT8_TOKEN };

// How codes of e4m3 and f16 below their least normal number meet f32: as subnormal numbers, or made normal first, for processors that are
// slow with those. AUTO: as this processor needs.
enum { EXPERTD_SUBNORMALS_AUTO, EXPERTD_SUBNORMALS_AVOID, EXPERTD_SUBNORMALS_KEEP };

// What weights are rounded to. E4M3: with a scale for columns of one row.
enum { EXPERTD_ROUND_INT4, EXPERTD_ROUND_INT4_ZEROS, EXPERTD_ROUND_MXFP4, EXPERTD_ROUND_NVFP4, EXPERTD_ROUND_E4M3 };

enum { EXPERTD_PEAK_BF16, EXPERTD_PEAK_F32, EXPERTD_PEAK_INT8, EXPERTD_PEAK_INT16 };

// What one matrix [E, N, K] is. rows, cols: weights that share a scale, inside a segment; 0 = all of them.
typedef struct {
  int32_t element, scale_type;
  int32_t experts, n, k, segments;
  int32_t rows, cols;
  int32_t zeros;         // 1: stored zero points
  int32_t global_scale;  // 1: one more f32 multiplier for each expert and segment
} expertd_spec;

// A matrix in canonical form (see canonical.py), and the same in the packed layout (see layout.h).
typedef struct {
  const uint8_t* codes;  // [E, N, K], or [E, N, ceil(K/2)] for 4-bit elements
  const uint8_t* scales;
  const uint8_t* zeros;
} expertd_canonical;

typedef struct {
  expertd_spec spec;
  const uint8_t* stream;        // [E, expert_bytes], 64-byte aligned
  const float* bias;            // [E, blocks * 16] in block order, padded with zeros; or NULL
  const float* global_scales;   // [E, segments] or NULL
  const int32_t* columns;       // [E, kp]: input column of each packed column, -1 = none (zero); or NULL = natural order
} expertd_matrix;

typedef struct {
  expertd_matrix w13, w2;
  int32_t activation;  // EXPERTD_SILU, ...
  int32_t has_limit;
  float alpha, beta, limit;
  int32_t compute;  // EXPERTD_COMPUTE_*
  int32_t batch_invariant;  // 1: a token's bits do not depend on the batch that it is computed in
  int32_t subnormals;  // EXPERTD_SUBNORMALS_*; the bits of the answers are the same
} expertd_layer;

typedef struct {
  const void* x;        // [M, H], rows x_stride elements apart
  const int32_t* ids;   // [M, top_k] slots, -1 = not here
  const float* weights; // [M, top_k]
  void* out;            // [M, H] contiguous
  int64_t m, x_stride;
  int32_t top_k;
  int32_t x_f32, out_f32;  // 1: f32, 0: bf16
  int32_t weight_on_input;
} expertd_call;

typedef struct {
  const uint8_t* weights;  // [rows, columns] bf16 or f32, finite
  uint8_t* codes;          // [rows, columns / 2], E4M3: [rows, columns]
  uint8_t* scales;         // [rows, columns / block]
  uint8_t* zeros;          // the same; NULL for all but INT4_ZEROS
  const float* second;     // [ceil(rows / rows_of_part)] second-level scales, 1 where there are none
  const float* tries;      // [count] what is tried for each scale (weights/quantize.py): divisors, E4M3 factors, INT4_ZEROS shrinks
  int64_t rows, columns;
  int64_t block;           // columns that share a scale: a multiple of 8 that divides `columns`
  int64_t rows_of_part;
  int32_t kind, scale_type, source;  // EXPERTD_ROUND_*, EXPERTD_SCALE_*, EXPERTD_BF16 or EXPERTD_F32
  int32_t count;
} expertd_rounding;

typedef struct expertd_context expertd_context;

EXPERTD_API int32_t expertd_cpu_abi(void);
EXPERTD_API const char* expertd_cpu_sources(void);          // hash of the sources it was built from
EXPERTD_API const char* expertd_cpu_levels(void);           // levels that run here, best first, comma-separated
// level: "" = best. threads: >= 1, the most that work on a call. cpus: numbers of the CPUs that thread 0 may run on, then thread 1's, ..;
// ends[t]: where thread t's end in it. Thread 0 is the caller, and stays where it is. Both NULL: any CPU.
EXPERTD_API int32_t expertd_cpu_create(const char* level, int32_t threads, const int32_t* cpus, const int32_t* ends, expertd_context** out);
EXPERTD_API void expertd_cpu_destroy(expertd_context*);
EXPERTD_API const char* expertd_cpu_level(const expertd_context*);
EXPERTD_API int32_t expertd_cpu_threads(const expertd_context*);  // that work on a call at present: fewer while others use the cores

// Bytes of the packed stream of all experts; 0 if the spec makes no sense. kp: packed columns. blocks: 16-row blocks of one expert.
EXPERTD_API int64_t expertd_cpu_stream_bytes(const expertd_spec*, int32_t* kp, int32_t* blocks);
EXPERTD_API int32_t expertd_cpu_pack(expertd_context*, const expertd_spec*, const expertd_canonical*, uint8_t* stream);
EXPERTD_API int32_t expertd_cpu_unpack(expertd_context*, const expertd_spec*, const uint8_t* stream, uint8_t* codes, uint8_t* scales,
                                       uint8_t* zeros);
// Unquantized weights -> canonical codes and scales, with the bits of weights/quantize.py.
EXPERTD_API int32_t expertd_cpu_round(expertd_context*, const expertd_rounding*);
EXPERTD_API int32_t expertd_cpu_forward(expertd_context*, const expertd_layer*, const expertd_call*);

// Checkpoint layouts -> canonical codes: reads a matrix of 32-bit words of 4- or 8-bit fields, low bits first, from `offset` of a
// file on, and writes it row by row, words along K; each word is XORed with `flip` (0x80808080: unsigned bytes become signed ones).
// rows: [rows, cols] packed along its rows -> out [cols, rows].
EXPERTD_API int32_t expertd_repack_rows(int32_t fd, int64_t offset, int64_t rows, int64_t cols, uint32_t flip, uint32_t* out);
// gather: the same for [k * bits / 32, n], field j taken from field columns[j]. bits 4 or 8.
EXPERTD_API int32_t expertd_repack_gather(int32_t fd, int64_t offset, int64_t k, int64_t n, int32_t bits, const int32_t* columns,
                                          uint32_t flip, uint32_t* out);
// columns: [k, cols], nibble i of word c in column 8 c + order[i] -> out [8 cols, k / 8]. k % 8 == 0.
EXPERTD_API int32_t expertd_repack_columns(int32_t fd, int64_t offset, int64_t k, int64_t cols, const uint8_t* order, uint32_t* out);

// Mapped files.  While a range is guarded, an access to pages of it that cannot be had (the file was cut, its disk fails) finds zeros
// instead of ending the process, and lost says so from then on (1). start: where the mapping begins. add returns the range's number, or
// -1 where it is not guarded.
EXPERTD_API int32_t expertd_guard_add(void* start, int64_t bytes);
EXPERTD_API void expertd_guard_remove(int32_t range);
EXPERTD_API int32_t expertd_guard_lost(int32_t range);

// Ceilings of this machine, for the benchmark: GB/s of a plain read; 10^9 operations a second of multiply-adds, EXPERTD_PEAK_* (BF16: f32
// where the level has no bf16 dot product).
EXPERTD_API double expertd_cpu_read_gb_s(expertd_context*, const uint8_t* data, int64_t bytes);
EXPERTD_API double expertd_cpu_peak(expertd_context*, int32_t kind, double seconds);

#ifdef __cplusplus
}
#endif
