// One instruction-set level: the functions that the layer is made of. Each level_*.cpp compiles the same templates (kernels.h)
// for its own vector type and with its own compiler flags; nothing outside those files may use their instructions.
#pragma once
#include "layout.h"

namespace expertd {

// Rows of activations, ready for a matrix's kernel. Integral elements: 16-bit fixed point, one power-of-two scale a piece.
struct Rows {
  uint8_t* data;     // rows `stride` bytes apart: int16 in lane order (see lane_order in kernels.h), or f32 in column order
  size_t stride;
  float* scales;     // [row][pieces] (int16 rows)
  float* sums;       // [row][pieces] sum of the int16 values (int16 rows)
  int32_t* starts;   // [row][pieces] - sum * what a stored code has on top of its number (int16 rows)
  int pieces;
};

// Up to two neighbouring blocks against some rows: out[m][b * 16 + r] = sum over k of W[b][r][k] * x[index[m]][k].
struct BlockArgs {
  const Geometry* g;
  const uint8_t* block;   // the first block; the second follows
  int nb;                 // 1 or 2
  const float* scales;    // [nb][groups][16], from prepare()
  const float* minus_zeros;  // [nb][groups][16], or nullptr: symmetric
  const Rows* rows;
  const int32_t* index;   // [n] row numbers
  int n;
  float* out;             // [n][32]
};

struct Activation {
  int kind;
  bool limited;
  float alpha, beta, limit;
};

struct Level {
  const char* name;
  bool (*runs)();
  // dst[0..kp) = factor * row of a matrix's input, as f32, columns permuted and padded by map (nullptr: natural order, zeros behind k).
  void (*load_row)(const void* src, bool f32, const int32_t* map, int k, int kp, float factor, float* dst);
  // src [kp] f32 -> row `row` of rows.
  void (*quantize_row)(const Geometry& g, const float* src, const Rows& rows, int row);
  // Header of one block -> scales and minus_zeros [groups][16] f32; global multiplies the scales.
  void (*prepare)(const Geometry& g, const uint8_t* block, float global, float* scales, float* minus_zeros);
  void (*gemm_i16)(const BlockArgs&);
  void (*gemm_f32)(const BlockArgs&);
  // tile [n][32] (gate 16, up 16; or 16 without mul) + bias [32] -> h[m][0..16), rows `stride` floats apart.
  void (*activate)(const Activation&, const float* tile, const float* bias, int n, bool gated, float* h, size_t stride);
  // acc[cols] += weight * (tile[cols] + bias[cols]); cols a multiple of 16.
  void (*combine)(const float* tile, const float* bias, float weight, int cols, float* acc);
  void (*store)(const float* src, int n, bool f32, void* dst);
  // One thread's arithmetic peak, in operations a second: f32 multiply-adds, the level's 16-bit or 8-bit integer dot, bf16 dot.
  double (*peak)(int compute, double seconds);
  uint64_t (*read)(const uint8_t* data, size_t bytes);  // reads all of it, returns something that depends on it
};

// Factors of the float path that keep exponents in range: e4m3 and f16 bits are shifted into an f32 as they are, which leaves them
// 2^-120 and 2^-112 too small; half of that is given back to the activations and half to the scales.
constexpr float input_factor(int element) {
  return element == EXPERTD_E4M3 ? 0x1p60f : element == EXPERTD_F16 ? 0x1p56f : 1.0f;
}

// What a stored integral code has on top of its number (e2m1: on top of twice its number).
constexpr int code_offset(int element, bool zeros) {
  return element == EXPERTD_E2M1 ? 12 : element == EXPERTD_INT8 ? 128 : zeros ? 0 : 8;
}

extern const Level kPortable;
#if defined(__x86_64__)
extern const Level kAvx2, kAvx512, kAvx512Bf16;
#endif

}  // namespace expertd
