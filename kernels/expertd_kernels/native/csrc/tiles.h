// Many rows on matrix tiles (AMX): sums of 16 rows of activations times 16 rows of weights, which the processor adds up in registers of
// 16 x 64 bytes. Rows of activations are sorted by expert and cut into tiles of nearly equal height (tile_begin() in level.h); a tile's
// rows lie as runs of 64 bytes [piece][tile of the piece][row]. Tiles of a piece:
//
//   kI16Tiles   int8, here: tile_columns() high bytes, signed, then as many low bytes, unsigned: x = 256 high + low. Both meet unsigned
//               codes, as they are stored, so the sums are the exact integers of kI16, and the answers its bits.
//   kBf16Tiles  the others, in panels.h: tile_columns() bf16 numbers in lane order (store_pairs in rows.h).
//
// What a piece lacks of tile_columns() is zero there; the weights' tile then holds some other number, never NaN.
//
// Tiles: 0..3 sums [source][block], 4 + source activations, 6 + block weights. Sources: the planes of a tile of rows, or two tiles of rows.
#pragma once
#include <algorithm>

#include "kernels.h"

namespace expertd {
namespace {

constexpr size_t kTileBytes = 1024;

// Tiles of weights that so many columns of a block take.
constexpr int tile_steps(Path path, int columns) { return tile_columns(path, columns) / (path == kBf16Tiles ? 32 : 64); }

// Neighbouring columns whose products are summed before they are scaled.
struct TilePiece {
  int index, group, columns, end;  // end: the column behind it
};

// The pieces of a row in order: at most `most` columns each, of one group or (across) of several.
struct TilePieces {
  const Geometry& g;
  const int most;
  const bool across;
  int column = 0, group = 0, index = 0;
  int take(TilePiece* to, int room) {
    int n = 0;
    for (; n < room && column < g.kp; n++, index++) {
      const int end = across ? g.kp : std::min((group + 1) * g.group, g.kp), columns = std::min(most, end - column);
      column += columns;
      to[n] = {index, group, columns, column};
      group += column == end;
    }
    return n;
  }
};

// The codes of some pieces of NB blocks -> tiles of 16 rows of 64 bytes, `slot` bytes a piece, `apart` bytes between the blocks'; what a
// piece lacks of whole tiles becomes zero (what was there may be NaN). In one go: steps between products, or of two pairs in turns, keep
// the decoder in memory, and took up to twice as long (docs/log/cpu-xeon.md). Codes: how a step of codes becomes vectors of tiles. Returns
// where the next codes are.
template <class V, class Codes, int NB>
inline const uint8_t* decode_pieces(Codes& codes, const uint8_t* from, const TilePiece* pieces, int count, uint8_t* tiles, size_t slot, size_t apart) {
  constexpr size_t kStep = NB * kVector;  // between a block's vectors
  for (int p = 0; p < count; p++, tiles += slot) {
    uint8_t* to = tiles;
    for (int left = pieces[p].columns; left > 0; left -= Codes::kColumns) {
#pragma GCC unroll 2
      for (int b = 0; b < NB; b++) {
        for_each_index<Codes::kVectors>([&](auto index) __attribute__((always_inline)) {
          constexpr int i = decltype(index)::value;
          V::storei(to + b * apart + i * kVector, codes.template get<i>(from + b * kVector, kStep, b));
        });
      }
      from += Codes::kInput * kStep;
      to += Codes::kVectors * kVector;
      codes.next();
    }
    for (; to < tiles + slot; to += kVector)
      for (int b = 0; b < NB; b++) V::storei(to + b * apart, V::bcasti(0));
  }
  return from;
}

// Codes that are needed later, on their way into the second-level cache: some lines after each step of products. All of a panel's at once
// take the core's buffers for lines that come, which the loads of tiles then wait for: half of the speed where codes come from memory.
template <class V>
class Ahead {
 public:
  // [from, to), in so many steps.
  Ahead(const uint8_t* from, const uint8_t* to, int steps) : at_(from), end_(to), share_(int((to - from) / kVector + steps - 1) / steps) {}
  inline __attribute__((always_inline)) void some() {
    for (int i = 0; i < share_ && at_ < end_; i++, at_ += kVector) V::prefetch2(at_);
  }

