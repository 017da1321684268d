// Many rows on matrix tiles (AMX): sums of 16 rows of activations times 16 rows of weights, which the processor adds up in registers of
// 16 x 64 bytes. Rows of activations are sorted by expert and cut into tiles of nearly equal height (tile_begin() in level.h); a tile's
// rows lie as runs of 64 bytes [piece][tile of the piece][row]. Tiles of a piece:
//
//   kI16Tiles   int8: tile_columns() high bytes, signed, then as many low bytes, unsigned: x = 256 high + low. Both meet unsigned codes,
//               as they are stored, so the sums are the exact integers of kI16, and the answers its bits.
//   kBf16Tiles  the others: tile_columns() bf16 numbers in lane order (store_pairs in rows.h). 4-bit codes are bf16 numbers, too, so
//               only the activations are rounded; as bytes they would be decoded in half the time, but their sums take three times
//               the work to scale.
//
// What a piece lacks of tile_columns() is zero there; the weights' tile then holds some other number, never NaN.
//
// Tiles: 0..3 sums [a][b], 4 + a activations, 6 + b weights of block b. a: high and low bytes of a tile of
// rows, or two tiles of rows.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kernels.h"

namespace expertd {
namespace {

constexpr size_t kTileBytes = 1024;
constexpr int kSteps = 8;  // tiles of weights of a block that are decoded at a time, at most

constexpr int code_steps(Path path, int columns) { return tile_columns(path, columns) / (path == kBf16Tiles ? 32 : 64); }

// Neighbouring columns whose products are summed before they are scaled: a piece.
struct TilePiece {
  int group, columns;
};

// The codes of NB blocks on their way into tiles of 16 rows of 64 bytes: 4 columns (bf16: 2) of each of 16 rows of weights. One vector
// of codes of each block at a time, so that decoding fits between products; what the next blocks need is fetched meanwhile.
// As Bf16Pairs: twice the value of e2m1, times 2^-100, so that a power of two may be added to the exponent.
template <class V>
struct LowPairs {
  typename V::I table;
  LowPairs() {
    static constexpr uint16_t kLow[16] = {0x0000, 0x0D80, 0x0E00, 0x0E40, 0x0E80, 0x0EC0, 0x0F00, 0x0F40,
                                          0x8000, 0x8D80, 0x8E00, 0x8E40, 0x8E80, 0x8EC0, 0x8F00, 0x8F40};
    table = V::table16(kLow);
  }
  template <int I>
  typename V::I get(const uint8_t* from, size_t) const {
    return V::lookup16(table, V::template srl16<4 * I>(V::loadi(from)));
  }
};

// FOLD: e2m1 with power-of-two scales, which become part of the bf16 numbers, exactly: kLeast <= scale <= kMost. Zeros become 2^-27 of
// the least number instead, which no sum of f32 can tell from zero.
template <class V, int EL, Path P, int NB, bool FOLD>
struct TileDecoder {
  static constexpr int kLeast = 27, kMost = 227;  // as e8m0
  static constexpr bool kBf16 = P == kBf16Tiles;
  static constexpr int kVectors = kBf16 ? bf16_positions(EL) : 1;       // of a tile, made of one step of codes
  static constexpr int kInput = kBf16 ? bf16_step(EL) : 1;  // vectors of codes of a step
  static constexpr int kColumns = kBf16 ? 2 * kVectors : 4;
  using Codes = std::conditional_t<FOLD, LowPairs<V>, std::conditional_t<kBf16, Bf16Pairs<V, EL>, Pairs<V, EL>>>;

  const Codes codes;
  const uint8_t* from;
  size_t step, header;  // between a block's vectors, and between the blocks' headers
  ptrdiff_t ahead;
  size_t slot;  // bytes that a piece takes of a block's tiles
  uint8_t* to = nullptr;
  uint8_t* next_slot = nullptr;
  const TilePiece *piece = nullptr, *end = nullptr;
  int left = 0;  // columns of the piece
  const uint8_t* scales = nullptr;  // FOLD: of the next group, `group` columns each
  int group = 0, scaled = 0;        // columns left of the present one
  typename V::I exponents[NB];

