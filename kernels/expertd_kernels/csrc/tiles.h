// Many rows on matrix tiles (AMX): sums of 16 rows of activations times 16 rows of weights, which the processor adds up in registers of
// 16 x 64 bytes. Rows of activations lie one behind the other, sorted by expert (Rows in level.h); of each piece
//
//   kI16Tiles   tile_columns() high bytes, signed, then as many low bytes, unsigned: x = 256 high + low. Both meet unsigned codes, so the
//               sums are the exact integers of kI16, and the answers its bits.
//   kBf16Tiles  tile_columns() bf16 numbers in lane order (store_pairs in rows.h).
//
// What a piece lacks of tile_columns() is zero there; the weights' tile then holds some other number, never NaN.
//
// Tiles: 0..3 sums [a][b], 4 + a activations, 6 + b weights of block b. a: high and low bytes of 16 rows, or rows 0..15 and 16..31.
#pragma once
#include "kernels.h"

namespace expertd {
namespace {

constexpr size_t kTileBytes = 1024;
constexpr int kSteps = 8;  // tiles of weights of a block that are decoded at a time, at most: two blocks are half of the first-level cache

constexpr int code_steps(Path path, int columns) { return tile_columns(path, columns) / (path == kBf16Tiles ? 32 : 64); }

// `columns` columns of a block as tiles: 16 rows of 64 bytes, 4 columns (bf16: 2) of each of 16 rows of weights.
template <class V, int EL, Path P>
void decode_tiles(const uint8_t* codes, int columns, bool zeros, ptrdiff_t ahead, uint8_t* to) {
  if constexpr (P == kBf16Tiles) {
    for (int at = 0; at < columns * element_bits(EL) * 2; at += kVector) V::prefetch(codes + at + ahead);
    unpack_bf16<V, EL>(codes, columns, zeros, to);
    for (int k = columns; k % 32; k += 2) V::storei(to + k / 2 * kVector, V::bcasti(0));  // never NaN times zero
  } else {
    const Pairs<V, EL> pairs;
    for (int k = 0; k < columns; k += 32 / element_bits(EL), codes += kVector) {
      V::prefetch(codes + ahead);
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

// One piece of NB blocks against NA tiles of activations; sums go to `sums`, [a][b] tiles.
template <class T, Path P, int NA, int NB>
inline void multiply_tiles(const uint8_t* x, ptrdiff_t second, size_t stride, const uint8_t* w, size_t block, int steps, uint8_t* sums) {
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
      T::template load<4 + i>(x + i * second + s * kVector, stride);
      for_each_index<NB>([](auto b) {
        constexpr int j = decltype(b)::value;
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

// out[m][b * 16 + r] += scales * sums, for the rows of one multiplication: as at the end of a piece in kernels.h.
template <class V, Path P, int NB>
inline void add_tiles(const BlockArgs& a, int block, size_t row, int rows, int group, int p, const uint8_t* sums, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr size_t kSecond = 2 * kTileBytes;  // of the tiles [1][b]
  const size_t stride = size_t(a.g->groups) * kRows, lane = block * stride + size_t(group) * kRows;
  const Rows& x = *a.rows;
  F ws[NB], wz[NB];
  for (int b = 0; b < NB; b++) {
    ws[b] = V::loadf(a.scales + lane + b * stride);
    wz[b] = a.minus_zeros ? V::loadf(a.minus_zeros + lane + b * stride) : V::bcastf(0.0f);
  }
  for (int m = 0; m < rows; m++, out += 2 * kRows) {
    const size_t piece = (row + m) * x.pieces + p;
    const uint8_t* from = sums + (P == kI16Tiles ? m : m / kTileRows * kSecond / kVector + m % kTileRows) * kVector;
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++, from += kTileBytes) {
      F f, scale = ws[b];
      if constexpr (P == kBf16Tiles) {
        f = V::loadf(reinterpret_cast<const float*>(from));
      } else {
        I sum = V::loadi(from);
        if constexpr (P == kI16Tiles) sum = V::addi(V::template sll<8>(sum), V::loadi(from + kSecond));
        f = V::cvt(V::addi(sum, V::bcasti(x.starts[piece])));
        scale = V::mul(scale, V::bcastf(x.scales[piece]));
      }
      if (a.minus_zeros) f = V::fma(wz[b], V::bcastf(x.sums[piece]), f);
      V::storef(out + b * kRows, V::fma(f, scale, V::loadf(out + b * kRows)));
    }
  }
}

// NB blocks from `block` on: some pieces at a time are decoded into the first-level cache and meet all rows there.
template <class V, class T, int EL, Path P, int NB>
void gemm_tiles_of(const BlockArgs& a, int block) {
  constexpr int kMost = P == kI16Tiles ? kTileRows : 2 * kTileRows;  // rows of a multiplication
  alignas(64) uint8_t tiles[NB * kSteps * kTileBytes];
  alignas(64) uint8_t sums[2][4 * kTileBytes];
  const Geometry& g = *a.g;
  const uint8_t* codes = a.block + block * g.block_bytes + g.header_bytes;
  const int steps = code_steps(P, g.piece), fit = kSteps / steps;
  const size_t row_piece = row_bytes(P, g) / g.pieces, stride = a.rows->stride, first = size_t(a.index[0]);
  const ptrdiff_t second = P == kI16Tiles ? ptrdiff_t(row_piece / 2) : ptrdiff_t(kTileRows * stride);
  struct Place {
    int group, columns;
  } places[kSteps];
  const auto multiply = [&](int from, int count) {  // pieces [from, from + count)
    for (int m = 0; m < a.n; m += kMost) {
      const int rows = a.n - m < kMost ? a.n - m : kMost;
      const uint8_t* x = a.rows->data + (first + m) * stride + from * row_piece;
      float* out = a.out + size_t(m) * 2 * kRows + block * kRows;
      for (int i = 0; i <= count; i++, x += row_piece) {  // sums are scaled while the next ones are multiplied
        const int used = i < count ? code_steps(P, places[i].columns) : 0;
        const uint8_t* w = tiles + size_t(i) * steps * kTileBytes;
        constexpr size_t kBlock = kSteps * kTileBytes;
        if (i == count) {
        } else if (P == kI16Tiles || rows > kTileRows) {
          multiply_tiles<T, P, 2, NB>(x, second, stride, w, kBlock, used, sums[i % 2]);
        } else {
          multiply_tiles<T, P, 1, NB>(x, second, stride, w, kBlock, used, sums[i % 2]);
        }
        if (i) add_tiles<V, P, NB>(a, block, first + m, rows, places[i - 1].group, from + i - 1, sums[(i - 1) % 2], out);
      }
    }
  };
  for (int m = 0; m < a.n; m++)
    for (int r = 0; r < NB * kRows; r += V::W) V::storef(a.out + m * 2 * kRows + block * kRows + r, V::bcastf(0.0f));
  int from = 0, count = 0;
  for_pieces(g, Slice{block, 0, g.kp, 0, 0, nullptr, 0}, [&](int, int columns, int group, int) {
    if (count == fit) {
      multiply(from, count);
      from += count;
      count = 0;
    }
    for (int b = 0; b < NB; b++) {
      decode_tiles<V, EL, P>(codes + b * g.block_bytes, columns, g.spec.zeros, a.ahead, tiles + (size_t(b) * kSteps + count * steps) * kTileBytes);
    }
    codes += size_t(columns) / g.per_lane * kVector;
    places[count++] = {group, columns};
  });
  multiply(from, count);
}

template <class V, class T, int EL, Path P>
void gemm_tiles_element(const BlockArgs& a) {
  T::configure();
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
