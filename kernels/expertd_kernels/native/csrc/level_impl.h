// A level's table of functions, made from the templates. A level_*.cpp includes its simd_*.h, then this, and defines its Level.
#pragma once
#include <chrono>

#include "bytes.h"
#include "int8.h"
#include "panels.h"

namespace expertd {
namespace {

using TileFunction = void (*)(const BlockArgs&, const Slice&, const int32_t* index, float* out);

template <class V, int EL, Path P, int NB, int MR, int RAW = -1, bool INVARIANT = false>
constexpr TileFunction tile() {
  if constexpr (P == kF32) return tile_f32<V, EL, NB, MR, INVARIANT ? 1 : chains<V, EL, true>(NB, MR)>;
  else if constexpr (P == kBf16) return tile_bf16<V, EL, NB, MR, INVARIANT ? 1 : chains<V, EL, false>(NB, MR)>;
  else if constexpr (P == kBytes) return tile_bytes<V, EL, NB, MR, RAW, true>;
  else if constexpr (P == kI8) return tile_i8<V, NB, MR, RAW>;
  else if constexpr (MR == 1 && EL == EXPERTD_INT4) return tile_row_i16<V, EL, NB, RAW>;
  else return tile_i16<V, EL, NB, MR, RAW>;
}

// The tile function for NB blocks and `rows` rows of activations (1..MOST).
template <class V, int EL, Path P, int NB, int MOST, bool INVARIANT>
TileFunction tile_of(int rows) {
  if constexpr (MOST > 1) {
    if (rows < MOST) return tile_of<V, EL, P, NB, MOST - 1, INVARIANT>(rows);
  }
  return tile<V, EL, P, NB, MOST, -1, INVARIANT>();
}

// int4 as bytes where nothing is fetched: one row.
template <class V, int EL, Path P, int NB>
constexpr TileFunction tile_unfetched() {
  if constexpr (P == kBytes && EL == EXPERTD_INT4) return tile_bytes<V, EL, NB, 1, -1, false>;
  else return nullptr;
}

// All rows of a slice, in tiles of nearly equal height, at most MOST each.
template <class V, int EL, Path P, int NB, int MOST>
void tiles(const BlockArgs& a, const Slice& s) {
  const int count = (a.n + MOST - 1) / MOST;
  for (int t = 0; t < count; t++) {
    const int from = int(int64_t(a.n) * t / count), to = int(int64_t(a.n) * (t + 1) / count);
    constexpr TileFunction kUnfetched = tile_unfetched<V, EL, P, NB>();
    const auto of = a.invariant ? tile_of<V, EL, P, NB, MOST, true> : tile_of<V, EL, P, NB, MOST, false>;
    const TileFunction f = kUnfetched && a.n == 1 && !a.ahead ? kUnfetched : of(to - from);
    f(a, s, a.index + from, a.out + from * 2 * kRows + s.block * kRows);
  }
}

// Rows of a tile over one block.
template <class V, Path P>
constexpr int tile1_rows() {
  return P == kF32 ? V::kTile1F : P == kBytes ? kMostBytes - 1 : V::kTile1;
}

// Rows of a tile over two blocks; 0 = one block at a time. e2m1 takes many registers to decode: two blocks at once only for one row,
// where vectors are 8 wide. Integral codes as f32 are for exactness, not for speed: fewer tiles to compile.
template <class V, int EL, Path P>
constexpr int tile2_rows() {
  if (P == kF32) return is_integral(EL) ? 0 : V::kTile2F;
  if (P == kBytes) return kMostBytes;
  return P == kI16 && EL == EXPERTD_E2M1 && V::W == 8 ? 1 : V::kTile2;
}

// Rows from which on codes are decoded once into the cache instead of once a tile; 0 = never. Decoding integers hides behind
// the multiply-adds (docs/log/cpu-zen3.md).
template <class V, int EL, Path P>
constexpr int panel_rows() {
  return P == kBf16 && EL != EXPERTD_BF16 ? V::kTile2 + 1 : 0;
}

// NB blocks, many rows: some pieces at a time are decoded into the first-level cache and meet all rows there.
template <class V, int EL, Path P, int NB>
void gemm_panel(const BlockArgs& a, int block) {
  constexpr int kColumns = 2 * kMaxPiece;
  constexpr size_t kPanelBytes = kColumns * 2 * kRows;
  alignas(64) uint8_t panel[NB * kPanelBytes];
  const Geometry& g = *a.g;
  const size_t step = a.nb * kVector;
  const uint8_t* codes = a.pair + a.nb * g.header_bytes + block * kVector;
  Slice s{block, 0, 0, 0, 0, panel, kPanelBytes, kVector};
  const auto flush = [&](int next_piece, int next_group) {
    unpack_bf16<V, EL, NB>(codes, step, s.to - s.from, g.spec.zeros, panel, kPanelBytes);
    codes += size_t(s.to - s.from) / g.per_lane * step;
    tiles<V, kPanel, P, NB, NB == 2 ? V::kTile2 : V::kTile1>(a, s);
    s.from = s.to;
    s.piece = next_piece;
    s.group = next_group;
  };
  const Slice all{block, 0, g.kp, 0, 0, nullptr, 0, 0};
  for_pieces(g, all, [&](int k, int columns, int group, int piece) {
    if (k + columns - s.from > kColumns) flush(piece, group);
    s.to = k + columns;
  });
  flush(0, 0);
}

// The type of scales that a single row takes as they are stored; -1 = none. Where nothing is fetched (int4 as bytes) headers are read
// first, in order.
template <int EL, Path P>
constexpr int raw_scales() {
  if ((P != kI16 && P != kI8 && P != kBytes) || (P == kBytes && EL == EXPERTD_INT4)) return -1;
  return EL == EXPERTD_INT4 ? EXPERTD_SCALE_BF16 : EL == EXPERTD_E2M1 ? EXPERTD_SCALE_E8M0 : -1;
}

// One row, scales as stored.
template <class V, int EL, Path P, int RAW>
void gemm_row(const BlockArgs& a) {
  const Geometry& g = *a.g;
  const Slice s{0, 0, g.kp, 0, 0, a.pair + a.nb * g.header_bytes, kVector, size_t(a.nb) * kVector};
  return (a.nb == 2 ? tile<V, EL, P, 2, 1, RAW>() : tile<V, EL, P, 1, 1, RAW>())(a, s, a.index, a.out);
}

template <class V, int EL, Path P>
void gemm_element(const BlockArgs& a) {
  constexpr int kRaw = raw_scales<EL, P>();
  if constexpr (kRaw >= 0) {
    const expertd_spec& s = a.g->spec;
    if (a.n == 1 && s.scale_type == kRaw && a.g->lanes == kRows && !s.zeros && !s.global_scale) return gemm_row<V, EL, P, kRaw>(a);
  }
  prepare_all<V>(a);
  constexpr int kTile2 = tile2_rows<V, EL, P>();
  constexpr int kTile1 = tile1_rows<V, P>();
  constexpr bool kPair = kTile2 > kTile1;  // two blocks make the better tile for any number of rows
  const Geometry& g = *a.g;
  const uint8_t* codes = a.pair + a.nb * g.header_bytes;
  if constexpr (panel_rows<V, EL, P>() > 0) {
    if (a.n >= panel_rows<V, EL, P>()) {
      if (kPair && a.nb == 2) return gemm_panel<V, EL, P, kPair ? 2 : 1>(a, 0);
      for (int b = 0; b < a.nb; b++) gemm_panel<V, EL, P, 1>(a, b);
      return;
    }
  }
  if constexpr (kTile2 > 0) {
    if (a.nb == 2 && (a.n <= kTile2 || kPair)) {
      return tiles<V, EL, P, 2, kTile2>(a, Slice{0, 0, g.kp, 0, 0, codes, kVector, 2 * kVector});
    }
  }
  for (int b = 0; b < a.nb; b++) tiles<V, EL, P, 1, kTile1>(a, Slice{b, 0, g.kp, 0, 0, codes + b * kVector, 0, size_t(a.nb) * kVector});
}

template <class V>
void gemm_pair(Path path, const BlockArgs& a) {
  const int element = a.g->spec.element;
  if (path == kI8) return gemm_element<V, EXPERTD_INT4, kI8>(a);
  if (path == kI16) {
    if (element == EXPERTD_INT8) return gemm_element<V, EXPERTD_INT8, kI16>(a);
    return element == EXPERTD_INT4 ? gemm_element<V, EXPERTD_INT4, kI16>(a) : gemm_element<V, EXPERTD_E2M1, kI16>(a);
  }
  if constexpr (V::kBytes) {
    if (path == kBytes) {
      return element == EXPERTD_INT4 ? gemm_element<V, EXPERTD_INT4, kBytes>(a) : gemm_element<V, EXPERTD_E2M1, kBytes>(a);
    }
  }
  if constexpr (V::kBf16) {
    if (path == kBf16) {
      switch (element) {
        case EXPERTD_INT4: return gemm_element<V, EXPERTD_INT4, kBf16>(a);
        case EXPERTD_E2M1: return gemm_element<V, EXPERTD_E2M1, kBf16>(a);
        case EXPERTD_E4M3: return gemm_element<V, EXPERTD_E4M3, kBf16>(a);
        default: return gemm_element<V, EXPERTD_BF16, kBf16>(a);
      }
    }
  }
  switch (element) {
    case EXPERTD_INT4: return gemm_element<V, EXPERTD_INT4, kF32>(a);
    case EXPERTD_INT8: return gemm_element<V, EXPERTD_INT8, kF32>(a);
    case EXPERTD_E4M3: return a.normal ? gemm_element<V, kNormalE4M3, kF32>(a) : gemm_element<V, EXPERTD_E4M3, kF32>(a);
    case EXPERTD_E2M1: return gemm_element<V, EXPERTD_E2M1, kF32>(a);
    case EXPERTD_BF16: return gemm_element<V, EXPERTD_BF16, kF32>(a);
    case EXPERTD_F16: return a.normal ? gemm_element<V, kNormalF16, kF32>(a) : gemm_element<V, EXPERTD_F16, kF32>(a);
    default: return gemm_element<V, EXPERTD_F32, kF32>(a);
  }
}

template <class V>
void gemm(Path path, const BlockRun& run) {
  for_pairs(run, [path](const BlockArgs& a) { gemm_pair<V>(path, a); });
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
    for (int i = 0; i < 500; i++) step();
    done += 500 * operations;
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  } while (elapsed < seconds);
  return done / elapsed;
}

// Products of whole tiles into four sums. 16-bit activations are two planes of bytes: half of the rate of bytes.
template <class T>
double tile_peak(int kind, double seconds) {
  T::configure(kTileRows);
  const double each = 2.0 * kTileRows * kRows * (kind == EXPERTD_PEAK_BF16 ? 32 : 64);
  const double done = rate(seconds, 4 * each, [&] {
    for_each_index<4>([&](auto c) {
      if (kind == EXPERTD_PEAK_BF16) T::template dot_bf16<decltype(c)::value, 4, 6>();
      else T::template dot_su<decltype(c)::value, 4, 6>();
    });
  });
  T::release();
  return kind == EXPERTD_PEAK_INT16 ? done / 2 : done;
}

// `dot(acc, a, b)` on ten independent sums, `operations` of them in one. Sums by name: an array would not be kept in registers.
template <class V, class T, class Dot>
double dot_rate(double seconds, double operations, T start, typename V::I a, typename V::I b, const Dot& dot) {
  constexpr int kRounds = 64;
  const auto next = [&](T& acc, typename V::I& x) {
    keep<V>(x);  // or the product would be computed once for all
    acc = dot(acc, x, b);
    keep<V>(acc);
  };
  return rate(seconds, kRounds * 10 * operations, [&] {
    T s0 = start, s1 = start, s2 = start, s3 = start, s4 = start, s5 = start, s6 = start, s7 = start, s8 = start, s9 = start;
    typename V::I x = a;
    for (int r = 0; r < kRounds; r++) {
      next(s0, x), next(s1, x), next(s2, x), next(s3, x), next(s4, x);
      next(s5, x), next(s6, x), next(s7, x), next(s8, x), next(s9, x);
    }
  });
}

template <class V>
double peak(int kind, double seconds) {
  using I = typename V::I;
  using F = typename V::F;
  const I ones = V::bcasti(0x01010101), half = V::bits(V::bcastf(0.5f)), tiny = V::bits(V::bcastf(1e-6f));
  if constexpr (V::kBf16) {
    if (kind == EXPERTD_PEAK_BF16) {
      return dot_rate<V>(seconds, V::W * 4, V::bcastf(0.0f), half, tiny, [](F acc, I a, I b) { return V::dot_bf16(acc, a, b); });
    }
  }
  switch (kind) {
    case EXPERTD_PEAK_INT8: return dot_rate<V>(seconds, V::W * 8, V::bcasti(0), ones, ones, [](I acc, I a, I b) { return V::dot8(acc, a, b); });
    case EXPERTD_PEAK_INT16: return dot_rate<V>(seconds, V::W * 4, V::bcasti(0), ones, ones, [](I acc, I a, I b) { return V::dot16(acc, a, b); });
    default: return dot_rate<V>(seconds, V::W * 2, V::bcastf(0.0f), half, tiny, [](F acc, I a, I b) { return V::fma(V::cast(a), V::cast(b), acc); });
  }
}

// Front to back, or four parts side by side: what the memory gives one core at best is the one on some processors, the other on others.
template <class V>
uint64_t read_all(const uint8_t* data, size_t bytes, bool side_by_side) {
  constexpr int S = 4;
  const size_t steps = bytes / (S * kVector), apart = side_by_side ? steps * kVector : kVector, step = side_by_side ? kVector : S * kVector;
  typename V::I acc[S];
  for (auto& v : acc) v = V::bcasti(0);
  const auto add = [&](int s, const uint8_t* from) {
    for (int i = 0; i < kVector; i += V::W * 4) acc[s] = V::addi(acc[s], V::loadi(from + i));
  };
  for (size_t n = 0; n < steps; n++)
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) add(s, data + n * step + s * apart);
  for (size_t at = steps * S * kVector; at + kVector <= bytes; at += kVector) add(0, data + at);
  int32_t lanes[V::W];
  V::storei(lanes, V::addi(V::addi(acc[0], acc[1]), V::addi(acc[2], acc[3])));
  uint64_t sum = 0;
  for (int i = 0; i < V::W; i++) sum += uint32_t(lanes[i]);
  return sum;
}