  TileDecoder(const BlockArgs& a, int b, size_t slot_bytes)
      : codes(make(a.g->spec.zeros)), from(a.pair + a.nb * a.g->header_bytes + b * kVector), step(a.nb * kVector), header(a.g->header_bytes), ahead(a.ahead),
        slot(slot_bytes), scales(a.pair + b * a.g->header_bytes), group(a.g->group) {
    if constexpr (FOLD) next_scales();
  }
  static Codes make(bool zeros) {
    if constexpr (kBf16 && !FOLD) return Codes(zeros);
    else return (void)zeros, Codes();
  }
  // The next pieces, and where their tiles go: block after block, kSteps apart.
  void begin(const TilePiece* pieces, int count, uint8_t* tiles) {
    piece = pieces;
    end = pieces + count;
    to = tiles;
    next_slot = tiles + slot;
    left = count ? piece->columns : 0;
  }
  bool done() const { return piece == end; }
  void one() {
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++) {
      const uint8_t* c = from + b * kVector;
      for (int i = 0; i < kInput; i++) V::prefetch(c + ahead + i * step);
      uint8_t* w = to + b * kSteps * kTileBytes;
      for_each_index<kVectors>([&](auto index) {
        constexpr int i = decltype(index)::value;
        if constexpr (FOLD) V::storei(w + i * kVector, V::add16(vector<i>(c), exponents[b]));
        else V::storei(w + i * kVector, vector<i>(c));
      });
    }
    from += kInput * step;
    to += kVectors * kVector;
    left -= kColumns;
    if constexpr (FOLD) {
      if ((scaled -= kColumns) <= 0) next_scales();
    }
    if (left <= 0) turn();
  }
  void some(int steps) {
    for (; steps > 0 && !done(); steps--) one();
  }
  void rest() {
    while (!done()) one();
  }

 private:
  template <int I>
  typename V::I vector(const uint8_t* c) const {
    if constexpr (kBf16) return codes.template get<I>(c, step);
    else return V::loadi(c);
  }
  void next_scales() {
    for (int b = 0; b < NB; b++) {
      const typename V::I e = V::template sll<7>(V::addi(V::load_u8(scales + b * header), V::bcasti(-kLeast)));
      exponents[b] = V::ori(e, V::template sll<16>(e));
    }
    scales += kRows;
    scaled = group;
  }
  // The end of a piece: what it lacks of whole tiles becomes zero (what was there may be NaN).
  void turn() {
    for (; to < next_slot; to += kVector)
      for (int b = 0; b < NB; b++) V::storei(to + b * kSteps * kTileBytes, V::bcasti(0));
    next_slot += slot;
    left = ++piece == end ? 0 : piece->columns;
  }
};

// Tiles of activations and of weights of a piece; activations `step` bytes apart.
struct TileSource {
  const uint8_t *x, *w;
  size_t step;
};

// Products of one piece, NB blocks, and NA sources: two tiles of rows, or the two planes of one, that meet the same weights (SAME); or
// one tile of rows in two pieces. Sums go to `sums`, [source][block] tiles. between(): after each step, while the tiles multiply.
template <class T, Path P, int NA, int NB, bool SAME, class Between>
inline void multiply_tiles(const TileSource* sources, size_t block, int steps, uint8_t* sums, const Between& between) {
  for_each_index<NA>([](auto a) {
    constexpr int i = decltype(a)::value;
    T::template zero<2 * i>();
    if constexpr (NB == 2) T::template zero<2 * i + 1>();
  });
  for (int s = 0; s < steps; s++) {
    for_each_index<NA>([&](auto a) {
      constexpr int i = decltype(a)::value;
      if constexpr (i == 0 || !SAME) {
        T::template load<6>(sources[i].w + s * kTileBytes, kVector);
        if constexpr (NB == 2) T::template load<7>(sources[i].w + block + s * kTileBytes, kVector);
      }
      T::template load<4 + i>(sources[i].x + s * sources[i].step, kVector);
      for_each_index<NB>([](auto b) {
        constexpr int j = decltype(b)::value;
        if constexpr (P == kBf16Tiles) T::template dot_bf16<2 * i + j, 4 + i, 6 + j>();
        else if constexpr (i == 1) T::template dot_uu<2 * i + j, 4 + i, 6 + j>();
        else T::template dot_su<2 * i + j, 4 + i, 6 + j>();
      });
    });
    between();
  }
  for_each_index<NA>([&](auto a) {
    constexpr int i = decltype(a)::value;
    T::template store<2 * i>(sums + 2 * i * kTileBytes);
    if constexpr (NB == 2) T::template store<2 * i + 1>(sums + (2 * i + 1) * kTileBytes);
  });
}

// Rows and piece that a source's sums belong to; group -1: they have their scales.
struct TileSums {
  int begin, rows, group, piece;
};

// out[m][b * 16 + r] += scales * sums: as at the end of a piece in kernels.h.
template <class V, Path P, int NB>
inline void add_tiles(const BlockArgs& a, int block, const TileSums& t, const uint8_t* sums) {
  using I = typename V::I;
  using F = typename V::F;
  const size_t stride = size_t(a.g->groups) * kRows, lane = block * stride + size_t(t.group) * kRows;
  const Rows& x = *a.rows;
  const bool scaled = t.group < 0;
  float* out = a.out + size_t(t.begin) * 2 * kRows + block * kRows;
  size_t piece = size_t(a.index[0] + t.begin) * x.pieces + t.piece;
  F ws[NB], wz[NB];
  for (int b = 0; b < NB; b++) {
    ws[b] = scaled ? V::bcastf(a.factor[block + b]) : V::loadf(a.scales + lane + b * stride);
    wz[b] = a.minus_zeros ? V::loadf(a.minus_zeros + lane + b * stride) : V::bcastf(0.0f);
  }
  for (int m = 0; m < t.rows; m++, out += 2 * kRows, sums += kVector, piece += x.pieces) {
    const uint8_t* from = sums;
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++, from += kTileBytes) {
      F f, scale = ws[b];
      if constexpr (P == kBf16Tiles) {
        f = V::loadf(reinterpret_cast<const float*>(from));
      } else {
        const I sum = V::addi(V::template sll<8>(V::loadi(from)), V::loadi(from + 2 * kTileBytes));
        f = V::cvt(V::addi(sum, V::bcasti(x.starts[piece])));
        scale = V::mul(scale, V::bcastf(x.scales[piece]));
      }
      if (a.minus_zeros) f = V::fma(wz[b], V::bcastf(x.sums[piece]), f);
      V::storef(out + b * kRows, V::fma(f, scale, V::loadf(out + b * kRows)));
    }
  }
}

