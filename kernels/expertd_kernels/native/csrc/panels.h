// Many rows of bf16 numbers on matrix tiles: a panel, at most kPanelSteps tiles of 32 columns of a pair of blocks, is decoded into bf16
// numbers in the first-level cache and meets all rows there. Codes are exact as bf16: only activations are rounded. What becomes of
// scales:
//
//   summed   powers of two (e8m0 with e2m1) are added to the exponents of the codes, and bf16 has none: the sums of all columns stay in
//            tiles, which lie in the cache between panels where there are more than two tiles of rows, and are copied into `out` at the end.
//   scaled   else the sums of a piece and two tiles of rows are scaled and added to `out` after the next products. (Codes times their
//            scales, rounded to bf16, err by half as much again: docs/log/cpu-xeon.md.)
#pragma once
#include "panel_codes.h"

namespace expertd {
namespace {

constexpr int kPanelSteps = kMaxPiece / 32;
constexpr size_t kPanelBytes = kPanelSteps * kTileBytes;                   // of a block
constexpr int kSumTiles = 2 * ((kSlice / kTileRows + 1) / 2 * 2);          // of a pair: a lone tile of rows has two sums of each block

struct Panel {
  TilePiece pieces[kPanelSteps];
  int count, steps;
};

// use(panel, its tiles of weights, what is to be fetched meanwhile) for each panel of NB blocks, pieces of `most` columns.
template <class V, class Codes, int NB, class Use>
inline void for_panels(const BlockArgs& a, int most, bool across, const Use& use) {
  alignas(64) uint8_t tiles[NB * kPanelBytes];
  const int steps = tile_steps(kBf16Tiles, most), fit = kPanelSteps / steps;
  TilePieces row{*a.g, most, across};
  Codes codes(a);
  const uint8_t* from = a.pair + a.nb * a.g->header_bytes;
  for (Panel panel; (panel.count = row.take(panel.pieces, fit));) {
    panel.steps = 0;
    for (int i = 0; i < panel.count; i++) panel.steps += tile_steps(kBf16Tiles, panel.pieces[i].columns);
    const uint8_t* codes_of = from;
    from = decode_pieces<V, Codes, NB>(codes, from, panel.pieces, panel.count, tiles, steps * kTileBytes, kPanelBytes);
    const int all = tiles_of(a.n);
    Ahead<V> ahead(codes_of + a.ahead, from + a.ahead, std::max(1, all / 2 * panel.steps + all % 2 * (panel.steps / 2)));
    use(panel, tiles, ahead);
  }
}

struct PanelSource {
  const uint8_t *x, *w;
  size_t x_step, w_step;
  uint8_t* sums;  // [block] tiles
};

// Tile `t` of the rows from its tile `from` of columns on.
inline PanelSource source_of(const BlockArgs& a, int t, int from, const uint8_t* w, uint8_t* sums) {
  const int begin = tile_begin(a.n, t);
  const size_t step = size_t(tile_begin(a.n, t + 1) - begin) * kVector;
  return {a.rows->data + size_t(a.index[0] + begin) * a.rows->stride + from * step, w, step, kTileBytes, sums};
}

// Where the sums of products begin and end: at zero, in memory, or in tiles, as the products before left them.
enum class Begin { kZero, kMemory, kTiles };
enum class End { kMemory, kTiles };

// Products of some steps, NB blocks, and NA sources: two tiles of rows that meet the same weights (SAME), or two parts of the columns of
// one. ahead: is fetched after each step.
template <class T, int NA, int NB, bool SAME, class Fetch>
inline void multiply_panel(const PanelSource* sources, int steps, Begin begin, End end, Fetch& ahead) {
  const uint8_t *x[NA], *w[NA];
  for_each_index<NA>([&](auto a) {
    constexpr int i = decltype(a)::value;
    x[i] = sources[i].x, w[i] = sources[i].w;
    if (begin == Begin::kZero) {
      T::template zero<2 * i>();
      if constexpr (NB == 2) T::template zero<2 * i + 1>();
    } else if (begin == Begin::kMemory) {
      T::template load<2 * i>(sources[i].sums, kVector);
      if constexpr (NB == 2) T::template load<2 * i + 1>(sources[i].sums + kTileBytes, kVector);
    }
  });
  for (int s = 0; s < steps; s++) {
    for_each_index<NA>([&](auto a) {
      constexpr int i = decltype(a)::value;
      if constexpr (i == 0 || !SAME) {
        T::template load<6>(w[i], kVector);
        if constexpr (NB == 2) T::template load<7>(w[i] + kPanelBytes, kVector);
        w[i] += sources[i].w_step;
      }
      T::template load<4 + i>(x[i], kVector);
      x[i] += sources[i].x_step;
      for_each_index<NB>([&](auto b) {
        constexpr int j = decltype(b)::value;
        T::template dot_bf16<2 * i + j, 4 + i, 6 + j>();
      });
    });
    ahead.some();
  }
  if (end == End::kTiles) return;
  for_each_index<NA>([&](auto a) {
    constexpr int i = decltype(a)::value;
    T::template store<2 * i>(sources[i].sums);
    if constexpr (NB == 2) T::template store<2 * i + 1>(sources[i].sums + kTileBytes);
  });
}

// Tiles of sums of a pair -> out [n][32].
template <class V, int NB>
void copy_sums(const BlockArgs& a, const uint8_t* sums) {
  const int all = tiles_of(a.n);
  for (int t = 0; t < all; t++) {
    const bool halves = t + 1 == all && all % 2 && !a.invariant;
    for (int m = tile_begin(a.n, t), r = 0; m < tile_begin(a.n, t + 1); m++, r++)
      for (int b = 0; b < NB; b++) {
        const uint8_t* from = sums + (2 * t + b) * kTileBytes + r * kVector;
        typename V::F f = V::loadf(reinterpret_cast<const float*>(from));
        if (halves) f = V::add(f, V::loadf(reinterpret_cast<const float*>(from + 2 * kTileBytes)));
        V::storef(a.out + m * 2 * kRows + b * kRows, V::mul(f, V::bcastf(a.factor[b])));
      }
  }
}

// NB blocks, pieces of `most` columns. A lone tile of rows takes even and odd steps side by side, four sums at a time, where the order of
// sums may depend on the number of rows.
template <class V, class T, class Codes, int NB>
void summed_panels(const BlockArgs& a, int most) {
  alignas(64) uint8_t sums[kSumTiles * kTileBytes];
  const int all = tiles_of(a.n), steps = tile_steps(kBf16Tiles, most);
  const bool stay = all <= 2;  // in tiles
  for_panels<V, Codes, NB>(a, most, true, [&](const Panel& panel, const uint8_t* w, Ahead<V>& ahead) {
    const int from = panel.pieces[0].index * steps, both = panel.steps / 2;
    const bool last = panel.pieces[panel.count - 1].end == a.g->kp;
    const Begin begin = from == 0 ? Begin::kZero : stay ? Begin::kTiles : Begin::kMemory;
    const End end = stay && !last ? End::kTiles : End::kMemory;
    const auto source = [&](int t) { return source_of(a, t, from, w, sums + 2 * t * kTileBytes); };
    int t = 0;
    for (; t + 2 <= all; t += 2) {
      const PanelSource sources[2] = {source(t), source(t + 1)};
      multiply_panel<T, 2, NB, true>(sources, panel.steps, begin, end, ahead);
    }
    if (t == all) return;
    if (a.invariant) {
      const PanelSource lone = source(t);
      return multiply_panel<T, 1, NB, true>(&lone, panel.steps, begin, end, ahead);
    }
    PanelSource sources[2] = {source(t), source(t)};
    sources[1].x += sources[1].x_step, sources[1].w += kTileBytes, sources[1].sums += 2 * kTileBytes;
    for (auto& s : sources) s.x_step *= 2, s.w_step *= 2;
    const bool odd = panel.steps % 2;
    multiply_panel<T, 2, NB, false>(sources, both, begin, end, ahead);
    if (!odd) return;
    sources[0].x += both * sources[0].x_step, sources[0].w += both * sources[0].w_step;
    multiply_panel<T, 1, NB, true>(sources, 1, end == End::kTiles ? Begin::kTiles : Begin::kMemory, end, ahead);
  });
  copy_sums<V, NB>(a, sums);
}

// out[m][b * 16 + r] += scales * sums of a piece: as in kernels.h.
template <class V, int NB>
inline void add_sums(const BlockArgs& a, int tile, const TilePiece& piece, const uint8_t* sums) {
  using F = typename V::F;
  const int begin = tile_begin(a.n, tile), rows = tile_begin(a.n, tile + 1) - begin;
  const size_t stride = size_t(a.g->groups) * kRows, lane = size_t(piece.group) * kRows, pieces = a.rows->pieces;
  const float* x = a.rows->sums + size_t(a.index[0] + begin) * pieces + piece.index;
  float* out = a.out + size_t(begin) * 2 * kRows;
  F ws[NB], wz[NB];
  for (int b = 0; b < NB; b++) {
    ws[b] = V::loadf(a.scales + lane + b * stride);
    wz[b] = a.minus_zeros ? V::loadf(a.minus_zeros + lane + b * stride) : V::bcastf(0.0f);
  }
  for (int m = 0; m < rows; m++, out += 2 * kRows, sums += kVector, x += pieces) {
#pragma GCC unroll 2
    for (int b = 0; b < NB; b++) {
      F f = V::loadf(reinterpret_cast<const float*>(sums + b * kTileBytes));
      if (a.minus_zeros) f = V::fma(wz[b], V::bcastf(*x), f);
      V::storef(out + b * kRows, V::fma(f, ws[b], V::loadf(out + b * kRows)));
    }
  }
}

// Sums that wait to be scaled: of a piece and two tiles of rows, or of one tile of rows and two pieces.
struct WaitingSums {
  struct { int tile; TilePiece piece; } of[2];
  const uint8_t* sums = nullptr;
  int count = 0;
};

// Groups of less than 128 columns have several pieces in a panel: a lone tile of rows takes two of them side by side.
template <class V, class T, int EL, int NB>
void scaled_panels(const BlockArgs& a) {
  alignas(64) uint8_t sums[2][4 * kTileBytes];
  const int most = a.g->piece, all = tiles_of(a.n), steps = tile_steps(kBf16Tiles, most);
  prepare_all<V>(a), zero_out<V, NB>(a);
  WaitingSums waiting;
  const auto scale = [&] {
    for (int i = 0; i < waiting.count; i++) add_sums<V, NB>(a, waiting.of[i].tile, waiting.of[i].piece, waiting.sums + 2 * i * kTileBytes);
  };
  int half = 0;  // where the next sums go
  for_panels<V, Bf16Codes<V, EL>, NB>(a, most, false, [&](const Panel& panel, const uint8_t* w, Ahead<V>& ahead) {
    for (int p = 0, taken; p < panel.count; p += taken, w += taken * steps * kTileBytes) {
      const TilePiece* pieces = panel.pieces + p;
      const int used = tile_steps(kBf16Tiles, pieces[0].columns);
      taken = all == 1 && p + 1 < panel.count && tile_steps(kBf16Tiles, pieces[1].columns) == used ? 2 : 1;
      for (int t = 0; t < all; t += 2, half ^= 1) {
        WaitingSums next{{{t, pieces[0]}, {}}, sums[half], 1};
        PanelSource sources[2] = {source_of(a, t, pieces[0].index * steps, w, sums[half])};
        if (taken == 2) {
          next.of[1] = {t, pieces[1]}, next.count = 2;
          sources[1] = source_of(a, t, pieces[1].index * steps, w + steps * kTileBytes, sums[half] + 2 * kTileBytes);
          multiply_panel<T, 2, NB, false>(sources, used, Begin::kZero, End::kMemory, ahead);
        } else if (t + 1 < all) {
          next.of[1] = {t + 1, pieces[0]}, next.count = 2;
          sources[1] = source_of(a, t + 1, pieces[0].index * steps, w, sums[half] + 2 * kTileBytes);
          multiply_panel<T, 2, NB, true>(sources, used, Begin::kZero, End::kMemory, ahead);
        } else {
          multiply_panel<T, 1, NB, true>(sources, used, Begin::kZero, End::kMemory, ahead);
        }
        scale();
        waiting = next;
      }
    }
  });
  scale();
}

template <class V, class T, int EL, int NB>
void gemm_pair(const BlockArgs& a) {
  if constexpr (EL == EXPERTD_BF16) return summed_panels<V, T, Bf16Codes<V, EL>, NB>(a, a.g->piece);
  if constexpr (EL == EXPERTD_E2M1) {
    if (scales_fold<V>(a)) return summed_panels<V, T, FoldedCodes<V, NB>, NB>(a, kMaxPiece);
  }
  if constexpr (EL != EXPERTD_BF16) scaled_panels<V, T, EL, NB>(a);
}

// The pairs of a run. They have their own distance to what is fetched: the second-level cache has room for it.
template <class V, class T, int EL>
void gemm_panels_of(BlockRun run) {
  constexpr size_t kAhead = 16 << 10;
  const int n = run.first.n;
  run.distance = int(kAhead / (2 * run.first.g->block_bytes)) + 1;
  T::configure((n + tiles_of(n) - 1) / tiles_of(n));
  for_pairs(run, [](const BlockArgs& a) {
    if (a.nb == 2) gemm_pair<V, T, EL, 2>(a);
    else gemm_pair<V, T, EL, 1>(a);
  });
  T::release();
}

template <class V, class T>
void gemm_panels(const BlockRun& run) {
  switch (run.first.g->spec.element) {
    case EXPERTD_INT4: return gemm_panels_of<V, T, EXPERTD_INT4>(run);
    case EXPERTD_E2M1: return gemm_panels_of<V, T, EXPERTD_E2M1>(run);
    case EXPERTD_E4M3: return gemm_panels_of<V, T, EXPERTD_E4M3>(run);
    default: return gemm_panels_of<V, T, EXPERTD_BF16>(run);
  }
}

}  // namespace
}  // namespace expertd
