// Canonical codes and scales <-> the packed layout (layout.h). One unit of work = one block of 16 rows.
#include <algorithm>
#include <cstring>

#include "context.h"

namespace expertd {
namespace {

constexpr int kStep = 64;  // vectors moved at a time: 16 rows x 256 bytes stay in the first-level cache

struct Job {
  const Geometry& g;
  const uint8_t *codes, *scales, *zeros;  // pack: canonical, read
  uint8_t *to_codes, *to_scales, *to_zeros;
  const uint8_t* stream;
  uint8_t* to_stream;
};

size_t row_bytes(const Geometry& g) {
  return is_nibble(g.spec.element) ? size_t(g.spec.k + 1) / 2 : size_t(g.spec.k) * element_bits(g.spec.element) / 8;
}

// 16 rows of `vectors` 32-bit words, `stride` bytes apart, to `vectors` runs of 16 words, `step` bytes apart; flip is xor-ed into each word.
void transpose_in(const uint8_t* src, size_t stride, int rows, int vectors, uint32_t flip, uint8_t* dst, size_t step) {
  for (int v0 = 0; v0 < vectors; v0 += kStep) {
    const int n = std::min(kStep, vectors - v0);
    for (int r = 0; r < rows; r++) {
      const uint8_t* from = src + r * stride + size_t(v0) * 4;
      uint8_t* to = dst + size_t(v0) * step + r * 4;
      for (int v = 0; v < n; v++) {
        uint32_t word;
        std::memcpy(&word, from + v * 4, 4);
        word ^= flip;
        std::memcpy(to + size_t(v) * step, &word, 4);
      }
    }
  }
}

void transpose_out(const uint8_t* src, size_t step, size_t stride, int rows, int vectors, uint32_t flip, uint8_t* dst) {
  for (int v0 = 0; v0 < vectors; v0 += kStep) {
    const int n = std::min(kStep, vectors - v0);
    for (int r = 0; r < rows; r++) {
      uint8_t* to = dst + r * stride + size_t(v0) * 4;
      const uint8_t* from = src + size_t(v0) * step + r * 4;
      for (int v = 0; v < n; v++) {
        uint32_t word;
        std::memcpy(&word, from + size_t(v) * step, 4);
        word ^= flip;
        std::memcpy(to + v * 4, &word, 4);
      }
    }
  }
}

// Copies columns [k0, k0 + n) of a canonical row to packed columns [at, at + n) of one padded row, or back.
void move_columns(int bits, const uint8_t* src, int k0, uint8_t* dst, int at, int n) {
  if (bits != 4) {
    std::memcpy(dst + size_t(at) * bits / 8, src + size_t(k0) * bits / 8, size_t(n) * bits / 8);
  } else if (k0 % 2 == 0 && at % 2 == 0) {
    std::memcpy(dst + at / 2, src + k0 / 2, n / 2);
    if (n % 2) dst[(at + n) / 2] = uint8_t((dst[(at + n) / 2] & 0xF0) | (src[(k0 + n) / 2] & 0x0F));
  } else {
    for (int i = 0; i < n; i++) {
      const uint8_t code = uint8_t(src[(k0 + i) / 2] >> ((k0 + i) % 2 * 4)) & 15;
      uint8_t& byte = dst[(at + i) / 2];
      byte = (at + i) % 2 ? uint8_t((byte & 0x0F) | code << 4) : uint8_t((byte & 0xF0) | code);
    }
  }
}

struct BlockPlace {
  int expert, block, segment, row, rows;  // row: first row inside the segment; rows: logical rows of the block
  BlockPlace(const Geometry& g, int unit)
      : expert(unit / g.blocks), block(unit % g.blocks), segment(block % g.spec.segments), row(block / g.spec.segments * kRows),
        rows(std::min(kRows, g.seg_rows - row)) {}
  size_t pair_at(const Geometry& g) const { return expert * g.expert_bytes + (block & ~1) * g.block_bytes; }
  size_t header_at(const Geometry& g) const { return pair_at(g) + (block & 1) * g.header_bytes; }
  size_t codes_at(const Geometry& g) const { return pair_at(g) + g.pair_blocks(block & ~1) * g.header_bytes + (block & 1) * kVector; }
  size_t step(const Geometry& g) const { return g.pair_blocks(block & ~1) * kVector; }
  size_t first_row(const Geometry& g) const { return size_t(expert) * g.spec.n + size_t(segment) * g.seg_rows + row; }
  // Index of the first scale of row r of the block in the canonical scales [E, scale_rows, groups].
  size_t scale_at(const Geometry& g, int r) const {
    return (size_t(expert) * g.scale_rows + g.scale_row(segment, std::min(row + r, g.seg_rows - 1))) * g.groups;
  }
};

uint32_t flip_of(const Geometry& g) { return g.spec.element == EXPERTD_INT8 ? 0x80808080u : 0u; }

void pack_codes(const Job& j, const BlockPlace& at, uint8_t* dst) {
  const Geometry& g = j.g;
  const int bits = element_bits(g.spec.element), vectors = g.kp / g.per_lane;
  const size_t stride = row_bytes(g);
  const uint8_t* src = j.codes + at.first_row(g) * stride;
  const int whole = g.group == g.group_cols || g.groups == 1 ? g.spec.k / g.per_lane : 0;  // vectors that need no padding
  const size_t step = at.step(g);
  if (at.rows < kRows || whole < vectors) {
    for (int v = 0; v < vectors; v++) std::memset(dst + v * step, 0, kVector);
  }
  transpose_in(src, stride, at.rows, whole, flip_of(g), dst, step);
  if (whole == vectors) return;
  std::vector<uint8_t> row(size_t(g.kp) * bits / 8);  // padded
  for (int r = 0; r < at.rows; r++) {
    std::fill(row.begin(), row.end(), 0);
    for (int k = whole * g.per_lane; k < g.spec.k;) {
      const int n = std::min(g.group_cols - k % g.group_cols, g.spec.k - k);
      move_columns(bits, src + r * stride, k, row.data(), g.packed_column(k), n);
      k += n;
    }
    transpose_in(row.data() + size_t(whole) * 4, 0, 1, vectors - whole, flip_of(g), dst + whole * step + r * 4, step);
  }
}

void unpack_codes(const Job& j, const BlockPlace& at, const uint8_t* src) {
  const Geometry& g = j.g;
  const int bits = element_bits(g.spec.element), vectors = g.kp / g.per_lane;
  const size_t stride = row_bytes(g);
  uint8_t* dst = j.to_codes + at.first_row(g) * stride;
  const int whole = g.group == g.group_cols || g.groups == 1 ? g.spec.k / g.per_lane : 0;
  const size_t step = at.step(g);
  transpose_out(src, step, stride, at.rows, whole, flip_of(g), dst);
  if (whole == vectors) return;
  std::vector<uint8_t> row(size_t(g.kp) * bits / 8);
  for (int r = 0; r < at.rows; r++) {
    transpose_out(src + whole * step + r * 4, step, 0, 1, vectors - whole, flip_of(g), row.data() + size_t(whole) * 4);
    if (bits == 4 && g.spec.k % 2) dst[(r + 1) * stride - 1] = 0;  // the nibble behind an odd K
    for (int k = whole * g.per_lane; k < g.spec.k;) {
      const int n = std::min(g.group_cols - k % g.group_cols, g.spec.k - k);
      move_columns(bits, row.data(), g.packed_column(k), dst + r * stride, k, n);
      k += n;
    }
  }
}

// Scales or zero points, `bytes` each: canonical [scale row][group] <-> header [group][lane].
template <bool IN>
void move_header(const Geometry& g, const BlockPlace& at, uint8_t* canonical, uint8_t* header, int bytes) {
  for (int lane = 0; lane < g.lanes; lane++) {
    if (!IN && lane >= at.rows) return;
    uint8_t* c = canonical + at.scale_at(g, lane) * bytes;
    uint8_t* h = header + size_t(lane) * bytes;
    for (int i = 0; i < g.groups; i++, c += bytes, h += size_t(g.lanes) * bytes) std::memcpy(IN ? h : c, IN ? c : h, bytes);
  }
}

void pack_block(const Job& j, int unit) {
  const Geometry& g = j.g;
  const BlockPlace at(g, unit);
  uint8_t* dst = j.to_stream + at.header_at(g);
  std::memset(dst, 0, g.header_bytes);
  if (g.scale_bytes) move_header<true>(g, at, const_cast<uint8_t*>(j.scales), dst, g.scale_bytes);
  if (g.spec.zeros) move_header<true>(g, at, const_cast<uint8_t*>(j.zeros), dst + size_t(g.groups) * g.lanes * g.scale_bytes, 1);
  pack_codes(j, at, j.to_stream + at.codes_at(g));
}

void unpack_block(const Job& j, int unit) {
  const Geometry& g = j.g;
  const BlockPlace at(g, unit);
  uint8_t* src = const_cast<uint8_t*>(j.stream) + at.header_at(g);
  // Where several blocks share a scale row they write the same bytes; only the first of them does, so that no two threads meet.
  const bool owner = g.lanes == kRows || at.row % g.scale_block == 0;
  if (g.lanes == kRows && g.scale_block > 1) {
    for (int r = 0; r < at.rows; r++) {
      if ((at.row + r) % g.scale_block) continue;
      const size_t c = at.scale_at(g, r);
      for (int i = 0; i < g.groups; i++) {
        std::memcpy(j.to_scales + (c + i) * g.scale_bytes, src + (size_t(i) * kRows + r) * g.scale_bytes, g.scale_bytes);
        if (g.spec.zeros) j.to_zeros[c + i] = src[size_t(g.groups) * kRows * g.scale_bytes + size_t(i) * kRows + r];
      }
    }
  } else if (owner) {
    if (g.scale_bytes) move_header<false>(g, at, j.to_scales, src, g.scale_bytes);
    if (g.spec.zeros) move_header<false>(g, at, j.to_zeros, src + size_t(g.groups) * g.lanes * g.scale_bytes, 1);
  }
  unpack_codes(j, at, j.stream + at.codes_at(g));
}

}  // namespace
}  // namespace expertd

