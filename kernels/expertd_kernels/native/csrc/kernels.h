// The arithmetic of a level, written once over a vector type V (simd_*.h) and compiled once a level.
//
//   out[m][r] = sum over pieces p of scale[r, group of p] * (sum over k in p of (code[r][k] - zero) * x[m][k])
//
// Integral codes (int4, int8, e2m1 as 2 * value + 12) meet 16-bit fixed-point activations: products and sums inside a piece are
// exact 32-bit integers (|code| <= 255, |x| <= 2^15, 128 columns: below 2^31), so the order of work cannot change an answer.
// Every other element becomes f32 and meets f32 activations.
#pragma once
#include "rows.h"
#include "scales.h"

namespace expertd {
namespace {

template <int N>
struct Index {
  static constexpr int value = N;
};

constexpr int kPanel = 100;  // as an element: codes that unpack_bf16() has decoded

constexpr int positions(int element) { return element == EXPERTD_INT8 ? 2 : 4; }  // pairs of columns in a step
// A step of one row vector: pairs of columns (i, i + 4) of 8 for int4 and e2m1, (i, i + 2) of 4 for int8, each as two unsigned
// 16-bit numbers in a 32-bit lane. e2m1 is decoded in two halves, the even and the odd positions, as bytes; the others have one
// position in a part.
constexpr int parts(int element) { return element == EXPERTD_E2M1 ? 2 : positions(element); }

template <class V, int EL>
struct Pairs {
  typename V::I table;
  Pairs() : table(EL == EXPERTD_E2M1 ? V::e2m1_table() : V::bcasti(0)) {}
  template <int PART>
  typename V::I part(const uint8_t* from) const {
    if constexpr (EL == EXPERTD_E2M1) {
      return V::lookup8(table, V::andi(V::template srl16<4 * PART>(V::loadi(from)), V::bcasti(0x0F0F0F0F)));
    } else {
      return V::loadi(from);
    }
  }
  template <int I>  // of part I % parts(EL)
  typename V::I get(typename V::I part) const {
    if constexpr (EL == EXPERTD_INT4) {
      const typename V::I shifted = V::template srl16<4 * I>(part);
      return I == 3 ? shifted : V::andi(shifted, V::bcasti(0x000F000F));
    } else {
      return I >= parts(EL) || (EL == EXPERTD_INT8 && I == 1) ? V::template srl16<8>(part) : V::andi(part, V::bcasti(0x00FF00FF));
    }
  }
};

// f(Index<0>), f(Index<1>), ... f(Index<N - 1>)
template <int N, class F>
inline __attribute__((always_inline)) void for_each_index(const F& f) {
  if constexpr (N > 0) {
    for_each_index<N - 1>(f);
    f(Index<N - 1>{});
  }
}

// Where a tile works: columns [from, to) of blocks `block`.., piece `piece` and group `group` being those of `from`. codes: of
// these columns, NB blocks `stride` bytes apart, a block's vectors `step`. The sums of earlier columns are in `out` already where from > 0.
struct Slice {
  int block, from, to, piece, group;
  const uint8_t* codes;
  size_t stride, step;
};

// Calls f(k, columns, group, piece) for each piece of the slice.
template <class F>
inline __attribute__((always_inline)) void for_pieces(const Geometry& g, const Slice& s, const F& f) {
  for (int k = s.from, group = s.group, piece = s.piece; k < s.to; piece++) {
    const int group_end = (group + 1) * g.group < g.kp ? (group + 1) * g.group : g.kp;
    const int n = k + g.piece < group_end ? g.piece : group_end - k;
    f(k, n, group, piece);
    k += n;
    group += k == group_end;
  }
}

// Sums over pieces live in the tile in memory: the registers are for the sums inside a piece.
template <class V, int R, int MR>
inline void zero_tile(float* out) {
  for (int m = 0; m < MR; m++)
    for (int r = 0; r < R; r++) V::storef(out + m * 2 * kRows + r * V::W, V::bcastf(0.0f));
}

// The scales of V::W rows at the end of a piece: from `prepared`, or (RAW: a type of scale) as they are stored, which saves a single row
// of activations preparing them. RAW: the rest of the scale, a power of two, is in the activation's.
template <class V, int RAW>
struct BlockScales {
  const float* prepared;
  const uint8_t* header;
  size_t stride, bytes;  // of a block: prepared scales, and header
  BlockScales(const BlockArgs& a, int block)
      : prepared(a.scales + size_t(block) * a.g->groups * kRows), header(a.pair + block * a.g->header_bytes),
        stride(size_t(a.g->groups) * kRows), bytes(a.g->header_bytes) {}
  typename V::F at(int group, int block, int lane) const {
    const size_t i = size_t(group) * kRows + lane;
    if constexpr (RAW >= 0) return load_scales<V, RAW>(header + block * bytes + i * stored_bytes(RAW));
    else return V::loadf(prepared + block * stride + i);
  }
};
template <int RAW>
inline float row_scale(const BlockArgs& a, float scale) { return RAW >= 0 ? scale * a.factor[0] : scale; }

// One row of activations against NB blocks: a row vector meets all positions of a step before the next one is loaded. int4 without
// a fused dot product leaves odd positions where they are, 16 times too large, in sums of their own: one shift instead of three.
template <class V, int EL, int NB, int RAW>
void tile_row_i16(const BlockArgs& a, const Slice& s, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB, P = positions(EL);
  constexpr bool kSplit = EL == EXPERTD_INT4 && V::kChains == 1;
  constexpr int SUMS = kSplit ? 2 : R < V::kChains ? P : 1;
  const Geometry& g = *a.g;
  const size_t row = size_t(index[0]) * a.rows->pieces, stride = size_t(g.groups) * kRows;
  const int32_t* x = reinterpret_cast<const int32_t*>(a.rows->data + size_t(index[0]) * a.rows->stride) + s.from / 2;
  const float *xs = a.rows->scales + row, *sums = a.rows->sums + row;
  const BlockScales<V, RAW> ws(a, s.block);
  const float* wz = a.minus_zeros ? a.minus_zeros + s.block * stride : nullptr;
  const int32_t* starts = a.rows->starts + row;
  const Pairs<V, EL> codes;
  const uint8_t* w[NB];
  for (int b = 0; b < NB; b++) w[b] = s.codes + b * s.stride;
  if (s.from == 0) zero_tile<V, R, 1>(out);
  for_pieces(g, s, [&](int, int columns, int group, int p) {
    I acc[R][SUMS];
    const I start = V::bcasti(starts[p]), none = V::bcasti(0);
    // Constant indices: sums that loops fill are kept on the stack by g++ 12, unrolled or not.
    for_each_index<R>([&](auto row) __attribute__((always_inline)) {
      for_each_index<SUMS>([&](auto sum) __attribute__((always_inline)) {
        acc[decltype(row)::value][decltype(sum)::value] = decltype(sum)::value ? none : start;
      });
    });
    for (const int32_t* last = x + columns / 2; x < last; x += P) {
      I v[P];
      for_each_index<P>([&](auto i) { v[decltype(i)::value] = V::bcasti(x[decltype(i)::value]); });
      for_each_index<R>([&](auto row) __attribute__((always_inline)) {
        constexpr int r = decltype(row)::value;
        const uint8_t* from = w[r / VB] + (r % VB) * V::W * 4;
        if constexpr (kSplit) {
          const I raw = V::loadi(from), high = V::template srl16<8>(raw), mask = V::bcasti(0x000F000F), mask16 = V::bcasti(0x00F000F0);
          acc[r][0] = V::dot16(acc[r][0], V::andi(raw, mask), v[0]);
          acc[r][1] = V::dot16(acc[r][1], V::andi(raw, mask16), v[1]);
          acc[r][0] = V::dot16(acc[r][0], V::andi(high, mask), v[2]);
          acc[r][1] = V::dot16(acc[r][1], V::andi(high, mask16), v[3]);
        } else {
          for_each_index<parts(EL)>([&](auto number) __attribute__((always_inline)) {
            constexpr int part = decltype(number)::value;
            const I decoded = codes.template part<part>(from);
            for_each_index<P / parts(EL)>([&](auto index) __attribute__((always_inline)) {
              constexpr int i = part + decltype(index)::value * parts(EL);
              acc[r][i % SUMS] = V::dot16(acc[r][i % SUMS], codes.template get<i>(decoded), v[i]);
            });
          });
        }
      });
#pragma GCC unroll 2
      for (int b = 0; b < NB; b++) {
        if (V::kAhead) V::prefetch(w[b] + a.ahead);
        w[b] += s.step;
      }
    }
    const F scale = V::bcastf(row_scale<RAW>(a, xs[p]));
    for_each_index<R>([&](auto row) __attribute__((always_inline)) {
      constexpr int r = decltype(row)::value;
      I sum = acc[r][0];
      if constexpr (kSplit) sum = V::addi(sum, V::template sra<4>(acc[r][1]));
      else
        for_each_index<SUMS - 1>([&](auto c) __attribute__((always_inline)) { sum = V::addi(sum, acc[r][decltype(c)::value + 1]); });
      F f = V::cvt(sum);
      const size_t lane = (r / VB) * stride + (r % VB) * V::W;
      if (wz) f = V::fma(V::loadf(wz + group * kRows + lane), V::bcastf(sums[p]), f);
      V::storef(out + r * V::W, V::fma(f, V::mul(ws.at(group, r / VB, r % VB * V::W), scale), V::loadf(out + r * V::W)));
    });
  });
}

template <class V, int EL, int NB, int MR, int RAW>
void tile_i16(const BlockArgs& a, const Slice& s, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB, P = positions(EL), CH = R * MR < V::kChains ? P : 1;
  const Geometry& g = *a.g;
  const Rows& rows = *a.rows;
  const int32_t *x[MR], *starts[MR];
  const size_t stride = size_t(g.groups) * kRows;
  const float *xs[MR], *sums[MR];
  const BlockScales<V, RAW> ws(a, s.block);
  const float* wz = a.minus_zeros ? a.minus_zeros + s.block * stride : nullptr;
  const uint8_t* w[NB];
  for (int b = 0; b < NB; b++) w[b] = s.codes + b * s.stride;
  for (int m = 0; m < MR; m++) {
    const size_t row = size_t(index[m]);
    x[m] = reinterpret_cast<const int32_t*>(rows.data + row * rows.stride) + s.from / 2;
    xs[m] = rows.scales + row * rows.pieces;
    sums[m] = rows.sums + row * rows.pieces;
    starts[m] = rows.starts + row * rows.pieces;
  }
  const Pairs<V, EL> codes;
  if (s.from == 0) zero_tile<V, R, MR>(out);
  int pair = 0;
  for_pieces(g, s, [&](int, int columns, int group, int p) {
    I acc[MR][R][CH];
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const I start = V::bcasti(starts[m][p]);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        for (int c = 0; c < CH; c++) acc[m][r][c] = c ? V::bcasti(0) : start;
    }
    for (const int last = pair + columns / 2; pair < last; pair += P) {
      for_each_index<parts(EL)>([&](auto number) {
        constexpr int part = decltype(number)::value;
        I decoded[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) decoded[r] = codes.template part<part>(w[r / VB] + (r % VB) * V::W * 4);
        for_each_index<P / parts(EL)>([&](auto index) {
          constexpr int i = part + decltype(index)::value * parts(EL);
          I q[R];
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) q[r] = codes.template get<i>(decoded[r]);
#pragma GCC unroll 16
          for (int m = 0; m < MR; m++) {
            const I v = V::bcasti(x[m][pair + i]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc[m][r][i % CH] = V::dot16(acc[m][r][i % CH], q[r], v);
          }
        });
      });
#pragma GCC unroll 2
      for (int b = 0; b < NB; b++) {
        if (V::kAhead) V::prefetch(w[b] + a.ahead);
        w[b] += s.step;
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const F scale = V::bcastf(row_scale<RAW>(a, xs[m][p]));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        I sum = acc[m][r][0];
        for (int c = 1; c < CH; c++) sum = V::addi(sum, acc[m][r][c]);
        F f = V::cvt(sum);
        const size_t lane = (r / VB) * stride + (r % VB) * V::W;
        if (wz) f = V::fma(V::loadf(wz + group * kRows + lane), V::bcastf(sums[m][p]), f);
        float* sums_of = out + m * 2 * kRows + r * V::W;
        V::storef(sums_of, V::fma(f, V::mul(ws.at(group, r / VB, r % VB * V::W), scale), V::loadf(sums_of)));
      }
    }
  });
}

// As Pairs, but two bf16 numbers in a lane; symmetric int4 without its offset, stored zero points still to be subtracted.
template <class V, int EL>
struct Bf16Pairs {
  typename V::I table;
  explicit Bf16Pairs(bool zeros) : table(V::bcasti(0)) {
    static constexpr uint16_t kSigned[16] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
                                             0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};  // -8 .. 7
    static constexpr uint16_t kUnsigned[16] = {0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
                                               0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};  // 0 .. 15
    static constexpr uint16_t kE2m1[16] = {0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40C0, 0x4100, 0x4140,
                                           0x8000, 0xBF80, 0xC000, 0xC040, 0xC080, 0xC0C0, 0xC100, 0xC140};  // twice the value
    if constexpr (EL == EXPERTD_INT4) table = V::table16(zeros ? kUnsigned : kSigned);
    if constexpr (EL == EXPERTD_E2M1) table = V::table16(kE2m1);
  }
  template <int I>
  typename V::I get(const uint8_t* from, size_t step) const {  // step: to the block's next vector
    if constexpr (EL == kPanel || EL == EXPERTD_BF16) {
      return V::loadi(from + I * step);
    } else if constexpr (EL == EXPERTD_E4M3) {
      return V::e4m3_to_bf16(I == 1 ? V::template srl16<8>(V::loadi(from)) : V::andi(V::loadi(from), V::bcasti(0x00FF00FF)));
    } else {
      return V::lookup16(table, V::template srl16<4 * I>(V::loadi(from)));
    }
  }
};

