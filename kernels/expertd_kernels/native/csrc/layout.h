// The packed layout, as arithmetic on sizes.
//
// A matrix [E, N, K] becomes E runs of `expert_bytes`. A block holds 16 rows of one segment; blocks of the segments alternate, so that
// gate rows i..i+15 come before up rows i..i+15. Blocks 2i and 2i + 1 of an expert are a pair (the last one may be alone): one run of
// memory, read front to back, since a core's prefetcher follows one stream far better than two. A pair:
//
//   headers  of each block: scales [groups][lanes] as stored, then zero points [groups][lanes], padded to 64 bytes.
//            lanes = 16 (one a row), or 1 where all rows of every block share a scale.
//   codes    vectors of 64 bytes, of the blocks in turns: 16 rows x 32 bits. A lane holds 8 (4 bit), 4, 2 or 1 neighbouring columns of
//            its row, the first one in the lowest bits. Signed 8-bit codes are stored with the top bit flipped (code + 128).
//
// Columns: each scale group is padded to a multiple of 8 columns (only groups whose size is no multiple of 8 need it), the last
// one too; kp is the sum. Padded rows and columns hold code 0; they meet an activation of 0 and are never copied out.
//
// Example: int4, N = 32, K = 128, g = 64, bf16 scales, 2 segments: one pair of 2 x 64 header bytes (2 groups x 16 rows x 2), then
// 128 / 8 = 16 vectors of each block, 2048 bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace expertd {

constexpr int kRows = 16;        // rows of a block
constexpr int kVector = 64;      // bytes of a vector of codes
constexpr int kMaxPiece = 128;   // columns that share one activation scale, at most (see pieces() in layout.cpp)

struct Geometry {
  expertd_spec spec;
  int seg_rows;           // rows of a segment
  int seg_blocks;         // blocks of a segment
  int blocks;             // blocks of an expert
  int groups;             // scale groups of a row (1 if unquantized)
  int group_cols;         // logical columns of a group
  int group;              // packed columns of a group
  int kp;                 // packed columns of a row
  int per_lane;           // columns in one 32-bit lane
  int piece;              // packed columns of a piece: pieces divide each group; the last of a group may be shorter
  int pieces;             // pieces of a row
  int lanes;              // scales stored for a group of a block: 16 or 1
  int scale_bytes;        // of one stored scale; 0 if unquantized
  int scale_rows;         // canonical scale rows of an expert
  int scale_block;        // rows of a segment that share a scale
  size_t header_bytes, block_bytes, expert_bytes;  // block_bytes: a block's share of its pair

  int scale_row(int segment, int row) const {
    return segment * (scale_rows / spec.segments) + row / scale_block;
  }
  // Blocks of the pair that block b, the first of it, begins.
  int pair_blocks(int b) const { return b + 1 < blocks ? 2 : 1; }
  int packed_column(int k) const { return k / group_cols * group + k % group_cols; }
};

// False if the spec makes no sense.
bool geometry_of(const expertd_spec& spec, Geometry& out);

constexpr bool is_nibble(int element) { return element == EXPERTD_INT4 || element == EXPERTD_E2M1; }
// Elements of a kernel, not of a spec: e4m3 and f16 whose subnormal codes become normal f32 numbers.
constexpr int kNormalE4M3 = 101, kNormalF16 = 102;
constexpr int element_bits(int element) {
  return is_nibble(element) ? 4 : element == EXPERTD_F32 ? 32 : element == EXPERTD_BF16 || element == EXPERTD_F16 || element == kNormalF16 ? 16 : 8;
}
// Elements whose codes are small integers (times a constant): they can be multiplied with integer dot products.
constexpr bool is_integral(int element) {
  return element == EXPERTD_INT4 || element == EXPERTD_INT8 || element == EXPERTD_E2M1;
}
constexpr bool is_quantized(int element) { return is_integral(element) || element == EXPERTD_E4M3; }

}  // namespace expertd