 private:
  const uint8_t *at_, *end_;
  int share_;
};

template <class V>
struct ByteCodes {
  static constexpr int kInput = 1, kVectors = 1, kColumns = 4;  // of a step: vectors of codes and of a tile, columns
  explicit ByteCodes(const BlockArgs&) {}
  template <int I>
  typename V::I get(const uint8_t* from, size_t, int) const { return V::loadi(from); }
  void next() {}
};

template <class V, int NB>
void zero_out(const BlockArgs& a) {
  for (int m = 0; m < a.n; m++)
    for (int r = 0; r < NB * kRows; r += V::W) V::storef(a.out + m * 2 * kRows + r, V::bcastf(0.0f));
}

constexpr int kSteps = 8;  // tiles of weights of a block that are decoded at a time, at most
constexpr size_t kBlockTiles = kSteps * kTileBytes;

// Products of the two planes of a tile of rows, `apart` bytes between them, and one piece of NB blocks. Sums go to `sums`, [plane][block]
// tiles.
template <class T, int NB, class Fetch>
inline void multiply_planes(const uint8_t* x, size_t apart, size_t x_step, const uint8_t* w, int steps, uint8_t* sums, Fetch& ahead) {
  T::template zero<0>();
  T::template zero<2>();
  if constexpr (NB == 2) T::template zero<1>(), T::template zero<3>();
  for (int s = 0; s < steps; s++, x += x_step, w += kTileBytes) {
    T::template load<6>(w, kVector);
    if constexpr (NB == 2) T::template load<7>(w + kBlockTiles, kVector);
    T::template load<4>(x, kVector);
    T::template dot_su<0, 4, 6>();
    if constexpr (NB == 2) T::template dot_su<1, 4, 7>();
    T::template load<5>(x + apart, kVector);
    T::template dot_uu<2, 5, 6>();
    if constexpr (NB == 2) T::template dot_uu<3, 5, 7>();
    ahead.some();
  }
  T::template store<0>(sums);
  if constexpr (NB == 2) T::template store<1>(sums + kTileBytes);
  T::template store<2>(sums + 2 * kTileBytes);
  if constexpr (NB == 2) T::template store<3>(sums + 3 * kTileBytes);
}

// Rows and piece that sums belong to.
struct PlaneSums {
  int begin, rows;
  TilePiece piece;
};

// out[m][b * 16 + r] += scales * sums: as at the end of a piece in kernels.h.
template <class V, int NB>
void add_planes(const BlockArgs& a, const PlaneSums& t, const uint8_t* sums) {
  using I = typename V::I;
  using F = typename V::F;
  const size_t stride = size_t(a.g->groups) * kRows, lane = size_t(t.piece.group) * kRows;
  const Rows& x = *a.rows;
  float* out = a.out + size_t(t.begin) * 2 * kRows;
  size_t piece = size_t(a.index[0] + t.begin) * x.pieces + t.piece.index;
  F ws[NB], wz[NB];
  for (int b = 0; b < NB; b++) {
    ws[b] = V::loadf(a.scales + lane + b * stride);
    wz[b] = a.minus_zeros ? V::loadf(a.minus_zeros + lane + b * stride) : V::bcastf(0.0f);
  }
  for (int m = 0; m < t.rows; m++, out += 2 * kRows, sums += kVector, piece += x.pieces) {
    const I start = V::bcasti(x.starts[piece]);
    const F scale = V::bcastf(x.scales[piece]);
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++) {
      const uint8_t* from = sums + b * kTileBytes;
      F f = V::cvt(V::addi(V::addi(V::template sll<8>(V::loadi(from)), V::loadi(from + 2 * kTileBytes)), start));
      if (a.minus_zeros) f = V::fma(wz[b], V::bcastf(x.sums[piece]), f);
      V::storef(out + b * kRows, V::fma(f, V::mul(ws[b], scale), V::loadf(out + b * kRows)));
    }
  }
}

// NB blocks of int8: some pieces at a time are copied into tiles in the first-level cache and meet all rows there. The sums of the
// products before are scaled meanwhile.
template <class V, class T, int NB>
void gemm_planes(const BlockArgs& a) {
  alignas(64) uint8_t tiles[NB * kBlockTiles], sums[2][4 * kTileBytes];
  const Geometry& g = *a.g;
  const int steps = tile_steps(kI16Tiles, g.piece), fit = kSteps / steps, all = tiles_of(a.n);
  prepare_all<V>(a);
  zero_out<V, NB>(a);
  TilePieces row{g, g.piece, false};
  TilePiece pieces[kSteps];
  ByteCodes<V> codes(a);
  const uint8_t* from = a.pair + a.nb * g.header_bytes;
  PlaneSums before{};
  int half = 0;  // where the next sums go
  while (const int count = row.take(pieces, fit)) {
    const uint8_t* codes_of = from;
    from = decode_pieces<V, ByteCodes<V>, NB>(codes, from, pieces, count, tiles, steps * kTileBytes, kBlockTiles);
    Ahead<V> ahead(codes_of + a.ahead, from + a.ahead, all * count * steps);
    for (int t = 0; t < all; t++) {
      const int begin = tile_begin(a.n, t), rows = tile_begin(a.n, t + 1) - begin;
      const size_t step = size_t(rows) * kVector;
      const uint8_t* data = a.rows->data + size_t(a.index[0] + begin) * a.rows->stride;
      for (int i = 0; i < count; i++, half ^= 1) {
        const uint8_t *x = data + size_t(pieces[i].index) * 2 * steps * step, *w = tiles + size_t(i) * steps * kTileBytes;
        multiply_planes<T, NB>(x, steps * step, step, w, tile_steps(kI16Tiles, pieces[i].columns), sums[half], ahead);
        if (before.rows) add_planes<V, NB>(a, before, sums[half ^ 1]);
        before = {begin, rows, pieces[i]};
      }
    }
  }
  add_planes<V, NB>(a, before, sums[half ^ 1]);
}

template <class V, class T>
void gemm_tiles(const BlockArgs& a) {
  T::configure((a.n + tiles_of(a.n) - 1) / tiles_of(a.n));
  if (a.nb == 2) gemm_planes<V, T, 2>(a);
  else gemm_planes<V, T, 1>(a);
  T::release();
}

}  // namespace
}  // namespace expertd
