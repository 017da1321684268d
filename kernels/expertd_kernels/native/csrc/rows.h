// Activations on their way in and out: rows to f32, f32 to 16-bit fixed point, the function between the GEMMs, the weighted sum.
// Templates over the vector type V of a level; included by kernels.h only.
#pragma once
#include "level.h"

namespace expertd {
namespace {

inline float bf16_to_f32(uint16_t h) {
  const uint32_t u = uint32_t(h) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

inline uint16_t f32_to_bf16(float f) {  // round to nearest even; NaN stays NaN
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  const uint16_t rounded = uint16_t((u + 0x7FFFu + ((u >> 16) & 1)) >> 16);
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? uint16_t((u >> 16) | 0x40) : rounded;
}

template <class V>
void load_row(const void* src, bool f32, const int32_t* map, int k, int kp, float factor, float* dst) {
  const float* f = static_cast<const float*>(src);
  const uint16_t* b = static_cast<const uint16_t*>(src);
  if (map) {
    for (int i = 0; i < kp; i++) dst[i] = map[i] < 0 ? 0.0f : factor * (f32 ? f[map[i]] : bf16_to_f32(b[map[i]]));
    return;
  }
  int i = 0;
  for (const typename V::F times = V::bcastf(factor); i + V::W <= k; i += V::W) {
    const auto* half = reinterpret_cast<const uint8_t*>(b + i);
    V::storef(dst + i, V::mul(f32 ? V::loadf(f + i) : V::cast(V::template sll<16>(V::load_u16(half))), times));
  }
  for (; i < k; i++) dst[i] = factor * (f32 ? f[i] : bf16_to_f32(b[i]));
  for (; i < kp; i++) dst[i] = 0.0f;
}

// What the planes of bytes.h can hold.
constexpr int kMostOf16 = 32639, kMostOf12 = 30208;

// The scale of a piece: the power of two that brings its largest magnitude into [2^14, 2^15). bf16 inputs within 2^7 of the largest
// are then exact. NaN or infinity anywhere in the piece makes the scale NaN, so that the row's answer is NaN too.
// limit: of the magnitudes; where it is kMostOf12, the scale is no power of two.
inline void piece_scale(int32_t largest_bits, int limit, float& scale, float& inverse) {
  scale = inverse = 0.0f;
  if (largest_bits >= 0x7F800000) {
    scale = __builtin_nanf("");
  } else if (largest_bits > 0) {
    int e = (largest_bits >> 23) - 127;
    e = e < -100 ? -100 : e;
    if (limit == kMostOf12) {  // every bit counts
      float most;
      __builtin_memcpy(&most, &largest_bits, 4);
      scale = most > 1e-30f ? most / limit : 0.0f;
      inverse = most > 1e-30f ? limit / most : 0.0f;
      return;
    }
    if (limit < 32767 && (largest_bits & 0x007FFFFF) > 0x007EFEFF) e++;  // 32639.5 / 2^14
    const int32_t s = (127 + e - 14) << 23, i = (127 + 14 - e) << 23;
    __builtin_memcpy(&scale, &s, 4);
    __builtin_memcpy(&inverse, &i, 4);
  }
}

// 16-bit values of one piece in the order in which the kernels multiply them: each 32-bit word holds the pair that meets one position
// of a lane of L columns. L = 8: columns (i, i + 4); 4: (i, i + 2); 2: (0, 1).
template <int L>
inline void store_pairs_of(const int32_t* q, int n, int32_t* dst) {
  for (int c = 0; c < n; c += L)
    for (int i = 0; i < L / 2; i++) dst[c / 2 + i] = (q[c + i] & 0xFFFF) | int32_t(uint32_t(q[c + i + L / 2]) << 16);
}

inline void store_pairs(const int32_t* q, int n, int per_lane, int32_t* dst) {
  if (per_lane == 8) store_pairs_of<8>(q, n, dst);
  else if (per_lane == 4) store_pairs_of<4>(q, n, dst);
  else store_pairs_of<2>(q, n, dst);
}

// Where the 64 bytes of a row in one tile lie, `tile` counted from the row's first one (tiles.h).
struct TileRow {
  uint8_t* data;
  size_t tile_bytes;
  TileRow(const Rows& rows, int row)
      : data(rows.data + rows.tile_first[row] * rows.stride + size_t(row - rows.tile_first[row]) * kVector),
        tile_bytes(size_t(rows.tile_rows[row]) * kVector) {}
  uint8_t* at(size_t tile) const { return data + tile * tile_bytes; }
};

// 16-bit values of one piece for matrix tiles: `steps` tiles of high (signed) bytes from tile `first` on, then as many of low (unsigned)
// ones.
inline void store_planes(const int32_t* q, int n, const TileRow& row, size_t first, int steps) {
  for (int s = 0; s < steps; s++) {
    uint8_t *high = row.at(first + s), *low = row.at(first + steps + s);
    const int columns = n - s * kVector < kVector ? n - s * kVector : kVector;
    for (int c = 0; c < columns; c++) high[c] = uint8_t(q[s * kVector + c] >> 8), low[c] = uint8_t(q[s * kVector + c]);
    for (int c = columns; c < kVector; c++) high[c] = low[c] = 0;
  }
}

// store(q): takes the n rounded values, of magnitude `limit` at most.
template <class V, class Store>
void quantize_piece(const float* src, int n, const Store& store, float& scale, int32_t& sum, int limit = 32767) {
  alignas(64) float v[kMaxPiece + 16];
  alignas(64) int32_t q[kMaxPiece + 16];
  alignas(64) int32_t lanes[V::W];
  __builtin_memcpy(v, src, sizeof(float) * n);
  for (int i = 0; i < 8; i++) v[n + i] = 0.0f;  // n is a multiple of 8, a vector may be 16
  typename V::I top = V::bcasti(0);
  for (int i = 0; i < n; i += V::W) top = V::maxi(top, V::andi(V::bits(V::loadf(v + i)), V::bcasti(0x7FFFFFFF)));
  V::storei(lanes, top);
  int32_t largest = 0;
  for (int i = 0; i < V::W; i++) largest = lanes[i] > largest ? lanes[i] : largest;
  float inverse;
  piece_scale(largest, limit, scale, inverse);
  // Adding 1.5 * 2^23 rounds to the nearest integer (ties to even) and leaves it in the low bits.
  const typename V::F inv = V::bcastf(inverse), magic = V::bcastf(12582912.0f), most = V::bcastf(float(limit));
  const typename V::I magic_bits = V::bcasti(-0x4B400000);
  typename V::I total = V::bcasti(0);
  for (int i = 0; i < n; i += V::W) {
    const typename V::F scaled = V::min(V::mul(V::loadf(v + i), inv), most);
    const typename V::I r = V::addi(V::bits(V::add(scaled, magic)), magic_bits);
    total = V::addi(total, r);
    V::storei(q + i, r);
  }
  if (largest >= 0x7F800000) {
    for (int i = 0; i < n; i++) q[i] = 0;
    total = V::bcasti(0);
  }
  V::storei(lanes, total);
  sum = 0;
  for (int i = 0; i < V::W; i++) sum += lanes[i];
  store(q);
}

template <class V>
void bf16_piece(const float* src, int n, int per_lane, int32_t* dst, float& sum) {
  alignas(64) float v[kMaxPiece + 16], totals[V::W];
  alignas(64) int32_t q[kMaxPiece + 16], lanes[V::W];
  __builtin_memcpy(v, src, sizeof(float) * n);
  for (int i = 0; i < 8; i++) v[n + i] = 0.0f;  // n is a multiple of 8, a vector may be 16
  typename V::I top = V::bcasti(0);
  typename V::F total = V::bcastf(0.0f);
  for (int i = 0; i < n; i += V::W) {  // to nearest, ties to even
    const typename V::I bits = V::bits(V::loadf(v + i)), odd = V::andi(V::template srl<16>(bits), V::bcasti(1));
    const typename V::I rounded = V::template srl<16>(V::addi(V::addi(bits, V::bcasti(0x7FFF)), odd));
    top = V::maxi(top, V::andi(bits, V::bcasti(0x7FFFFFFF)));
    total = V::add(total, V::cast(V::template sll<16>(rounded)));
    V::storei(q + i, rounded);
  }
  V::storei(lanes, top);
  V::storef(totals, total);
  sum = 0.0f;
  bool numbers = true;
  for (int i = 0; i < V::W; i++) sum += totals[i], numbers &= lanes[i] <= 0x7F800000;
  if (!numbers)  // the carry may have made something else of a NaN
    for (int i = 0; i < n; i++) q[i] = f32_to_bf16(src[i]);
  store_pairs(q, n, per_lane, dst);
}

// bf16 values of one piece as `steps` tiles of 32 columns.
template <class V>
void bf16_tiles(const float* src, int n, int per_lane, const TileRow& row, size_t first, int steps, float& sum) {
  alignas(64) int32_t pairs[kMaxPiece];
  bf16_piece<V>(src, n, per_lane, pairs, sum);
  for (int i = n / 2; i < steps * 16; i++) pairs[i] = 0;
  for (int s = 0; s < steps; s++) __builtin_memcpy(row.at(first + s), pairs + s * 16, kVector);
}

// Bits of the largest magnitude of n numbers (a multiple of 8). NaN and infinity are the largest.
template <class V>
int32_t largest_bits_of(const float* src, int n) {
  alignas(64) int32_t lanes[V::W];
  typename V::I top = V::bcasti(0);
  int i = 0;
  for (; i + V::W <= n; i += V::W) top = V::maxi(top, V::andi(V::bits(V::loadf(src + i)), V::bcasti(0x7FFFFFFF)));
  V::storei(lanes, top);
  int32_t largest = 0;
  for (int l = 0; l < V::W; l++) largest = lanes[l] > largest ? lanes[l] : largest;
  for (; i < n; i++) {
    int32_t bits;
    __builtin_memcpy(&bits, src + i, 4);
    bits &= 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// 8-bit values of one piece: the scale of a part of 16 columns is its largest magnitude over 127, or that of the row, whose bits `of_row`
// are then (-1: of the part). A word holds columns (0, 2, 4, 6) of 8, the next one (1, 3, 5, 7): the low and the high nibbles of a lane.
// sum: of the rounded values times their scales.
template <class V>
void int8_piece(const float* src, int n, int32_t of_row, int32_t* dst, float* scales, float& sum) {
  alignas(64) float v[kMaxPiece + kPart];
  alignas(64) int32_t q[kMaxPiece + kPart], lanes[V::W];
  __builtin_memcpy(v, src, sizeof(float) * n);
  for (int i = 0; i < 8; i++) v[n + i] = 0.0f;  // n is a multiple of 8, a part has 16
  const typename V::F magic = V::bcastf(12582912.0f);  // rounds, see quantize_piece
  sum = 0.0f;
  for (int at = 0; at < n; at += kPart, scales++) {
    typename V::I top = V::bcasti(0), total = V::bcasti(0);
    for (int i = at; i < at + kPart; i += V::W) top = V::maxi(top, V::andi(V::bits(V::loadf(v + i)), V::bcasti(0x7FFFFFFF)));
    V::storei(lanes, top);
    int32_t largest = 0, count = 0;
    for (int i = 0; i < V::W; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    if (of_row >= 0) largest = of_row;
    float most;
    __builtin_memcpy(&most, &largest, 4);
    const bool finite = largest < 0x7F800000;
    const typename V::F inverse = V::bcastf(finite && most > 1e-30f ? 127.0f / most : 0.0f);
    for (int i = at; i < at + kPart; i += V::W) {
      typename V::I r = V::addi(V::bits(V::add(V::mul(V::loadf(v + i), inverse), magic)), V::bcasti(-0x4B400000));
      if (!finite) r = V::bcasti(0);
      total = V::addi(total, r);
      V::storei(q + i, r);
    }
    V::storei(lanes, total);
    for (int i = 0; i < V::W; i++) count += lanes[i];
    *scales = finite ? most / 127.0f : __builtin_nanf("");
    sum += *scales * float(count);
  }
  for (int c = 0; c < n; c += 8)
    for (int half = 0; half < 2; half++) {
      uint32_t word = 0;
      for (int b = 0; b < 4; b++) word |= uint32_t(q[c + 2 * b + half] & 0xFF) << (8 * b);
      dst[c / 4 + half] = int32_t(word);
    }
}

// The planes of bytes of one piece (bytes.h). e2m1: 16 bits, four words of 8 columns.
inline void store_bytes(const int32_t* q, int n, int32_t* dst) {
  for (int c = 0; c < n; c += 8, dst += 4)
    for (int odd = 0; odd < 2; odd++) {
      uint32_t high = 0, low = 0;
      for (int b = 0; b < 4; b++) {
        const int32_t v = q[c + 2 * b + odd];
        high |= (uint32_t(v + 128) >> 8 & 0xFF) << 8 * b;
        low |= (uint32_t(v) & 0xFF) << 8 * b;
      }
      dst[odd] = int32_t(high), dst[2 + odd] = int32_t(low);
    }
}

// int4: 12 bits of a piece, 8 columns at a time. Returns the sum of the values as they are stored.
inline int32_t store_three(const int32_t* q, int n, int32_t* dst) {
  int32_t sum = 0;
  for (int c = 0; c < n; c += 8, dst += 3) {
    uint32_t words[3] = {};
    for (int i = 0; i < 4; i++) {
      const int32_t x = q[c + 2 * i], y = (q[c + 2 * i + 1] + 8) >> 4;  // in sixteenths
      const int32_t near = y + ((x - y + 8) & ~15), z = int8_t(near), a = (near - z) >> 8, b = (y - z) >> 4;
      sum += near + 16 * y;
      words[0] |= (uint32_t(a) & 0xFF) << 8 * i;
      words[1] |= (uint32_t(b) & 0xFF) << 8 * i;
      words[2] |= (uint32_t(z) & 0xFF) << 8 * i;
    }
    for (int w = 0; w < 3; w++) dst[w] = int32_t(words[w]);
  }
  return sum;
}

// The same, 32 columns at a time where there are so many.
template <class V>
int32_t store_many_threes(const int32_t* q, int n, int32_t* dst) {
  using I = typename V::I;
  constexpr int kColumns = 32;
  const I eight = V::bcasti(8);
  I total = V::bcasti(0);
  int at = 0;
  for (; at + kColumns <= n; at += kColumns, dst += 12) {
    alignas(16) int32_t words[3][4];
    I x, y;
    V::even_and_odd(q + at, x, y);
    y = V::template sra<4>(V::addi(y, eight));
    const I near = V::addi(y, V::andi(V::addi(V::subi(x, y), eight), V::bcasti(~15)));
    const I z = V::template sra<24>(V::template sll<24>(near));
    total = V::addi(total, V::addi(near, V::template sll<4>(y)));
    V::store_low_bytes(words[0], V::template sra<8>(V::subi(near, z)));
    V::store_low_bytes(words[1], V::template sra<4>(V::subi(y, z)));
    V::store_low_bytes(words[2], z);
    for (int c = 0; c < 4; c++)
      for (int w = 0; w < 3; w++) dst[3 * c + w] = words[w][c];
  }
  alignas(64) int32_t lanes[V::W];
  V::storei(lanes, total);
  int32_t sum = store_three(q + at, n - at, dst);
  for (int i = 0; i < V::W; i++) sum += lanes[i];
  return sum;
}

template <class V>
void byte_piece(const Geometry& g, const float* src, int n, int32_t* dst, const Rows& rows, size_t piece) {
  const int element = g.spec.element;
  int32_t sum, three = 0;
  const auto store = [&](const int32_t* q) {
    if (element == EXPERTD_INT4) three = store_many_threes<V>(q, n, dst);
    else store_bytes(q, n, dst);
  };
  quantize_piece<V>(src, n, store, rows.scales[piece], sum, element == EXPERTD_INT4 ? kMostOf12 : kMostOf16);
  if (element == EXPERTD_INT4) sum = three;
  rows.sums[piece] = float(sum);
  rows.starts[piece] = -code_offset(element, g.spec.zeros) * sum;
}

// of_row: as in int8_piece.
template <class V>
void round_piece(Path path, const Geometry& g, const float* src, int n, int32_t of_row, int32_t* dst, const Rows& rows, size_t piece) {
  if constexpr (V::kBytes) {
    if (path == kBytes) return byte_piece<V>(g, src, n, dst, rows, piece);
  }
  if (path == kBf16) return bf16_piece<V>(src, n, g.per_lane, dst, rows.sums[piece]);
  if (path == kI8) return int8_piece<V>(src, n, of_row, dst, rows.scales + piece * parts_of(g.piece), rows.sums[piece]);
  int32_t sum;
  quantize_piece<V>(src, n, [&](const int32_t* q) { store_pairs(q, n, g.per_lane, dst); }, rows.scales[piece], sum);
  rows.sums[piece] = float(sum);
  rows.starts[piece] = -code_offset(g.spec.element, g.spec.zeros) * sum;
}

template <class V>
void round_tiled_piece(Path path, const Geometry& g, const float* src, int n, const TileRow& row, size_t in_row, const Rows& rows, size_t piece) {
  const int steps = tile_columns(path, g.piece) / (path == kBf16Tiles ? 32 : 64);
  if (path == kBf16Tiles) return bf16_tiles<V>(src, n, g.per_lane, row, in_row * steps, steps, rows.sums[piece]);
  int32_t sum;
  const auto store = [&](const int32_t* q) { store_planes(q, n, row, 2 * in_row * steps, steps); };
  quantize_piece<V>(src, n, store, rows.scales[piece], sum);
  rows.sums[piece] = float(sum);
  rows.starts[piece] = -code_offset(g.spec.element, g.spec.zeros) * sum;
}

// Bytes of 8 columns of a row that does not go through tiles.
constexpr size_t packed_bytes(Path path, int element) { return path == kI8 ? 8 : path == kBytes && element == EXPERTD_INT4 ? 12 : 16; }

template <class V>
void round_row(Path path, const Geometry& g, const float* src, const Rows& rows, int row) {
  uint8_t* dst = rows.data + size_t(row) * rows.stride;
  const size_t first = size_t(row) * rows.pieces, bytes8 = packed_bytes(path, g.spec.element);  // of 8 columns
  const int32_t of_row = path == kI8 && rows.one_scale ? largest_bits_of<V>(src, g.kp) : -1;
  size_t piece = first;
  for (int at = 0; at < g.kp; at += g.group) {
    const int end = at + g.group < g.kp ? at + g.group : g.kp;
    for (int k = at; k < end; k += g.piece, piece++) {
      const int n = k + g.piece < end ? g.piece : end - k;
      if (is_tiled(path)) round_tiled_piece<V>(path, g, src + k, n, TileRow(rows, row), piece - first, rows, piece);
      else round_piece<V>(path, g, src + k, n, of_row, reinterpret_cast<int32_t*>(dst + k / 8 * bytes8), rows, piece);
    }
  }
}

template <class V>
typename V::F exponential(typename V::F x) {  // e^x for -87 <= x <= 88 (clamped), relative error 2e-7: Taylor on [-ln2/2, ln2/2]
  using F = typename V::F;
  x = V::max(V::min(x, V::bcastf(88.0f)), V::bcastf(-87.0f));
  const F magic = V::bcastf(12582912.0f);
  const F t = V::fma(x, V::bcastf(1.44269504f), magic), n = V::sub(t, magic);
  F r = V::fma(n, V::bcastf(-0.693145752f), x);
  r = V::fma(n, V::bcastf(-1.42860677e-6f), r);
  F p = V::bcastf(1.0f / 5040);
  p = V::fma(p, r, V::bcastf(1.0f / 720));
  p = V::fma(p, r, V::bcastf(1.0f / 120));
  p = V::fma(p, r, V::bcastf(1.0f / 24));
  p = V::fma(p, r, V::bcastf(1.0f / 6));
  p = V::fma(p, r, V::bcastf(0.5f));
  p = V::fma(p, r, V::bcastf(1.0f));
  p = V::fma(p, r, V::bcastf(1.0f));
  return V::cast(V::addi(V::bits(p), V::template sll<23>(V::bits(t))));
}

template <class V>
typename V::F sigmoid_times(typename V::F g, typename V::F z) {  // g / (1 + e^-z)
  const typename V::F one = V::bcastf(1.0f);
  return V::div(g, V::add(one, exponential<V>(V::sub(V::bcastf(0.0f), z))));
}

template <class V>
typename V::F erf(typename V::F x) {  // Abramowitz and Stegun 7.1.26, absolute error 1.5e-7
  using F = typename V::F;
  const F ax = V::cast(V::andi(V::bits(x), V::bcasti(0x7FFFFFFF))), one = V::bcastf(1.0f);
  const F t = V::div(one, V::fma(V::bcastf(0.3275911f), ax, one));
  F p = V::bcastf(1.061405429f);
  p = V::fma(p, t, V::bcastf(-1.453152027f));
  p = V::fma(p, t, V::bcastf(1.421413741f));
  p = V::fma(p, t, V::bcastf(-0.284496736f));
  p = V::mul(V::fma(p, t, V::bcastf(0.254829592f)), t);
  const F y = V::sub(one, V::mul(p, exponential<V>(V::mul(V::sub(V::bcastf(0.0f), ax), ax))));
  return V::cast(V::ori(V::bits(y), V::andi(V::bits(x), V::bcasti(int32_t(0x80000000u)))));
}

template <class V>
typename V::F activated(const Activation& a, typename V::F g, typename V::F u) {
  using F = typename V::F;
  if (a.limited) {  // the value comes second: min and max pass a NaN there on
    g = V::min(V::bcastf(a.limit), g);
    u = V::max(V::bcastf(-a.limit), V::min(V::bcastf(a.limit), u));
  }
  switch (a.kind) {
    case EXPERTD_SILU: return V::mul(sigmoid_times<V>(g, g), u);
    case EXPERTD_GELU: {
      const F half = V::mul(g, V::bcastf(0.5f));
      return V::mul(V::fma(half, erf<V>(V::mul(g, V::bcastf(0.707106781f))), half), u);
    }
    case EXPERTD_GELU_TANH: {  // (1 + tanh z) / 2 = 1 / (1 + e^-2z), z = sqrt(2 / pi) * (g + 0.044715 g^3)
      const F cube = V::mul(V::mul(g, g), V::mul(g, V::bcastf(0.044715f)));
      return V::mul(sigmoid_times<V>(g, V::mul(V::bcastf(1.59576912f), V::add(g, cube))), u);
    }
    default: return V::mul(sigmoid_times<V>(g, V::mul(V::bcastf(a.alpha), g)), V::add(u, V::bcastf(a.beta)));
  }
}

template <class V>
void activate(const Activation& a, const float* tile, const float* bias, int n, bool gated, float* h, size_t stride) {
  using F = typename V::F;
  for (int m = 0; m < n; m++, tile += 2 * kRows, h += stride) {
    for (int i = 0; i < (gated ? kRows : 2 * kRows); i += V::W) {
      const F g = V::add(V::loadf(tile + i), V::loadf(bias + i));
      if (gated) {
        V::storef(h + i, activated<V>(a, g, V::add(V::loadf(tile + kRows + i), V::loadf(bias + kRows + i))));
      } else {
        const F r = V::max(V::bcastf(0.0f), g);
        V::storef(h + i, V::mul(r, r));
      }
    }
  }
}

template <class V>
void combine(const float* tile, const float* bias, float weight, int cols, float* acc) {
  const typename V::F w = V::bcastf(weight);
  for (int i = 0; i < cols; i += V::W) {
    V::storef(acc + i, V::fma(w, V::add(V::loadf(tile + i), V::loadf(bias + i)), V::loadf(acc + i)));
  }
}

template <class V>
void store_row(const float* src, int n, bool f32, void* dst) {
  if (f32) {
    __builtin_memcpy(dst, src, sizeof(float) * n);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(dst);
  for (int i = 0; i < n; i++) out[i] = f32_to_bf16(src[i]);
}

}  // namespace
}  // namespace expertd