constexpr bool is_e4m3(int element) { return element == EXPERTD_E4M3 || element == kNormalE4M3; }

constexpr int bf16_positions(int element) { return element == EXPERTD_E4M3 ? 2 : 4; }
constexpr int bf16_step(int element) { return element == kPanel || element == EXPERTD_BF16 ? 4 : 1; }  // vectors of a step

// Sums that a tile of few rows has for each of its numbers, so that more products are under way. With several, bits depend on the rows of a
// tile.
template <class V, int EL, bool F32>
constexpr int chains(int nb, int rows) {
  const int vectors = nb * kRows / V::W * rows;
  if (F32) return vectors < (is_e4m3(EL) ? 6 : 8) ? 2 : 1;  // e4m3 needs registers to decode
  return vectors < V::kChains ? bf16_positions(EL) : 1;
}

template <class V, int EL, int NB, int MR, int CH>
void tile_bf16(const BlockArgs& a, const Slice& s, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB, P = bf16_positions(EL);
  const Geometry& g = *a.g;
  const size_t stride = size_t(g.groups) * kRows;
  const int32_t* x[MR];
  const float *sums[MR], *ws = a.scales + s.block * stride;
  const float* wz = a.minus_zeros ? a.minus_zeros + s.block * stride : nullptr;
  const uint8_t* w[NB];
  for (int b = 0; b < NB; b++) w[b] = s.codes + b * s.stride;
  for (int m = 0; m < MR; m++) {
    x[m] = reinterpret_cast<const int32_t*>(a.rows->data + size_t(index[m]) * a.rows->stride) + s.from / 2;
    sums[m] = a.rows->sums + size_t(index[m]) * a.rows->pieces;
  }
  const Bf16Pairs<V, EL> codes(g.spec.zeros);
  if (s.from == 0) zero_tile<V, R, MR>(out);
  int pair = 0;
  for_pieces(g, s, [&](int, int columns, int group, int p) {
    F acc[MR][R][CH];
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        for (int c = 0; c < CH; c++) acc[m][r][c] = V::bcastf(0.0f);
    for (const int last = pair + columns / 2; pair < last; pair += P) {
      for_each_index<P>([&](auto position) {
        constexpr int i = decltype(position)::value;
        I q[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) q[r] = codes.template get<i>(w[r / VB] + (r % VB) * V::W * 4, s.step);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          const I v = V::bcasti(x[m][pair + i]);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) acc[m][r][i % CH] = V::dot_bf16(acc[m][r][i % CH], q[r], v);
        }
      });
#pragma GCC unroll 2
      for (int b = 0; b < NB; b++) {
        if (EL != kPanel && V::kAhead)
          for (int i = 0; i < bf16_step(EL); i++) V::prefetch(w[b] + a.ahead + i * s.step);
        w[b] += bf16_step(EL) * s.step;
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const size_t lane = group * kRows + (r / VB) * stride + (r % VB) * V::W;
        F sum = acc[m][r][0];
        for (int c = 1; c < CH; c++) sum = V::add(sum, acc[m][r][c]);
        if (wz) sum = V::fma(V::loadf(wz + lane), V::bcastf(sums[m][p]), sum);
        float* sums_of = out + m * 2 * kRows + r * V::W;
        V::storef(sums_of, V::fma(sum, V::loadf(ws + lane), V::loadf(sums_of)));
      }
  });
}