using namespace expertd;

extern "C" {

int64_t expertd_cpu_stream_bytes(const expertd_spec* spec, int32_t* kp, int32_t* blocks) {
  Geometry g;
  if (!geometry_of(*spec, g)) return 0;
  if (kp) *kp = g.kp;
  if (blocks) *blocks = g.blocks;
  return int64_t(g.expert_bytes) * spec->experts;
}

int32_t expertd_cpu_pack(expertd_context* context, const expertd_spec* spec, const expertd_canonical* from, uint8_t* stream) {
  Geometry g;
  if (!context || !stream || !from->codes || !geometry_of(*spec, g)) return EXPERTD_BAD_ARGUMENT;
  if ((g.scale_bytes && !from->scales) || (spec->zeros && !from->zeros)) return EXPERTD_BAD_ARGUMENT;
  const Job job{g, from->codes, from->scales, from->zeros, nullptr, nullptr, nullptr, nullptr, stream};
  std::lock_guard<std::mutex> lock(context->busy);
  context->pool.run_even(spec->experts * g.blocks, [&](int unit, int) { pack_block(job, unit); });
  return EXPERTD_OK;
}

int32_t expertd_cpu_unpack(expertd_context* context, const expertd_spec* spec, const uint8_t* stream, uint8_t* codes, uint8_t* scales,
                           uint8_t* zeros) {
  Geometry g;
  if (!context || !stream || !codes || !geometry_of(*spec, g)) return EXPERTD_BAD_ARGUMENT;
  if ((g.scale_bytes && !scales) || (spec->zeros && !zeros)) return EXPERTD_BAD_ARGUMENT;
  const Job job{g, nullptr, nullptr, nullptr, codes, scales, zeros, stream, nullptr};
  std::lock_guard<std::mutex> lock(context->busy);
  context->pool.run_even(spec->experts * g.blocks, [&](int unit, int) { unpack_block(job, unit); });
  return EXPERTD_OK;
}

}  // extern "C"
