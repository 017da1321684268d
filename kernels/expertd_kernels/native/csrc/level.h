// One instruction-set level: the functions that the layer is made of. Each level_*.cpp compiles the same templates (kernels.h)
// for its own vector type and with its own compiler flags; nothing outside those files may use their instructions.
#pragma once
#include <climits>

#include "layout.h"

namespace expertd {

// How weights and activations meet: as f32; as integers, activations in 16-bit fixed point with one power-of-two scale a piece; as
// bf16 pairs, where the processor multiplies those; or, where that was asked for, as int4 and 8-bit activations with one scale for 16
// columns. 16 bits and bf16 also for matrix tiles of 16 rows (tiles.h, panels.h), where 16-bit numbers are two planes of bytes.
enum Path { kF32, kI16, kBytes, kBf16, kI8, kI16Tiles, kBf16Tiles };
constexpr bool is_tiled(Path path) { return path >= kI16Tiles; }
constexpr bool is_integer(Path path) { return path == kI16 || path == kBytes || path == kI8 || path == kI16Tiles; }

// Rows of activations, ready for a matrix's kernel.
struct Rows {
  uint8_t* data;     // rows `stride` bytes apart: f32 in column order, pairs of 16 bits in lane order (store_pairs in rows.h), or tiles.h
  size_t stride;
  float* scales;     // [row][pieces]; kI8: [row][pieces][parts of 16 columns]
  float* sums;       // [row][pieces] sum of the rounded values (all but kF32); kI8: times their scales
  int32_t* starts;   // [row][pieces] - sum * what a stored code has on top of its number (kI16, kI16Tiles)
  int pieces;
  bool one_scale;    // kI8: a row has one scale, the same in all its places of `scales`
  const int32_t *tile_first, *tile_rows;  // [row] paths for tiles: the first row of its tile, and how many it has
};

// kI8: columns that share a scale.
constexpr int kPart = 16;
constexpr int parts_of(int piece) { return (piece + kPart - 1) / kPart; }

// A pair of blocks (the last one may be alone) against some rows: out[m][b * 16 + r] = sum over k of W[b][r][k] * x[index[m]][k].
struct BlockArgs {
  const Geometry* g;
  const uint8_t* pair;    // its headers, then codes (layout.h)
  int nb;                 // 1 or 2
  ptrdiff_t ahead;        // what is to be fetched while these blocks are read lies so many bytes behind them
  float factor[2];        // of the scales of each block
  float* scales;          // [nb][groups][16], room for what prepare() in scales.h makes of the headers
  float* minus_zeros;     // as scales, or nullptr: symmetric
  const Rows* rows;
  const int32_t* index;   // [n] row numbers
  int n;
  float* out;             // [n][32]
  bool invariant;         // the order of sums must not depend on n
  bool normal;            // no operand may be subnormal (EXPERTD_SUBNORMALS_AVOID)
};

// Pairs of blocks that lie one behind the other, against the same rows: out[pair][m][b * 16 + r]. One call for many pairs, because what
// stands around a pair (300 cycles) is time in which the memory waits.
struct BlockRun {
  BlockArgs first;      // the first pair; nb, ahead: set by for_pairs()
  int blocks;           // of all pairs
  int distance;         // in pairs: what is fetched meanwhile; 0 = `near` bytes
  ptrdiff_t near;
  const uint8_t* next;  // what is read after the run, or nullptr
  int pairs() const { return (blocks + 1) / 2; }
};

// f(BlockArgs) for each pair of a run, in order.
template <class F>
void for_pairs(const BlockRun& run, const F& f) {
  BlockArgs a = run.first;
  const Geometry& g = *a.g;
  const ptrdiff_t bytes = ptrdiff_t(2 * g.block_bytes);
  const int pairs = run.pairs();
  for (int i = 0; i < pairs; i++, a.pair += bytes, a.out += size_t(a.n) * 2 * kRows) {
    const int target = i + run.distance - pairs;  // pairs behind the run's end
    a.nb = 2 * i + 1 < run.blocks ? 2 : 1;
    a.ahead = !run.distance ? run.near : target < 0 ? run.distance * bytes : run.next ? run.next + target * bytes - a.pair : 0;
    if (a.ahead)
      for (size_t at = 0; at < a.nb * g.header_bytes; at += kVector) __builtin_prefetch(a.pair + a.ahead + at, 0, 2);
    f(a);
  }
}

struct Activation {
  int kind;
  bool limited;
  float alpha, beta, limit;
};

struct Level {
  const char* name;
  Path int4, e2m1;  // how they are multiplied; int8 always by kI16
  Path exact_int4;  // how int4 is multiplied in whole numbers: kBytes or kI16
  bool fetch_rows;  // int4 as bytes is fetched for a single row, too
  bool use_bf16;  // a dot product of bf16 pairs is there, and the fastest way for other elements
  int ahead;      // bytes to fetch weights ahead of their use
  int tile_rows;  // mean rows of an expert from which on they go through matrix tiles; 0 = there are none
  bool (*runs)();
  // dst[0..kp) = factor * row of a matrix's input, as f32, columns permuted and padded by map (nullptr: natural order, zeros behind k).
  void (*load_row)(const void* src, bool f32, const int32_t* map, int k, int kp, float factor, float* dst);
  // src [kp] f32 -> row `row` of rows, for all paths but kF32.
  void (*round_row)(Path path, const Geometry& g, const float* src, const Rows& rows, int row);
  void (*gemm)(Path path, const BlockRun&);
  // tile [n][32] (gate 16, up 16; or 16 without mul) + bias [32] -> h[m][0..16), rows `stride` floats apart.
  void (*activate)(const Activation&, const float* tile, const float* bias, int n, bool gated, float* h, size_t stride);
  // acc[cols] += weight * (tile[cols] + bias[cols]); cols a multiple of 16.
  void (*combine)(const float* tile, const float* bias, float weight, int cols, float* acc);
  void (*store)(const float* src, int n, bool f32, void* dst);
  double (*peak)(int kind, double seconds);  // one thread's arithmetic peak, EXPERTD_PEAK_*, in operations a second
  uint64_t (*read)(const uint8_t* data, size_t bytes, bool side_by_side);  // reads all of it, returns something that depends on it
};

// Columns that a piece takes in rows for tiles: whole rows of 64 bytes.
constexpr int tile_columns(Path path, int piece) {
  const int columns = path == kBf16Tiles ? 32 : 64;
  return (piece + columns - 1) / columns * columns;
}
constexpr int kTileRows = 16;
constexpr int kSlice = 96;  // rows of an expert that meet a pair of blocks at a time: a multiple of every tile's height

// Tile `t` of `n` <= kSlice rows begins here: ceil(n / 16) tiles of nearly equal height.
constexpr int tiles_of(int n) { return (n + kTileRows - 1) / kTileRows; }
constexpr int tile_begin(int n, int t) { return n * t / tiles_of(n); }

// Rows of sums, of all pairs, that a call has room for on tiles of bf16 (panels.h).
constexpr int kPanelRows = 4 * kSlice;

// Whether the rows of a matrix may go through matrix tiles. Short pieces would leave half of a tile empty; other elements than integers
// have no faster way for few rows.
inline bool has_tiles(const Level& level, const Geometry& g, int routes, int active) {
  if (!is_integral(g.spec.element)) return routes >= level.tile_rows / 4 * active;
  return g.piece >= (g.spec.element == EXPERTD_INT8 ? 64 : 32) && routes >= level.tile_rows * active;
}

// Whether a pass goes through matrix tiles. Where bits may not depend on the batch, nor may the arithmetic: tiles of int8 are exact, as its
// other path is; tiles round the activations of all others to bf16, so int4 never takes them (kBytes is near their speed) and the others
// always do (docs/log/cpu-xeon.md).
inline bool use_tiles(const Level& level, const expertd_layer& layer, const Geometry& g13, const Geometry& g2, int routes, int active) {
  if (!level.tile_rows || layer.compute == EXPERTD_COMPUTE_F32 || layer.compute == EXPERTD_COMPUTE_INT8_TOKEN) return false;
  const int a = g13.spec.element, b = g2.spec.element;
  if (layer.batch_invariant && (a != EXPERTD_INT8 || b != EXPERTD_INT8)) {
    const auto never = [](int element) { return element == EXPERTD_INT4 || element == EXPERTD_F16 || element == EXPERTD_F32; };
    return !never(a) && !never(b) && has_tiles(level, g13, INT_MAX, 1) && has_tiles(level, g2, INT_MAX, 1);
  }
  return has_tiles(level, g13, routes, active) && has_tiles(level, g2, routes, active);
}

inline Path path_of(const Level& level, int compute, int element, bool tiles, bool invariant) {
  if (compute == EXPERTD_COMPUTE_F32 || element == EXPERTD_F16 || element == EXPERTD_F32) return kF32;
  if (compute == EXPERTD_COMPUTE_INT8_TOKEN && element == EXPERTD_INT4) return kI8;
  // Where there are tiles, 16 bits are as fast as 8 or faster, for few rows and for many (docs/log/cpu-xeon.md).
  if (compute == EXPERTD_COMPUTE_INT8 && element == EXPERTD_INT4 && !level.tile_rows) return kI8;
  if (tiles) return element == EXPERTD_INT8 ? kI16Tiles : kBf16Tiles;
  if (!is_integral(element)) return level.use_bf16 ? kBf16 : kF32;
  const Path path = element == EXPERTD_INT4 ? level.int4 : element == EXPERTD_E2M1 ? level.e2m1 : kI16;
  // Sums of bf16 products depend on their order, which is fast for one row or for many; those of whole numbers do not.
  if (invariant && path == kBf16) return element == EXPERTD_INT4 ? level.exact_int4 : kI16;
  return path;
}

// Bytes of a row of activations.
constexpr size_t row_bytes(Path path, const Geometry& g) {
  if (!is_tiled(path)) return size_t(g.kp) * (path == kF32 ? 4 : 2);
  return 2 * size_t(g.pieces) * tile_columns(path, g.piece);
}

// kF32 shifts the bits of e4m3 and f16 into an f32 as they are, which leaves them 2^-120 and 2^-112 too small. Half of that is given
// back to the activations and half to the scales, so that no exponent leaves its range.
constexpr float input_factor(Path path, int element) {
  return path != kF32 ? 1.0f : element == EXPERTD_E4M3 ? 0x1p60f : element == EXPERTD_F16 ? 0x1p56f : 1.0f;
}
// normal: no operand is subnormal, and what decoding them has given back is not missing (value() in kernels.h).
constexpr float scale_factor(Path path, int element, bool normal) {  // e2m1 is computed with as twice its value, an integer
  if (normal && path == kF32 && element == EXPERTD_E4M3) return 0x1p57f;
  if (normal && path == kF32 && element == EXPERTD_F16) return 1.0f;
  return element == EXPERTD_E2M1 ? 0.5f : input_factor(path, element);
}

// Whether weights that meet so many rows are fetched before their use. int4 as bytes takes so few instructions for one row that a Zen 4
// core fetches one long stream by itself, and software's fetches cost it a sixth of the speed; a Xeon of 2023 reads a quarter less without
// them. All that takes more instructions loses up to a third without (docs/log/cpu-zen4.md, cpu-xeon.md).
constexpr bool fetches(const Level& level, Path path, int element, int rows) {
  return path != kBytes || element != EXPERTD_INT4 || rows > 1 || level.fetch_rows;
}

// What a stored integral code has on top of its number (e2m1: on top of twice its number).
constexpr int code_offset(int element, bool zeros) {
  return element == EXPERTD_E2M1 ? 12 : element == EXPERTD_INT8 ? 128 : zeros ? 0 : 8;
}

extern const Level kPortable;
#if defined(__x86_64__)
extern const Level kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAvx512Bytes, kAvx512BytesAhead, kAvx512Amx;
#endif

}  // namespace expertd
