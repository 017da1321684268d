// int4 weights with 8-bit activations: the named choice, never the default.
#pragma once
#include "kernels.h"

namespace expertd {
namespace {

// As tile_i16, but unsigned nibbles meet signed bytes, and the sums of 16 columns are scaled in f32: activations have a scale for 16
// columns. In them, four products of 15 * 127 fit a 16-bit sum of two (V::dot8) with room to spare.
template <class V, int NB, int MR, int RAW>
void tile_i8(const BlockArgs& a, const Slice& s, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB;
  const Geometry& g = *a.g;
  const int parts = parts_of(g.piece);
  const size_t stride = size_t(g.groups) * kRows;
  const int32_t* x[MR];
  const float *xs[MR], *sums[MR];
  const BlockScales<V, RAW> ws(a, s.block);
  const float* wz = a.minus_zeros ? a.minus_zeros + s.block * stride : nullptr;
  const uint8_t* w[NB];
  for (int b = 0; b < NB; b++) w[b] = s.codes + b * s.stride;
  for (int m = 0; m < MR; m++) {
    const size_t row = size_t(index[m]);
    x[m] = reinterpret_cast<const int32_t*>(a.rows->data + row * a.rows->stride) + s.from / 4;
    xs[m] = a.rows->scales + row * a.rows->pieces * parts;
    sums[m] = a.rows->sums + row * a.rows->pieces;
  }
  const F offset = V::bcastf(-float(code_offset(EXPERTD_INT4, wz != nullptr)));
  if (s.from == 0) zero_tile<V, R, MR>(out);
  int word = 0;
  for_pieces(g, s, [&](int, int columns, int group, int p) {
    F total[MR][R];
    I acc[MR][R];
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) total[m][r] = V::bcastf(0.0f);
    const auto step = [&]() __attribute__((always_inline)) {  // 8 columns
      for_each_index<2>([&](auto half) {
        constexpr int h = decltype(half)::value;
        I q[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          q[r] = V::andi(V::template srl16<4 * h>(V::loadi(w[r / VB] + (r % VB) * V::W * 4)), V::bcasti(0x0F0F0F0F));
        }
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          const I v = V::bcasti(x[m][word + h]);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) acc[m][r] = V::dot8(acc[m][r], q[r], v);
        }
      });
#pragma GCC unroll 2
      for (int b = 0; b < NB; b++) {
        if (V::kAhead) V::prefetch(w[b] + a.ahead);
        w[b] += s.step;
      }
      word += 2;
    };
    for (int left = columns, part = p * parts; left > 0; left -= kPart, part++) {
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[m][r] = V::bcasti(0);
      step();
      if (left > 8) step();
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const F scale = V::bcastf(xs[m][part]);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) total[m][r] = V::fma(V::cvt(V::sum8(acc[m][r])), scale, total[m][r]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const F sum = V::bcastf(sums[m][p]);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const F minus = wz ? V::loadf(wz + group * kRows + (r / VB) * stride + (r % VB) * V::W) : offset;
        float* sums_of = out + m * 2 * kRows + r * V::W;
        const F f = V::fma(minus, sum, total[m][r]);
        V::storef(sums_of, V::fma(f, ws.at(group, r / VB, r % VB * V::W), V::loadf(sums_of)));
      }
    }
  });
}

}  // namespace
}  // namespace expertd
