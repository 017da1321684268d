// Many rows on matrix tiles (AMX): sums of 16 rows of activations times 16 rows of weights, which the processor adds up in registers of
// 16 x 64 bytes. Rows of activations are sorted by expert and cut into tiles of nearly equal height (tile_begin() in level.h); a tile's
// rows lie as runs of 64 bytes [piece][tile of the piece][row]. Tiles of a piece:
//
//   kI16Tiles   tile_columns() high bytes, signed, then as many low bytes, unsigned: x = 256 high + low. Both meet unsigned codes, so the
//               sums are the exact integers of kI16, and the answers its bits.
//   kBf16Tiles  tile_columns() bf16 numbers in lane order (store_pairs in rows.h).
//
// What a piece lacks of tile_columns() is zero there; the weights' tile then holds some other number, never NaN.
//
// Tiles: 0..3 sums [a][b], 4 + a activations, 6 + b weights of block b. a: high and low bytes of a tile of
// rows, or two tiles of rows.
#pragma once
#include "kernels.h"

namespace expertd {
namespace {

constexpr size_t kTileBytes = 1024;
constexpr int kSteps = 8;  // tiles of weights of a block that are decoded at a time, at most: two blocks are half of the first-level cache

constexpr int code_steps(Path path, int columns) { return tile_columns(path, columns) / (path == kBf16Tiles ? 32 : 64); }

// `columns` columns of a block as tiles: 16 rows of 64 bytes, 4 columns (bf16: 2) of each of 16 rows of weights.
template <class V, int EL, Path P>
void decode_tiles(const uint8_t* codes, int columns, bool zeros, uint8_t* to) {
  if constexpr (P == kBf16Tiles) {
    unpack_bf16<V, EL>(codes, columns, zeros, to);
    for (int k = columns; k % 32; k += 2) V::storei(to + k / 2 * kVector, V::bcasti(0));  // never NaN times zero
  } else {
    const Pairs<V, EL> pairs;
    for (int k = 0; k < columns; k += 32 / element_bits(EL), codes += kVector) {
      if constexpr (EL == EXPERTD_INT8) {
        V::storei(to, V::loadi(codes));
        to += kVector;
      } else {
        for_each_index<2>([&](auto half) {
          constexpr int h = decltype(half)::value;
          if constexpr (EL == EXPERTD_E2M1) {
            V::storei(to + h * kVector, pairs.template part<h>(codes));
          } else {
            V::storei(to + h * kVector, V::andi(V::template srl16<4 * h>(V::loadi(codes)), V::bcasti(0x0F0F0F0F)));
          }
        });
        to += 2 * kVector;
      }
    }
  }
}

// Tiles of activations of one piece: the first of them, and how far apart they are.
struct TileSource {
  const uint8_t* data;
  size_t step;
};

// One piece of NB blocks against NA tiles of activations; sums go to `sums`, [a][b] tiles.
template <class T, Path P, int NA, int NB>
inline void multiply_tiles(const TileSource* x, const uint8_t* w, size_t block, int steps, uint8_t* sums) {
  for_each_index<NA>([](auto a) {
    constexpr int i = decltype(a)::value;
    T::template zero<2 * i>();
    if constexpr (NB == 2) T::template zero<2 * i + 1>();
  });
  for (int s = 0; s < steps; s++) {
    T::template load<6>(w + s * kTileBytes, kVector);
    if constexpr (NB == 2) T::template load<7>(w + block + s * kTileBytes, kVector);
    for_each_index<NA>([&](auto a) {
      constexpr int i = decltype(a)::value;
      T::template load<4 + i>(x[i].data + s * x[i].step, kVector);
    });
    for_each_index<NB>([](auto b) {  // products with the same weights one after the other
      constexpr int j = decltype(b)::value;
      for_each_index<NA>([](auto a) {
        constexpr int i = decltype(a)::value;
        if constexpr (P == kBf16Tiles) T::template dot_bf16<2 * i + j, 4 + i, 6 + j>();
        else if constexpr (P == kI16Tiles && i == 1) T::template dot_uu<2 * i + j, 4 + i, 6 + j>();
        else T::template dot_su<2 * i + j, 4 + i, 6 + j>();
      });
    });
  }
  for_each_index<NA>([&](auto a) {
    constexpr int i = decltype(a)::value;
    T::template store<2 * i>(sums + 2 * i * kTileBytes);
    if constexpr (NB == 2) T::template store<2 * i + 1>(sums + (2 * i + 1) * kTileBytes);
  });
}

// out[m][b * 16 + r] += scales * sums, for `rows` rows of a tile: as at the end of a piece in kernels.h.
template <class V, Path P, int NB>
inline void add_tiles(const BlockArgs& a, int block, size_t row, int rows, int group, int p, const uint8_t* sums, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  const size_t stride = size_t(a.g->groups) * kRows, lane = block * stride + size_t(group) * kRows;
  const Rows& x = *a.rows;
  F ws[NB], wz[NB];
  for (int b = 0; b < NB; b++) {
    ws[b] = V::loadf(a.scales + lane + b * stride);
    wz[b] = a.minus_zeros ? V::loadf(a.minus_zeros + lane + b * stride) : V::bcastf(0.0f);
  }
  for (int m = 0; m < rows; m++, out += 2 * kRows, sums += kVector) {
    const size_t piece = (row + m) * x.pieces + p;
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

// Fetches lines of the codes that are needed next, some at a time, while the processor multiplies.
template <class V>
struct Fetch {
  const uint8_t* from;
  size_t block, lines, done, share;  // lines of each of `blocks`; share: at a time
  int blocks;
  void some() {
    for (size_t i = 0; i < share && done < lines; i++, done++)
      for (int b = 0; b < blocks; b++) V::prefetch(from + b * block + done * kVector);
  }
};

// Pieces of a matrix whose weights are decoded.
struct TilePiece {
  int group, columns;
};

// `count` decoded pieces from piece `from` on against all rows. Sums of a piece are scaled while the next one is multiplied.
template <class V, class T, Path P, int NB>
void multiply_pieces(const BlockArgs& a, int block, int from, int count, const TilePiece* pieces, const uint8_t* tiles, Fetch<V> fetch) {
  constexpr int kTogether = P == kI16Tiles ? 1 : 2;  // tiles of rows
  alignas(64) uint8_t sums[2][4 * kTileBytes];
  const Geometry& g = *a.g;
  const int steps = code_steps(P, g.piece), all = tiles_of(a.n), per_piece = P == kI16Tiles ? 2 * steps : steps;
  fetch.share = (fetch.lines + all * count - 1) / (all * count) * kTogether;
  for (int t = 0; t < all; t += kTogether) {
    int rows[2], begin[2];
    size_t step[2];
    const uint8_t* base[2];
    const int together = t + kTogether <= all ? kTogether : 1;
    for (int i = 0; i < together; i++) {
      begin[i] = tile_begin(a.n, t + i);
      rows[i] = tile_begin(a.n, t + i + 1) - begin[i];
      step[i] = size_t(rows[i]) * kVector;
      base[i] = a.rows->data + size_t(a.index[0] + begin[i]) * a.rows->stride + from * per_piece * step[i];
    }
    for (int i = 0; i <= count; i++) {
      if (i < count) {
        const int used = code_steps(P, pieces[i].columns);
        const uint8_t* w = tiles + size_t(i) * steps * kTileBytes;
        const uint8_t* x = base[0] + size_t(i) * per_piece * step[0];
        if constexpr (P == kI16Tiles) {
          const TileSource planes[2] = {{x, step[0]}, {x + steps * step[0], step[0]}};
          multiply_tiles<T, P, 2, NB>(planes, w, kSteps * kTileBytes, used, sums[i % 2]);
        } else if (together == 2) {
          const TileSource two[2] = {{x, step[0]}, {base[1] + size_t(i) * per_piece * step[1], step[1]}};
          multiply_tiles<T, P, 2, NB>(two, w, kSteps * kTileBytes, used, sums[i % 2]);
        } else {
          const TileSource one = {x, step[0]};
          multiply_tiles<T, P, 1, NB>(&one, w, kSteps * kTileBytes, used, sums[i % 2]);
        }
        fetch.some();
      }
      if (i == 0) continue;
      for (int j = 0; j < together; j++) {
        add_tiles<V, P, NB>(a, block, size_t(a.index[0] + begin[j]), rows[j], pieces[i - 1].group, from + i - 1,
                            sums[(i - 1) % 2] + 2 * j * kTileBytes, a.out + size_t(begin[j]) * 2 * kRows + block * kRows);
      }
    }
  }
}

// NB blocks from `block` on: some pieces at a time are decoded into the first-level cache and meet all rows there.
template <class V, class T, int EL, Path P, int NB>
void gemm_tiles_of(const BlockArgs& a, int block) {
  alignas(64) uint8_t tiles[NB * kSteps * kTileBytes];
  const Geometry& g = *a.g;
  const uint8_t* codes = a.block + block * g.block_bytes + g.header_bytes;
  const int steps = code_steps(P, g.piece), fit = kSteps / steps;
  TilePiece pieces[kSteps];
  for (int m = 0; m < a.n; m++)
    for (int r = 0; r < NB * kRows; r += V::W) V::storef(a.out + m * 2 * kRows + block * kRows + r, V::bcastf(0.0f));
  int from = 0, count = 0;
  const uint8_t* begun = codes;
  const auto multiply = [&] {
    const Fetch<V> fetch{begun + a.ahead, g.block_bytes, size_t(codes - begun) / kVector, 0, 0, NB};
    multiply_pieces<V, T, P, NB>(a, block, from, count, pieces, tiles, fetch);
    from += count;
    count = 0;
    begun = codes;
  };
  for_pieces(g, Slice{block, 0, g.kp, 0, 0, nullptr, 0}, [&](int, int columns, int group, int) {
    if (count == fit) multiply();
    for (int b = 0; b < NB; b++) {
      decode_tiles<V, EL, P>(codes + b * g.block_bytes, columns, g.spec.zeros, tiles + (size_t(b) * kSteps + count * steps) * kTileBytes);
    }
    codes += size_t(columns) / g.per_lane * kVector;
    pieces[count++] = {group, columns};
  });
  multiply();
}

template <class V, class T, int EL, Path P>
void gemm_tiles_element(const BlockArgs& a) {
  T::configure((a.n + tiles_of(a.n) - 1) / tiles_of(a.n));
  if (a.nb == 2) gemm_tiles_of<V, T, EL, P, 2>(a, 0);
  else gemm_tiles_of<V, T, EL, P, 1>(a, 0);
  T::release();
}

template <class V, class T>
void gemm_tiles(const BlockArgs& a) {
  switch (a.g->spec.element) {
    case EXPERTD_INT4: return gemm_tiles_element<V, T, EXPERTD_INT4, kI16Tiles>(a);
    case EXPERTD_INT8: return gemm_tiles_element<V, T, EXPERTD_INT8, kI16Tiles>(a);
    case EXPERTD_E2M1: return gemm_tiles_element<V, T, EXPERTD_E2M1, kI16Tiles>(a);
    case EXPERTD_E4M3: return gemm_tiles_element<V, T, EXPERTD_E4M3, kBf16Tiles>(a);
    default: return gemm_tiles_element<V, T, EXPERTD_BF16, kBf16Tiles>(a);
  }
}

}  // namespace
}  // namespace expertd
