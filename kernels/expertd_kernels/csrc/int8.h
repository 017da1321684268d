// int4 weights with 8-bit activations: the named choice, never the default (1.7 % relative error instead of 0.2 %).
#pragma once
#include "kernels.h"

namespace expertd {
namespace {

// As tile_i16, but unsigned nibbles meet signed bytes. Where the dot product adds in 16 bits (V::kDot8Steps > 0), so many steps of 8
// columns fit (4 * 2 * 2 * 15 * 127 = 30480) before the sums are widened.
template <class V, int NB, int MR>
void tile_i8(const BlockArgs& a, const Slice& s, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB;
  const Geometry& g = *a.g;
  const size_t stride = size_t(g.groups) * kRows;
  const int32_t *x[MR], *starts[MR];
  const float *xs[MR], *sums[MR], *ws = a.scales + s.block * stride;
  const float* wz = a.minus_zeros ? a.minus_zeros + s.block * stride : nullptr;
  const uint8_t* w[NB];
  for (int b = 0; b < NB; b++) w[b] = s.codes + b * s.stride;
  for (int m = 0; m < MR; m++) {
    const size_t row = size_t(index[m]);
    x[m] = reinterpret_cast<const int32_t*>(a.rows->data + row * a.rows->stride) + s.from / 4;
    xs[m] = a.rows->scales + row * a.rows->pieces;
    sums[m] = a.rows->sums + row * a.rows->pieces;
    starts[m] = a.rows->starts + row * a.rows->pieces;
  }
  if (s.from == 0) zero_tile<V, R, MR>(out);
  int word = 0;
  for_pieces(g, s, [&](int, int columns, int group, int p) {
    I total[MR][R];
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) total[m][r] = V::bcasti(starts[m][p]);
    for (int left = columns / 8; left > 0;) {
      const int steps = V::kDot8Steps && V::kDot8Steps < left ? V::kDot8Steps : left;
      left -= steps;
      I acc[MR][R];
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[m][r] = V::kDot8Steps ? V::bcasti(0) : total[m][r];
      for (const int last = word + 2 * steps; word < last; word += 2) {
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
          w[b] += kVector;
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) total[m][r] = V::kDot8Steps ? V::widen8(total[m][r], acc[m][r]) : acc[m][r];
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const F scale = V::bcastf(xs[m][p]);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const size_t lane = group * kRows + (r / VB) * stride + (r % VB) * V::W;
        F f = V::cvt(total[m][r]);
        if (wz) f = V::fma(V::loadf(wz + lane), V::bcastf(sums[m][p]), f);
        float* sums_of = out + m * 2 * kRows + r * V::W;
        V::storef(sums_of, V::fma(f, V::mul(V::loadf(ws + lane), scale), V::loadf(sums_of)));
      }
    }
  });
}

}  // namespace
}  // namespace expertd
