// A level's table of functions, made from the templates. A level_*.cpp includes its simd_*.h, then this, and defines its Level.
#pragma once
#include <chrono>

#include "kernels.h"

namespace expertd {
namespace {

inline float e4m3_to_f32(uint8_t b) {  // no infinities; 0x7F is NaN and never a scale
  const int e = (b >> 3) & 15, m = b & 7;
  const float magnitude = e ? float(8 + m) * (e >= 10 ? float(1 << (e - 10)) : 1.0f / float(1 << (10 - e))) : float(m) / 512.0f;
  return b & 0x80 ? -magnitude : magnitude;
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t bits = uint32_t(h & 0x7FFF) << 13;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  return h & 0x8000 ? -f : f;
}

inline float e8m0_to_f32(uint8_t b) {
  const uint32_t bits = b ? uint32_t(b) << 23 : 0x00400000u;  // 2^-127 is subnormal
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

template <int TYPE>
inline float scale_at(const uint8_t* p, int i) {
  if constexpr (TYPE == EXPERTD_SCALE_F32) {
    float f;
    __builtin_memcpy(&f, p + 4 * i, 4);
    return f;
  } else if constexpr (TYPE == EXPERTD_SCALE_E8M0) {
    return e8m0_to_f32(p[i]);
  } else if constexpr (TYPE == EXPERTD_SCALE_E4M3) {
    return e4m3_to_f32(p[i]);
  } else {
    uint16_t h;
    __builtin_memcpy(&h, p + 2 * i, 2);
    return TYPE == EXPERTD_SCALE_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
  }
}

template <int TYPE>
void expand_scales(const Geometry& g, const uint8_t* p, float factor, float global, float* scales) {
  if (g.lanes == kRows) {
    for (int i = 0; i < g.groups * kRows; i++) scales[i] = scale_at<TYPE>(p, i) * global * factor;
    return;
  }
  for (int i = 0; i < g.groups; i++) {
    const float s = scale_at<TYPE>(p, i) * global * factor;
    for (int r = 0; r < kRows; r++) scales[i * kRows + r] = s;
  }
}

template <class V>
void prepare(const Geometry& g, const uint8_t* block, float global, float* scales, float* minus_zeros) {
  const int element = g.spec.element, n = g.groups * kRows;
  const float factor = element == EXPERTD_E2M1 ? 0.5f : input_factor(element);
  switch (g.spec.scale_type) {
    case EXPERTD_SCALE_NONE:
      for (int i = 0; i < n; i++) scales[i] = factor;
      break;
    case EXPERTD_SCALE_F32: expand_scales<EXPERTD_SCALE_F32>(g, block, factor, global, scales); break;
    case EXPERTD_SCALE_F16: expand_scales<EXPERTD_SCALE_F16>(g, block, factor, global, scales); break;
    case EXPERTD_SCALE_BF16: expand_scales<EXPERTD_SCALE_BF16>(g, block, factor, global, scales); break;
    case EXPERTD_SCALE_E8M0: expand_scales<EXPERTD_SCALE_E8M0>(g, block, factor, global, scales); break;
    default: expand_scales<EXPERTD_SCALE_E4M3>(g, block, factor, global, scales); break;
  }
  if (!g.spec.zeros) return;
  const uint8_t* z = block + size_t(g.groups) * g.lanes * g.scale_bytes;
  const bool is_signed = element == EXPERTD_INT8;
  for (int i = 0; i < n; i++) {
    const uint8_t code = z[g.lanes == kRows ? i : i / kRows];
    minus_zeros[i] = is_signed ? -float(int8_t(code)) : -float(code);
  }
}

using TileFunction = void (*)(const BlockArgs&, int block, const int32_t* index, float* out);

// The tile function for NB blocks and `rows` rows of activations (1..MOST).
template <class V, int EL, bool F32, int NB, int MOST>
TileFunction tile_of(int rows) {
  if constexpr (MOST == 1) {
    if constexpr (F32) return tile_f32<V, EL, NB, 1>;
    else return tile_i16<V, EL, NB, 1>;
  } else {
    if (rows < MOST) return tile_of<V, EL, F32, NB, MOST - 1>(rows);
    if constexpr (F32) return tile_f32<V, EL, NB, MOST>;
    else return tile_i16<V, EL, NB, MOST>;
  }
}

// Rows in tiles of nearly equal height, at most `most` each.
template <class Tile>
void for_tiles(int n, int most, const Tile& tile) {
  const int tiles = (n + most - 1) / most;
  for (int t = 0; t < tiles; t++) {
    const int from = int(int64_t(n) * t / tiles), to = int(int64_t(n) * (t + 1) / tiles);
    tile(from, to - from);
  }
}

template <class V, int EL, bool F32>
void gemm_element(const BlockArgs& a) {
  if (a.nb == 2 && (a.n <= V::kTile2 || V::kTile2 == V::kTile1)) {
    for_tiles(a.n, V::kTile2, [&](int from, int rows) {
      tile_of<V, EL, F32, 2, V::kTile2>(rows)(a, 0, a.index + from, a.out + from * 2 * kRows);
    });
    return;
  }
  for (int b = 0; b < a.nb; b++) {
    for_tiles(a.n, V::kTile1, [&](int from, int rows) {
      tile_of<V, EL, F32, 1, V::kTile1>(rows)(a, b, a.index + from, a.out + from * 2 * kRows + b * kRows);
    });
  }
}

template <class V>
void gemm_i16(const BlockArgs& a) {
  switch (a.g->spec.element) {
    case EXPERTD_INT4: return gemm_element<V, EXPERTD_INT4, false>(a);
    case EXPERTD_INT8: return gemm_element<V, EXPERTD_INT8, false>(a);
    default: return gemm_element<V, EXPERTD_E2M1, false>(a);
  }
}

template <class V>
void gemm_f32(const BlockArgs& a) {
  switch (a.g->spec.element) {
    case EXPERTD_INT4: return gemm_element<V, EXPERTD_INT4, true>(a);
    case EXPERTD_INT8: return gemm_element<V, EXPERTD_INT8, true>(a);
    case EXPERTD_E4M3: return gemm_element<V, EXPERTD_E4M3, true>(a);
    case EXPERTD_E2M1: return gemm_element<V, EXPERTD_E2M1, true>(a);
    case EXPERTD_BF16: return gemm_element<V, EXPERTD_BF16, true>(a);
    case EXPERTD_F16: return gemm_element<V, EXPERTD_F16, true>(a);
    default: return gemm_element<V, EXPERTD_F32, true>(a);
  }
}

template <class V, class T>
inline void keep(T& value) {  // the compiler must have the value here, and may assume nothing about it afterwards
  if constexpr (sizeof value > 2 * sizeof(void*) && !V::kRegister) {
    asm volatile("" : "+m"(value));
  } else {
    asm volatile("" : "+x"(value));
  }
}

// Operations a second of `step`, which does `operations` of them, on this core.
template <class Step>
double rate(double seconds, double operations, const Step& step) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double elapsed = 0, done = 0;
  do {
    for (int i = 0; i < 2000; i++) step();
    done += 2000 * operations;
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  } while (elapsed < seconds);
  return done / elapsed;
}

template <class V>
double peak(int compute, double seconds) {
  constexpr int N = 8;
  if (compute == EXPERTD_COMPUTE_F32) {
    typename V::F acc[N], x = V::bcastf(1e-6f), y = V::bcastf(0.5f);
    for (auto& v : acc) v = x;
    return rate(seconds, 16.0 * N * V::W * 2, [&] {
      for (int r = 0; r < 16; r++)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
          acc[i] = V::fma(x, y, acc[i]);
          keep<V>(acc[i]);
        }
    });
  }
  typename V::I acc[N], x = V::bcasti(3), y = V::bcasti(5);
  for (auto& v : acc) v = x;
  return rate(seconds, 16.0 * N * V::W * 4, [&] {
    for (int r = 0; r < 16; r++)
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        keep<V>(x);
        acc[i] = V::dot16(acc[i], x, y);
        keep<V>(acc[i]);
      }
  });
}

// Four streams side by side: what the memory gives one core at best, or nearly.
template <class V>
uint64_t read_all(const uint8_t* data, size_t bytes) {
  constexpr int S = 4;
  const size_t part = bytes / S / kVector * kVector;
  typename V::I acc[S];
  for (auto& v : acc) v = V::bcasti(0);
  for (size_t at = 0; at < part; at += kVector)
#pragma GCC unroll 4
    for (int s = 0; s < S; s++)
      for (int i = 0; i < kVector; i += V::W * 4) acc[s] = V::addi(acc[s], V::loadi(data + s * part + at + i));
  int32_t lanes[V::W];
  V::storei(lanes, V::addi(V::addi(acc[0], acc[1]), V::addi(acc[2], acc[3])));
  uint64_t sum = 0;
  for (int i = 0; i < V::W; i++) sum += uint32_t(lanes[i]);
  return sum;
}

template <class V>
constexpr Level level(const char* name, bool (*runs)()) {
  return Level{name,        runs,        load_row<V>, quantize_row<V>, prepare<V>, gemm_i16<V>,
               gemm_f32<V>, activate<V>, combine<V>,  store_row<V>,    peak<V>,    read_all<V>};
}

}  // namespace
}  // namespace expertd
