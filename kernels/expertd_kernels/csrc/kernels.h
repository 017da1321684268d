// The arithmetic of a level, written once over a vector type V (simd_*.h) and compiled once a level.
//
//   out[m][r] = sum over pieces p of scale[r, group of p] * (sum over k in p of (code[r][k] - zero) * x[m][k])
//
// Integral codes (int4, int8, e2m1 as 2 * value + 12) meet 16-bit fixed-point activations: products and sums inside a piece are
// exact 32-bit integers (|code| <= 255, |x| <= 2^15, 128 columns: below 2^31), so the order of work cannot change an answer.
// Every other element becomes f32 and meets f32 activations.
#pragma once
#include "rows.h"

namespace expertd {
namespace {

template <int N>
struct Index {
  static constexpr int value = N;
};

constexpr int positions(int element) { return is_nibble(element) ? 4 : 2; }  // 16-bit pairs in a 32-bit lane
constexpr int code_offset(int element, bool zeros) {  // what a stored integral code has on top of its number
  return element == EXPERTD_E2M1 ? 12 : element == EXPERTD_INT8 ? 128 : zeros ? 0 : 8;
}

// Pairs (columns i, i + 4) of an int4 or e2m1 lane, (i, i + 2) of an int8 lane, as two unsigned 16-bit numbers each.
template <class V, int EL>
struct Pairs {
  typename V::I raw, low, high;
  explicit Pairs(const void* p) : raw(V::loadi(p)), low(raw), high(raw) {
    if constexpr (EL == EXPERTD_E2M1) {
      const typename V::I mask = V::bcasti(0x0F0F0F0F);
      low = V::e2m1_bytes(V::andi(raw, mask));
      high = V::e2m1_bytes(V::andi(V::template srl16<4>(raw), mask));
    }
  }
  template <int I> typename V::I get() const {
    if constexpr (EL == EXPERTD_INT4) {
      const typename V::I shifted = V::template srl16<4 * I>(raw);
      return I == 3 ? shifted : V::andi(shifted, V::bcasti(0x000F000F));
    } else if constexpr (EL == EXPERTD_INT8) {
      return I == 1 ? V::template srl16<8>(raw) : V::andi(raw, V::bcasti(0x00FF00FF));
    } else {
      const typename V::I both = I % 2 ? high : low;
      return I >= 2 ? V::template srl16<8>(both) : V::andi(both, V::bcasti(0x00FF00FF));
    }
  }
};

template <class V, int EL, int NB, int MR>
void tile_i16(const BlockArgs& a, int block, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB, P = positions(EL), CH = R * MR < V::kChains ? P : 1;
  const Geometry& g = *a.g;
  const Rows& rows = *a.rows;
  const uint8_t* w[NB];
  const int32_t *x[MR], *sums[MR];
  const float *xs[MR], *ws = a.scales + size_t(block) * g.groups * kRows;
  const float* wz = a.minus_zeros ? a.minus_zeros + size_t(block) * g.groups * kRows : nullptr;
  const int offset = code_offset(EL, g.spec.zeros);
  for (int b = 0; b < NB; b++) w[b] = a.block + (block + b) * g.block_bytes + g.header_bytes;
  for (int m = 0; m < MR; m++) {
    x[m] = reinterpret_cast<const int32_t*>(rows.data + size_t(index[m]) * rows.stride);
    xs[m] = rows.scales + size_t(index[m]) * rows.pieces;
    sums[m] = rows.sums + size_t(index[m]) * rows.pieces;
  }
  F tot[R][MR];
  for (int r = 0; r < R; r++)
    for (int m = 0; m < MR; m++) tot[r][m] = V::bcastf(0.0f);
  int pair = 0, p = 0;
  for (int at = 0, gi = 0; at < g.kp; at += g.group, gi++) {
    const int end = at + g.group < g.kp ? at + g.group : g.kp;
    for (int k = at; k < end; k += g.piece, p++) {
      const int vectors = ((k + g.piece < end ? g.piece : end - k)) / (2 * P);
      I acc[R][MR][CH];
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const I init = V::bcasti(-offset * sums[m][p]);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          acc[r][m][0] = init;
          for (int c = 1; c < CH; c++) acc[r][m][c] = V::bcasti(0);
        }
      }
      for (int v = 0; v < vectors; v++, pair += P) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const Pairs<V, EL> codes(w[r / VB] + (r % VB) * V::W * 4);
          auto step = [&](auto position) {
            constexpr int i = decltype(position)::value;
            const I q = codes.template get<i>();
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++) acc[r][m][i % CH] = V::dot16(acc[r][m][i % CH], q, V::bcasti(x[m][pair + i]));
          };
          step(Index<0>{});
          step(Index<1>{});
          if constexpr (P == 4) {
            step(Index<2>{});
            step(Index<3>{});
          }
        }
        for (int b = 0; b < NB; b++) {
          V::prefetch(w[b] + V::kAhead);
          w[b] += kVector;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const size_t lane = (size_t(r / VB) * g.groups + gi) * kRows + (r % VB) * V::W;
        const F scale = V::loadf(ws + lane);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          I sum = acc[r][m][0];
          for (int c = 1; c < CH; c++) sum = V::addi(sum, acc[r][m][c]);
          F f = V::cvt(sum);
          if (wz) f = V::fma(V::loadf(wz + lane), V::bcastf(float(sums[m][p])), f);
          tot[r][m] = V::fma(f, V::mul(scale, V::bcastf(xs[m][p])), tot[r][m]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < MR; m++) V::storef(out + m * 2 * kRows + r * V::W, tot[r][m]);
}

// Column J of each lane as f32: twice the value for e2m1, value / input_factor^2 for e4m3 and f16 (see level.h); prepare() puts the
// rest into the scales. minus_zero: only int4 and int8 have it.
template <class V, int EL, int J>
typename V::F value(typename V::I raw, typename V::F minus_zero) {
  using I = typename V::I;
  constexpr int bits = element_bits(EL);
  if constexpr (EL == EXPERTD_INT4 || EL == EXPERTD_INT8) {
    const I code = V::andi(V::template srl<J * bits>(raw), V::bcasti((1 << bits) - 1));
    return V::add(V::cvt(code), minus_zero);
  } else if constexpr (EL == EXPERTD_E2M1) {
    return V::e2m1_twice(V::andi(V::template srl<J * bits>(raw), V::bcasti(15)));
  } else if constexpr (EL == EXPERTD_E4M3) {  // sign, then 7 bits at 26..20: 4 of them land in the exponent
    return V::cast(V::andi(V::template sra<4>(V::template sll<24 - 8 * J>(raw)), V::bcasti(int32_t(0x87F00000u))));
  } else if constexpr (EL == EXPERTD_F16) {  // sign, then 15 bits at 27..13: 5 of them land in the exponent
    return V::cast(V::andi(V::template sra<3>(V::template sll<16 - 16 * J>(raw)), V::bcasti(int32_t(0x8FFFE000u))));
  } else if constexpr (EL == EXPERTD_BF16) {
    return V::cast(J ? V::andi(raw, V::bcasti(int32_t(0xFFFF0000u))) : V::template sll<16>(raw));
  } else {
    return V::cast(raw);
  }
}

template <class V, int EL, int NB, int MR>
void tile_f32(const BlockArgs& a, int block, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB, L = 32 / element_bits(EL), CH = R * MR < 8 ? 2 : 1;
  const Geometry& g = *a.g;
  const uint8_t* w[NB];
  const float *x[MR], *ws = a.scales + size_t(block) * g.groups * kRows;
  const float* wz = a.minus_zeros ? a.minus_zeros + size_t(block) * g.groups * kRows : nullptr;
  for (int b = 0; b < NB; b++) w[b] = a.block + (block + b) * g.block_bytes + g.header_bytes;
  for (int m = 0; m < MR; m++) x[m] = reinterpret_cast<const float*>(a.rows->data + size_t(index[m]) * a.rows->stride);
  F tot[R][MR];
  for (int r = 0; r < R; r++)
    for (int m = 0; m < MR; m++) tot[r][m] = V::bcastf(0.0f);
  for (int at = 0, gi = 0; at < g.kp; at += g.group, gi++) {
    const int end = at + g.group < g.kp ? at + g.group : g.kp;
    F acc[R][MR][CH], minus_zero[R];
    for (int r = 0; r < R; r++) {
      const size_t lane = (size_t(r / VB) * g.groups + gi) * kRows + (r % VB) * V::W;
      minus_zero[r] = wz ? V::loadf(wz + lane) : V::bcastf(-float(code_offset(EL, false)));
      if (wz && EL == EXPERTD_INT8) minus_zero[r] = V::add(minus_zero[r], V::bcastf(-128.0f));
      for (int m = 0; m < MR; m++)
        for (int c = 0; c < CH; c++) acc[r][m][c] = V::bcastf(0.0f);
    }
    for (int k = at; k < end; k += 8) {  // 8 columns are 8 / L vectors of codes
#pragma GCC unroll 8
      for (int v = 0; v < 8 / L; v++) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const I raw = V::loadi(w[r / VB] + v * kVector + (r % VB) * V::W * 4);
          auto step = [&](auto column) {
            constexpr int j = decltype(column)::value;
            const F q = value<V, EL, j>(raw, minus_zero[r]);
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++) {
              F& sum = acc[r][m][L == 1 ? v % CH : j % CH];
              sum = V::fma(q, V::bcastf(x[m][k + v * L + j]), sum);
            }
          };
          step(Index<0>{});
          if constexpr (L >= 2) step(Index<1>{});
          if constexpr (L >= 4) step(Index<2>{}), step(Index<3>{});
          if constexpr (L >= 8) step(Index<4>{}), step(Index<5>{}), step(Index<6>{}), step(Index<7>{});
        }
      }
      for (int b = 0; b < NB; b++) {
        for (int v = 0; v < 8 / L; v++) V::prefetch(w[b] + V::kAhead + v * kVector);
        w[b] += 8 / L * kVector;
      }
    }
    for (int r = 0; r < R; r++) {
      const F scale = V::loadf(ws + (size_t(r / VB) * g.groups + gi) * kRows + (r % VB) * V::W);
      for (int m = 0; m < MR; m++) {
        F sum = acc[r][m][0];
        if constexpr (CH == 2) sum = V::add(sum, acc[r][m][1]);
        tot[r][m] = V::fma(sum, scale, tot[r][m]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < MR; m++) V::storef(out + m * 2 * kRows + r * V::W, tot[r][m]);
}

}  // namespace
}  // namespace expertd