// Columns of NB blocks, vectors of each `step` bytes apart, into panels `panel_bytes` apart.
template <class V, int EL, int NB>
void unpack_bf16(const uint8_t* codes, size_t step, int columns, bool zeros, uint8_t* panel, size_t panel_bytes) {
  const Bf16Pairs<V, EL> pairs(zeros);
  for (int k = 0; k < columns; k += 2 * bf16_positions(EL), codes += bf16_step(EL) * step) {
    for (int b = 0; b < NB; b++)
      for_each_index<bf16_positions(EL)>([&](auto i) {
        for (int r = 0; r < kVector; r += V::W * 4) {
          const typename V::I numbers = pairs.template get<decltype(i)::value>(codes + b * kVector + r, step);
          V::storei(panel + b * panel_bytes + decltype(i)::value * kVector + r, numbers);
        }
      });
    panel += bf16_positions(EL) * kVector;
  }
}

// Magnitudes of e4m3 (7 bits, exponents of 4) as 8 bits with exponents of 5, 3 larger: numbers below 2^-6 are normal there. Zero stays zero.
template <class V>
typename V::I normal_e4m3(typename V::I codes) {
  static constexpr uint8_t kLift[16] = {0, 7, 14, 17, 20, 21, 22, 23, 24};  // of magnitudes 0 .. 7, and of all others
  const typename V::I magnitude = V::andi(codes, V::bcasti(0x7F7F7F7F));
  return V::add8(magnitude, V::lookup8(V::table8(kLift), V::min8(magnitude, V::bcasti(0x08080808))));
}

