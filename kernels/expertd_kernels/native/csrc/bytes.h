// Integer codes as bytes, multiplied by unsigned bytes times signed ones (vpdpbusd): activations are planes of signed bytes.
//
//   e2m1         16 bits in two planes: q = 256 high + low. Codes become 2 * value + 12 by a look-up in a table of bytes.
//   int4         12 bits in three products instead of four. A byte of codes is lo + 16 hi, and any byte is a factor: with x (meets lo) =
//                256 a + z and y (meets hi) = 256 b + 16 z,  lo x + hi y = 256 lo a + 16 (16 hi) b + (lo + 16 hi) z.  One z serves both
//                columns; the points (x, y) that can be written so lie 16 apart, and the largest of a piece is 30208.
//
// Words of a row of activations, in order: int4, 8 columns: a of columns 0, 2, 4, 6; b of 1, 3, 5, 7; z of the pairs. e2m1, 8 columns: high
// bytes of 0, 2, 4, 6; of 1, 3, 5, 7; then low bytes. Sums are exact 32-bit integers. (int8 keeps vpdpwssd, which was faster.)
#pragma once
#include <type_traits>

#include "kernels.h"

namespace expertd {
namespace {

constexpr int byte_words(int element) { return element == EXPERTD_INT4 ? 3 : 4; }  // of a vector of codes
constexpr int kMostBytes = 6;  // rows of a tile: sums of two planes of two blocks fit the registers

#define INLINED __attribute__((always_inline))

// f(number) for 0 .. N - 1, the number a type: sums are then elements with constant indices, which the compiler keeps in registers.
template <int N, class F>
INLINED inline void each(const F& f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f(std::integral_constant<int, N - 1>{});
  }
}

// As tile_i16: out[m][b * 16 + r] = sum over pieces of scale * (sums of products).
// FETCH: what the layer asks for is fetched (fetches() in level.h).
template <class V, int EL, int NB, int MR, int RAW, bool FETCH>
void tile_bytes(const BlockArgs& a, const Slice& s, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  static_assert(V::W == kRows);
  constexpr int kWords = byte_words(EL), kColumns = 32 / element_bits(EL);
  constexpr bool kApart = EL == EXPERTD_INT4 && MR <= 2;  // odd columns stay where they are, 16 times too large, in sums of their own
  const I low = V::bcasti(0x0F0F0F0F), high = V::bcasti(int32_t(0xF0F0F0F0u));
  const Geometry& g = *a.g;
  const Rows& rows = *a.rows;
  const int32_t* x[MR];
  const size_t stride = size_t(g.groups) * kRows;
  const BlockScales<V, RAW> ws(a, 0);
  const bool fetch = FETCH && index == a.index;  // later tiles of rows find the codes in a cache
  const uint8_t* w = s.codes;
  I table = V::bcasti(0);
  if constexpr (EL == EXPERTD_E2M1) table = V::e2m1_table();
  for (int m = 0; m < MR; m++) x[m] = reinterpret_cast<const int32_t*>(rows.data + size_t(index[m]) * rows.stride);
  zero_tile<V, NB, MR>(out);
  size_t at = 0;
  for_pieces(g, s, [&](int, int columns, int group, int p) __attribute__((always_inline)) {
    I ones[MR][NB], highs[MR][NB], odds[MR][NB];  // sums of whole numbers; of 256ths; of odd columns
    const size_t vectors = size_t(columns) / kColumns, end = at + vectors * kWords;
    each<MR>([&](auto row) INLINED {
      constexpr int m = row.value;
      const I start = V::bcasti(rows.starts[size_t(index[m]) * rows.pieces + p]), none = V::bcasti(0);
      each<NB>([&](auto block) INLINED {
        constexpr int b = block.value;
        ones[m][b] = start, highs[m][b] = none, odds[m][b] = none;
      });
    });
    for (; at < end; at += kWords, w += NB * kVector) {
      I raw[NB], codes[NB];
      each<NB>([&](auto b) INLINED { raw[b.value] = FETCH ? V::loadi(w + b.value * kVector) : V::load_once(w + b.value * kVector); });
      if (fetch) each<NB>([&](auto b) INLINED { V::prefetch2(w + b.value * kVector + a.ahead); });
      if constexpr (EL == EXPERTD_E2M1) {
        each<2>([&](auto number) INLINED {
          constexpr int odd = number.value;
          each<NB>([&](auto b) INLINED { codes[b.value] = V::lookup6(table, V::template srl16<4 * odd>(raw[b.value])); });
          each<MR>([&](auto m) INLINED { V::dot_bytes(highs[m.value], codes, x[m.value] + at + odd); });
          each<MR>([&](auto m) INLINED { V::dot_bytes(ones[m.value], codes, x[m.value] + at + odd + 2); });
        });
      } else {
        each<MR>([&](auto m) INLINED { V::dot_bytes(ones[m.value], raw, x[m.value] + at + 2); });
        each<NB>([&](auto b) INLINED { codes[b.value] = V::andi(raw[b.value], low); });
        each<MR>([&](auto m) INLINED { V::dot_bytes(highs[m.value], codes, x[m.value] + at); });
        each<NB>([&](auto b) INLINED {
          codes[b.value] = kApart ? V::andi(raw[b.value], high) : V::andi(V::template srl16<4>(raw[b.value]), low);
        });
        each<MR>([&](auto m) INLINED { V::dot_bytes(kApart ? odds[m.value] : highs[m.value], codes, x[m.value] + at + 1); });
      }
    }
    each<MR>([&](auto row) INLINED {
      constexpr int m = row.value;
      const size_t piece = size_t(index[m]) * rows.pieces + p;
      const F scale = V::bcastf(row_scale<RAW>(a, rows.scales[piece]));
      each<NB>([&](auto block) INLINED {
        constexpr int b = block.value;
        I sum = V::addi(ones[m][b], V::template sll<8>(highs[m][b]));
        if (kApart) sum = V::addi(sum, V::template sll<4>(odds[m][b]));
        F f = V::cvt(sum);
        if (a.minus_zeros) f = V::fma(V::loadf(a.minus_zeros + b * stride + size_t(group) * kRows), V::bcastf(rows.sums[piece]), f);
        float* total = out + m * 2 * kRows + b * kRows;
        V::storef(total, V::fma(f, V::mul(ws.at(group, b, 0), scale), V::loadf(total)));
      });
    });
  });
}

#undef INLINED

}  // namespace
}  // namespace expertd