// NB blocks from `block` on: some pieces at a time are decoded into the first-level cache and meet all rows there. While they do, the
// next pieces are decoded, and the sums of the products before are scaled.
template <class V, class T, int EL, Path P, int NB, bool FOLD>
void gemm_tiles_of(const BlockArgs& a, int block) {
  constexpr size_t kBlock = kSteps * kTileBytes;
  alignas(64) uint8_t tiles[2][NB * kBlock], sums[2][4 * kTileBytes];
  const Geometry& g = *a.g;
  const int most = FOLD ? kMaxPiece : g.piece;  // columns of a piece
  const int steps = code_steps(P, most), fit = kSteps / steps, all = tiles_of(a.n), per_piece = P == kI16Tiles ? 2 * steps : steps;
  for (int m = 0; m < a.n; m++)
    for (int r = 0; r < NB * kRows; r += V::W) V::storef(a.out + m * 2 * kRows + block * kRows + r, V::bcastf(0.0f));
  TilePiece pieces[2][kSteps];
  int column = 0, group = 0;  // of the next pieces to be decoded
  const auto next_pieces = [&](TilePiece* to) {
    int n = 0;
    for (; n < fit && column < g.kp; n++) {
      const int group_end = FOLD ? g.kp : std::min((group + 1) * g.group, g.kp), columns = std::min(most, group_end - column);
      to[n] = {FOLD ? -1 : group, columns};
      column += columns;
      group += column == group_end;
    }
    return n;
  };
  TileDecoder<V, EL, P, NB, FOLD> decoder(a, block, steps * kTileBytes);
  TileSums before[2];
  int summed = 0, half = 0;  // sums that wait to be scaled; where the next ones go
  int now = 0, count = next_pieces(pieces[0]);
  decoder.begin(pieces[0], count, tiles[0]);
  decoder.rest();
  for (int from = 0; count; now ^= 1) {
    const int following = next_pieces(pieces[now ^ 1]);
    decoder.begin(pieces[now ^ 1], following, tiles[now ^ 1]);
    const int calls = (P == kI16Tiles ? all * fit : (all * fit + 1) / 2) * steps * decoder.kColumns;
    const int share = (fit * most + calls - 1) / calls;
    const auto between = [&] { decoder.some(share); };
    for (int t = 0; t < all;) {
      const int together = P == kBf16Tiles && t + 2 <= all ? 2 : 1;
      for (int i = 0; i < count;) {
        const auto source = [&](int tile, int piece) {
          const int begin = tile_begin(a.n, tile), rows = tile_begin(a.n, tile + 1) - begin;
          const size_t step = size_t(rows) * kVector;
          const uint8_t* x = a.rows->data + size_t(a.index[0] + begin) * a.rows->stride + size_t(from + piece) * per_piece * step;
          return TileSource{x, tiles[now] + size_t(piece) * steps * kTileBytes, step};
        };
        const auto sums_of = [&](int tile, int piece) {
          const int begin = tile_begin(a.n, tile);
          return TileSums{begin, tile_begin(a.n, tile + 1) - begin, pieces[now][piece].group, from + piece};
        };
        const int used = code_steps(P, pieces[now][i].columns);
        TileSource sources[2] = {source(t, i)};
        TileSums after[2] = {sums_of(t, i)};
        int made = 1, taken = 1;
        if constexpr (P == kI16Tiles) {
          sources[1] = {sources[0].x + steps * sources[0].step, sources[0].w, sources[0].step};
          multiply_tiles<T, P, 2, NB, true>(sources, kBlock, used, sums[half], between);
        } else if (together == 2) {
          sources[1] = source(t + 1, i), after[1] = sums_of(t + 1, i), made = 2;
          multiply_tiles<T, P, 2, NB, true>(sources, kBlock, used, sums[half], between);
        } else if (i + 1 < count && code_steps(P, pieces[now][i + 1].columns) == used) {
          sources[1] = source(t, i + 1), after[1] = sums_of(t, i + 1), made = taken = 2;
          multiply_tiles<T, P, 2, NB, false>(sources, kBlock, used, sums[half], between);
        } else {
          multiply_tiles<T, P, 1, NB, true>(sources, kBlock, used, sums[half], between);
        }
        half ^= 1;
        for (int j = 0; j < summed; j++) add_tiles<V, P, NB>(a, block, before[j], sums[half] + 2 * j * kTileBytes);
        for (summed = 0; summed < made; summed++) before[summed] = after[summed];
        i += taken;
      }
      t += together;
    }
    decoder.rest();
    from += count;
    count = following;
  }
  for (int j = 0; j < summed; j++) add_tiles<V, P, NB>(a, block, before[j], sums[half ^ 1] + 2 * j * kTileBytes);
}