// Column J of each lane as f32: twice the value for e2m1, value / input_factor^2 for e4m3 and f16 (see level.h; made normal: value / 2^117
// and / 2^56); prepare() puts the rest into the scales. minus_zero: only int4 and int8 have it.
template <class V, int EL, int J>
typename V::F value(typename V::I raw, typename V::F minus_zero) {
  using I = typename V::I;
  constexpr int bits = element_bits(EL);
  if constexpr (EL == EXPERTD_INT4 || EL == EXPERTD_INT8) {
    const I code = V::andi(V::template srl<J * bits>(raw), V::bcasti((1 << bits) - 1));
    return V::add(V::cvt(code), minus_zero);
  } else if constexpr (EL == EXPERTD_E2M1) {
    return V::e2m1_twice(V::andi(V::template srl<J * bits>(raw), V::bcasti(15)));
  } else if constexpr (EL == EXPERTD_E4M3) {  // sign, then 7 bits at 10..4 of each half: 4 of them land in the exponent
    const I pair = V::andi(V::template sra16<4>(J % 2 ? raw : V::template sll16<8>(raw)), V::bcasti(int32_t(0x87F087F0u)));
    return V::cast(J / 2 ? V::andi(pair, V::bcasti(int32_t(0xFFFF0000u))) : V::template sll<16>(pair));
  } else if constexpr (EL == kNormalE4M3) {  // sign, then 8 bits at 11..4 of each half
    const I lifted = normal_e4m3<V>(raw), sign = V::andi(J % 2 ? raw : V::template sll16<8>(raw), V::bcasti(int32_t(0x80008000u)));
    const I pair = V::ori(V::andi(J % 2 ? V::template srl16<4>(lifted) : V::template sll16<4>(lifted), V::bcasti(0x0FF00FF0)), sign);
    return V::cast(J / 2 ? V::andi(pair, V::bcasti(int32_t(0xFFFF0000u))) : V::template sll<16>(pair));
  } else if constexpr (EL == kNormalF16) {
    const I high = V::template sll<16 - 16 * J>(raw);
    const I magnitude = V::bits(widened<V>(V::andi(V::template srl<3>(high), V::bcasti(0x0FFFE000)), 56));
    return V::cast(V::ori(magnitude, V::andi(high, V::bcasti(int32_t(0x80000000u)))));
  } else if constexpr (EL == EXPERTD_F16) {  // sign, then 15 bits at 27..13: 5 of them land in the exponent
    return V::cast(V::andi(V::template sra<3>(V::template sll<16 - 16 * J>(raw)), V::bcasti(int32_t(0x8FFFE000u))));
  } else if constexpr (EL == EXPERTD_BF16) {
    return V::cast(J ? V::andi(raw, V::bcasti(int32_t(0xFFFF0000u))) : V::template sll<16>(raw));
  } else {
    return V::cast(raw);
  }
}

