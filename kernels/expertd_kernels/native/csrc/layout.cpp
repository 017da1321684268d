#include "layout.h"

#include <algorithm>
#include <climits>

namespace expertd {
namespace {

int round_up(int a, int b) { return (a + b - 1) / b * b; }

int bytes_of_scale(int type) {
  switch (type) {
    case EXPERTD_SCALE_NONE: return 0;
    case EXPERTD_SCALE_F32: return 4;
    case EXPERTD_SCALE_F16:
    case EXPERTD_SCALE_BF16: return 2;
    default: return 1;
  }
}

bool sensible(const expertd_spec& s) {
  if (s.experts < 1 || s.n < 1 || s.k < 1 || s.segments < 1 || s.rows < 0 || s.cols < 0) return false;
  if (s.n % s.segments || s.element < EXPERTD_INT4 || s.element > EXPERTD_F32) return false;
  if (s.scale_type < EXPERTD_SCALE_NONE || s.scale_type > EXPERTD_SCALE_E4M3) return false;
  if (is_quantized(s.element) == (s.scale_type == EXPERTD_SCALE_NONE)) return false;
  if (s.zeros && s.element != EXPERTD_INT4 && s.element != EXPERTD_INT8) return false;
  return int64_t(s.n) + 16 * s.segments < INT_MAX / 2 && int64_t(s.k) * 2 < INT_MAX / 2;
}

}  // namespace

bool geometry_of(const expertd_spec& s, Geometry& g) {
  if (!sensible(s)) return false;
  g = Geometry{};
  g.spec = s;
  g.seg_rows = s.n / s.segments;
  g.seg_blocks = round_up(g.seg_rows, kRows) / kRows;
  g.blocks = g.seg_blocks * s.segments;
  const bool quantized = is_quantized(s.element);
  g.group_cols = quantized && s.cols ? std::min(s.cols, s.k) : s.k;
  g.groups = (s.k + g.group_cols - 1) / g.group_cols;
  g.group = g.groups > 1 ? round_up(g.group_cols, 8) : round_up(s.k, 8);
  g.kp = (g.groups - 1) * g.group + round_up(s.k - (g.groups - 1) * g.group_cols, 8);
  g.per_lane = 32 / element_bits(s.element);
  const int parts = (g.group + kMaxPiece - 1) / kMaxPiece;
  g.piece = round_up((g.group + parts - 1) / parts, 8);
  const int last = g.kp - (g.groups - 1) * g.group;
  g.pieces = (g.groups - 1) * ((g.group + g.piece - 1) / g.piece) + (last + g.piece - 1) / g.piece;
  g.scale_bytes = bytes_of_scale(s.scale_type);
  g.scale_block = quantized && s.rows ? std::min(s.rows, g.seg_rows) : g.seg_rows;
  g.scale_rows = s.segments * ((g.seg_rows + g.scale_block - 1) / g.scale_block);
  const bool shared = g.scale_block % kRows == 0 || g.scale_block == g.seg_rows;
  g.lanes = shared && g.scale_block > 1 ? 1 : kRows;
  size_t header = size_t(g.groups) * g.lanes * g.scale_bytes + (s.zeros ? size_t(g.groups) * g.lanes : 0);
  g.header_bytes = (header + kVector - 1) / kVector * kVector;
  g.block_bytes = g.header_bytes + size_t(g.kp) / g.per_lane * kVector;
  g.expert_bytes = g.block_bytes * g.blocks;
  return true;
}

}  // namespace expertd