// Whether the scales of all blocks are powers of two that become part of the codes.
template <class V, int EL>
bool can_fold(const BlockArgs& a) {
  using Decoder = TileDecoder<V, EL, kBf16Tiles, 1, true>;
  const Geometry& g = *a.g;
  if (g.spec.scale_type != EXPERTD_SCALE_E8M0 || g.lanes != kRows || g.piece % 32) return false;
  for (int b = 0; b < a.nb; b++) {
    const uint8_t* scales = a.pair + b * g.header_bytes;
    int least = 255, most = 0;
    for (int i = 0; i < g.groups * kRows; i++) least = std::min<int>(least, scales[i]), most = std::max<int>(most, scales[i]);
    if (least < Decoder::kLeast || most > Decoder::kMost) return false;
  }
  return true;
}

template <class V, class T, int EL, Path P>
void gemm_tiles_element(const BlockArgs& a) {
  T::configure((a.n + tiles_of(a.n) - 1) / tiles_of(a.n));
  if (EL == EXPERTD_E2M1 && can_fold<V, EL>(a)) {
    if constexpr (EL == EXPERTD_E2M1) {
      if (a.nb == 2) gemm_tiles_of<V, T, EL, P, 2, true>(a, 0);
      else gemm_tiles_of<V, T, EL, P, 1, true>(a, 0);
    }
  } else {
    prepare_all<V>(a);
    if (a.nb == 2) gemm_tiles_of<V, T, EL, P, 2, false>(a, 0);
    else gemm_tiles_of<V, T, EL, P, 1, false>(a, 0);
  }
  T::release();
}

template <class V, class T>
void gemm_tiles(const BlockArgs& a) {
  switch (a.g->spec.element) {
    case EXPERTD_INT4: return gemm_tiles_element<V, T, EXPERTD_INT4, kBf16Tiles>(a);
    case EXPERTD_INT8: return gemm_tiles_element<V, T, EXPERTD_INT8, kI16Tiles>(a);
    case EXPERTD_E2M1: return gemm_tiles_element<V, T, EXPERTD_E2M1, kBf16Tiles>(a);
    case EXPERTD_E4M3: return gemm_tiles_element<V, T, EXPERTD_E4M3, kBf16Tiles>(a);
    default: return gemm_tiles_element<V, T, EXPERTD_BF16, kBf16Tiles>(a);
  }
}

}  // namespace
}  // namespace expertd