template <class V, int EL, int NB, int MR, int CH>
void tile_f32(const BlockArgs& a, const Slice& s, const int32_t* index, float* out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int VB = kRows / V::W, R = NB * VB, L = 32 / element_bits(EL);
  const Geometry& g = *a.g;
  const uint8_t* w[NB];
  const float *x[MR], *ws = a.scales + size_t(s.block) * g.groups * kRows;
  const float* wz = a.minus_zeros ? a.minus_zeros + size_t(s.block) * g.groups * kRows : nullptr;
  for (int b = 0; b < NB; b++) w[b] = s.codes + b * s.stride;
  for (int m = 0; m < MR; m++) x[m] = reinterpret_cast<const float*>(a.rows->data + size_t(index[m]) * a.rows->stride);
  if (s.from == 0) zero_tile<V, R, MR>(out);
  for_pieces(g, s, [&](int at, int columns, int group, int) {
    F acc[MR][R][CH], minus_zero[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const size_t lane = (size_t(r / VB) * g.groups + group) * kRows + (r % VB) * V::W;
      minus_zero[r] = V::bcastf(-float(code_offset(EL, wz != nullptr)));
      if (wz) minus_zero[r] = V::add(minus_zero[r], V::loadf(wz + lane));
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++)
        for (int c = 0; c < CH; c++) acc[m][r][c] = V::bcastf(0.0f);
    }
    for (int k = at; k < at + columns; k += 8) {  // 8 columns are 8 / L vectors of codes
#pragma GCC unroll 8
      for (int v = 0; v < 8 / L; v++) {
        const auto load = [&](int r) { return V::loadi(w[r / VB] + v * s.step + (r % VB) * V::W * 4); };
        if constexpr (MR == 1 && is_e4m3(EL)) {  // columns share most of their decoding: one row vector after the other
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            const I raw = load(r);
            for_each_index<L>([&](auto column) {
              constexpr int j = decltype(column)::value;
              acc[0][r][j % CH] = V::fma(value<V, EL, j>(raw, minus_zero[r]), V::bcastf(x[0][k + v * L + j]), acc[0][r][j % CH]);
            });
          }
        } else {
          for_each_index<L>([&](auto column) {
            constexpr int j = decltype(column)::value;
            F q[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) q[r] = value<V, EL, j>(load(r), minus_zero[r]);
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++) {
              const F b = V::bcastf(x[m][k + v * L + j]);
#pragma GCC unroll 4
              for (int r = 0; r < R; r++) {
                F& sum = acc[m][r][L == 1 ? v % CH : j % CH];
                sum = V::fma(q[r], b, sum);
              }
            }
          });
        }
      }
      for (int b = 0; b < NB; b++) {
        if (V::kAhead)
          for (int v = 0; v < 8 / L; v++) V::prefetch(w[b] + a.ahead + v * s.step);
        w[b] += 8 / L * s.step;
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const F scale = V::loadf(ws + (size_t(r / VB) * g.groups + group) * kRows + (r % VB) * V::W);
        F sum = acc[m][r][0];
        if constexpr (CH == 2) sum = V::add(sum, acc[m][r][1]);
        float* sums_of = out + m * 2 * kRows + r * V::W;
        V::storef(sums_of, V::fma(sum, scale, V::loadf(sums_of)));
      }
  });
}

}  // namespace
}  // namespace expertd
