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
  int index, group, columns;
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
      to[n] = {index, group, columns};
      column += columns;
      group += column == end;
    }
    return n;
  }
};

// The codes of NB blocks on their way into tiles of 16 rows of 64 bytes, `apart` bytes between the blocks'. One step of Codes at a time, so
// that it fits between products; what the next blocks need is fetched meanwhile. Codes: how a step of codes becomes vectors of tiles.
// Always inlined: one call between products would keep the decoder in memory.
template <class V, class Codes, int NB>
class TileDecoder {
 public:
  TileDecoder(const BlockArgs& a, size_t piece_bytes, size_t apart)
      : codes_(a), from_(a.pair + a.nb * a.g->header_bytes), step_(a.nb * kVector), ahead_(a.ahead), slot_(piece_bytes), apart_(apart) {}
  // The next pieces, and where the tiles of the first block go, piece_bytes each.
  inline __attribute__((always_inline)) void begin(const TilePiece* pieces, int count, uint8_t* tiles) {
    piece_ = pieces;
    end_ = pieces + count;
    to_ = tiles;
    next_slot_ = tiles + slot_;
    left_ = count ? piece_->columns : 0;
  }
  inline __attribute__((always_inline)) void some(int steps) {
    for (; steps > 0 && piece_ != end_; steps--) one();
  }
  inline __attribute__((always_inline)) void rest() {
    while (piece_ != end_) one();
  }

 private:
  inline __attribute__((always_inline)) void one() {
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++) {
      const uint8_t* c = from_ + b * kVector;
      for (int i = 0; i < Codes::kInput; i++) Codes::fetch(c + ahead_ + i * step_);
      for_each_index<Codes::kVectors>([&](auto index) {
        constexpr int i = decltype(index)::value;
        V::storei(to_ + b * apart_ + i * kVector, codes_.template get<i>(c, step_, b));
      });
    }
    from_ += Codes::kInput * step_;
    to_ += Codes::kVectors * kVector;
    codes_.next();
    if ((left_ -= Codes::kColumns) <= 0) turn();
  }
  // The end of a piece: what it lacks of whole tiles becomes zero (what was there may be NaN).
  void turn() {
    for (; to_ < next_slot_; to_ += kVector)
      for (int b = 0; b < NB; b++) V::storei(to_ + b * apart_, V::bcasti(0));
    next_slot_ += slot_;
    left_ = ++piece_ == end_ ? 0 : piece_->columns;
  }

  Codes codes_;
  const uint8_t* from_;
  size_t step_;  // between a block's vectors
  ptrdiff_t ahead_;
  size_t slot_, apart_;
  uint8_t *to_ = nullptr, *next_slot_ = nullptr;
  const TilePiece *piece_ = nullptr, *end_ = nullptr;
  int left_ = 0;  // columns of the piece
};

template <class V>
struct ByteCodes {
  static constexpr int kInput = 1, kVectors = 1, kColumns = 4;  // of a step: vectors of codes and of a tile, columns
  explicit ByteCodes(const BlockArgs&) {}
  static inline __attribute__((always_inline)) void fetch(const void* p) { V::prefetch(p); }
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
// tiles. between(): after each step, while the tiles multiply.
template <class T, int NB, class Between>
inline void multiply_planes(const uint8_t* x, size_t apart, size_t x_step, const uint8_t* w, int steps, uint8_t* sums, const Between& between) {
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
    between();
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

// NB blocks of int8: some pieces at a time are copied into tiles in the first-level cache and meet all rows there. While they do, the next
// ones are copied, and the sums of the products before are scaled.
template <class V, class T, int NB>
void gemm_planes(const BlockArgs& a) {
  using Decoder = TileDecoder<V, ByteCodes<V>, NB>;
  alignas(64) uint8_t tiles[2][NB * kBlockTiles], sums[2][4 * kTileBytes];
  const Geometry& g = *a.g;
  const int steps = tile_steps(kI16Tiles, g.piece), fit = kSteps / steps, all = tiles_of(a.n);
  const int calls = all * fit * steps * ByteCodes<V>::kColumns, share = (fit * g.piece + calls - 1) / calls;
  prepare_all<V>(a);
  zero_out<V, NB>(a);
  TilePieces row{g, g.piece, false};
  TilePiece pieces[2][kSteps];
  Decoder decoder(a, steps * kTileBytes, kBlockTiles);
  const auto between = [&] { decoder.some(share); };
  int count = row.take(pieces[0], fit);
  decoder.begin(pieces[0], count, tiles[0]);
  decoder.rest();
  PlaneSums before{};
  int half = 0;  // where the next sums go
  for (int now = 0; count; now ^= 1) {
    const int following = row.take(pieces[now ^ 1], fit);
    decoder.begin(pieces[now ^ 1], following, tiles[now ^ 1]);
    for (int t = 0; t < all; t++) {
      const int begin = tile_begin(a.n, t), rows = tile_begin(a.n, t + 1) - begin;
      const size_t step = size_t(rows) * kVector;
      const uint8_t* data = a.rows->data + size_t(a.index[0] + begin) * a.rows->stride;
      for (int i = 0; i < count; i++, half ^= 1) {
        const TilePiece& piece = pieces[now][i];
        const uint8_t *x = data + size_t(piece.index) * 2 * steps * step, *w = tiles[now] + size_t(i) * steps * kTileBytes;
        multiply_planes<T, NB>(x, steps * step, step, w, tile_steps(kI16Tiles, piece.columns), sums[half], between);
        if (before.rows) add_planes<V, NB>(a, before, sums[half ^ 1]);
        before = {begin, rows, piece};
      }
    }
    decoder.rest();
    count = following;
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