template <class V>
constexpr Level level(const char* name, Path integers, bool use_bf16, bool (*runs)(), bool fetch_rows = false) {
  return Level{name, integers, integers, V::kBytes ? kBytes : kI16, fetch_rows, use_bf16, V::kAhead,   0,            runs,    load_row<V>, round_row<V>,
               gemm<V>,    activate<V>, combine<V>, store_row<V>, peak<V>, read_all<V>};
}

template <class V, class T>
void gemm_with_tiles(Path path, const BlockRun& run) {
  if (!is_tiled(path)) return gemm<V>(path, run);
  if (path == kBf16Tiles) return gemm_panels<V, T>(run);
  for_pairs(run, gemm_tiles<V, T>);
}

template <class V, class T>
double peak_with_tiles(int kind, double seconds) {
  return kind == EXPERTD_PEAK_F32 ? peak<V>(kind, seconds) : tile_peak<T>(kind, seconds);
}

// As level(), with matrix tiles T (simd_amx.h) for experts that have `rows` rows or more in the mean.
template <class V, class T>
constexpr Level level_with_tiles(const char* name, int rows, bool (*runs)()) {
  Level made = level<V>(name, kI16, false, runs, true);
  made.int4 = kBytes;  // below `rows` rows; measured, docs/log/cpu-xeon.md
  made.tile_rows = rows;
  made.gemm = gemm_with_tiles<V, T>;
  made.peak = peak_with_tiles<V, T>;
  return made;
}

}  // namespace
}  // namespace expertd
