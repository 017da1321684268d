// Many rows of bf16 numbers on matrix tiles: a panel, at most kPanelSteps tiles of 32 columns of a pair of blocks, is decoded into bf16
// numbers in the first-level cache and meets all rows there, while the next one is decoded. Two pairs take turns panel by panel, so that
// the rows' tiles of a panel, which come from the second-level cache, are read from there once for both. Codes are exact as bf16: only
// activations are rounded. What becomes of scales:
//
//   summed   powers of two (e8m0 with e2m1) are added to the exponents of the codes, and bf16 has none: the sums of all columns stay in
//            tiles, which lie in the cache between panels, and are copied into `out` at the end.
//   scaled   else the sums of a piece are scaled and added to `out` while the products of the next one run. (Codes times their scales,
//            rounded to bf16, err by half as much again and are hardly faster: docs/log/cpu-xeon.md.)
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

// use(pair, panel, its tiles of weights, decode) for each panel of each of some pairs of NB blocks. decode(): a part of what comes next; it
// is all decoded after calls(panel) calls.
template <class V, class Codes, int NB, class Calls, class Use>
inline void for_panels(const BlockArgs* pairs, int count, int most, bool across, const Calls& calls, const Use& use) {
  using Decoder = TileDecoder<V, Codes, NB>;
  static_assert(kPairsInTurns == 2);
  alignas(64) uint8_t tiles[2][NB * kPanelBytes];
  const int steps = tile_steps(kBf16Tiles, most), fit = kPanelSteps / steps;
  Decoder decoders[kPairsInTurns] = {{pairs[0], steps * kTileBytes, kPanelBytes}, {pairs[count - 1], steps * kTileBytes, kPanelBytes}};
  TilePieces row{*pairs[0].g, most, across};
  const auto take = [&](Panel& to) {
    to.count = row.take(to.pieces, fit);
    to.steps = 0;
    for (int i = 0; i < to.count; i++) to.steps += tile_steps(kBf16Tiles, to.pieces[i].columns);
  };
  Panel panels[2];
  take(panels[0]);
  decoders[0].begin(panels[0].pieces, panels[0].count, tiles[0]);
  decoders[0].rest();
  for (int now = 0, current = 0; panels[current].count; current ^= 1) {
    const Panel &panel = panels[current], &following = panels[current ^ 1];
    take(panels[current ^ 1]);
    const int columns = calls(panel) * Codes::kColumns, share = (fit * most + columns - 1) / columns;
    for (int i = 0; i < count; i++, now ^= 1) {
      const bool last = i + 1 == count;
      const Panel& next = last ? following : panel;
      Decoder& decoder = decoders[last ? 0 : i + 1];
      decoder.begin(next.pieces, next.count, tiles[now ^ 1]);
      use(i, panel, tiles[now], [&]() __attribute__((always_inline)) { decoder.some(share); });
      decoder.rest();
    }
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

// Products of some steps, NB blocks, and NA sources: two tiles of rows that meet the same weights (SAME), or two parts of the columns of
// one. first: sums begin at zero. between(): after each step, while the tiles multiply.
template <class T, int NA, int NB, bool SAME, class Between>
inline void multiply_panel(const PanelSource* sources, int steps, bool first, const Between& between) {
  const uint8_t *x[NA], *w[NA];
  for_each_index<NA>([&](auto a) {
    constexpr int i = decltype(a)::value;
    x[i] = sources[i].x, w[i] = sources[i].w;
    if (first) {
      T::template zero<2 * i>();
      if constexpr (NB == 2) T::template zero<2 * i + 1>();
    } else {
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
    between();
  }
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
    const bool halves = t + 1 == all && all % 2;
    for (int m = tile_begin(a.n, t), r = 0; m < tile_begin(a.n, t + 1); m++, r++)
      for (int b = 0; b < NB; b++) {
        const uint8_t* from = sums + (2 * t + b) * kTileBytes + r * kVector;
        typename V::F f = V::loadf(reinterpret_cast<const float*>(from));
        if (halves) f = V::add(f, V::loadf(reinterpret_cast<const float*>(from + 2 * kTileBytes)));
        V::storef(a.out + m * 2 * kRows + b * kRows, V::mul(f, V::bcastf(a.factor[b])));
      }
  }
}

// `count` pairs of NB blocks, pieces of `most` columns. A lone tile of rows takes even and odd steps side by side: four sums at a time.
template <class V, class T, class Codes, int NB>
void summed_panels(const BlockArgs* pairs, int count, int most) {
  alignas(64) uint8_t sums[kPairsInTurns][kSumTiles * kTileBytes];
  const int all = tiles_of(pairs[0].n), steps = tile_steps(kBf16Tiles, most);
  const auto calls = [&](const Panel& panel) { return std::max(1, all / 2 * panel.steps + all % 2 * (panel.steps / 2)); };
  for_panels<V, Codes, NB>(pairs, count, most, true, calls, [&](int i, const Panel& panel, const uint8_t* w, const auto& decode) {
    const int from = panel.pieces[0].index * steps, both = panel.steps / 2;
    const bool first = from == 0;
    const auto source = [&](int t) { return source_of(pairs[i], t, from, w, sums[i] + 2 * t * kTileBytes); };
    int t = 0;
    for (; t + 2 <= all; t += 2) {
      const PanelSource sources[2] = {source(t), source(t + 1)};
      multiply_panel<T, 2, NB, true>(sources, panel.steps, first, decode);
    }
    if (t == all) return;
    PanelSource sources[2] = {source(t), source(t)};
    sources[1].x += sources[1].x_step, sources[1].w += kTileBytes, sources[1].sums += 2 * kTileBytes;
    for (auto& s : sources) s.x_step *= 2, s.w_step *= 2;
    if (both || first) multiply_panel<T, 2, NB, false>(sources, both, first, decode);
    if (panel.steps % 2 == 0) return;
    sources[0].x += both * sources[0].x_step, sources[0].w += both * sources[0].w_step;
    multiply_panel<T, 1, NB, true>(sources, 1, false, decode);
  });
  for (int i = 0; i < count; i++) copy_sums<V, NB>(pairs[i], sums[i]);
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

// Sums of a piece and all tiles of rows, or of one tile of rows and two pieces, that wait to be scaled.
struct WaitingSums {
  const BlockArgs* pair = nullptr;
  TilePiece pieces[2];
  const uint8_t* sums = nullptr;
  int count = 0, done = 0;
};

// Groups of less than 128 columns have several pieces in a panel: a lone tile of rows takes two of them side by side.
template <class V, class T, int EL, int NB>
void scaled_panels(const BlockArgs* pairs, int count) {
  alignas(64) uint8_t sums[2][kSumTiles * kTileBytes];
  const int most = pairs[0].g->piece, all = tiles_of(pairs[0].n), steps = tile_steps(kBf16Tiles, most);
  for (int i = 0; i < count; i++) prepare_all<V>(pairs[i]), zero_out<V, NB>(pairs[i]);
  WaitingSums waiting;
  const auto scale = [&](int until) {
    for (; waiting.done < until; waiting.done++) {
      const int tile = all == 1 ? 0 : waiting.done, piece = all == 1 ? waiting.done : 0;
      add_sums<V, NB>(*waiting.pair, tile, waiting.pieces[piece], waiting.sums + 2 * waiting.done * kTileBytes);
    }
  };
  const auto calls = [&](const Panel& panel) { return all == 1 && panel.count > 1 ? (panel.steps + 1) / 2 : (all + 1) / 2 * panel.steps; };
  int half = 0;  // where the next sums go
  for_panels<V, Bf16Codes<V, EL>, NB>(pairs, count, most, false, calls, [&](int i, const Panel& panel, const uint8_t* w, const auto& decode) {
    const BlockArgs& a = pairs[i];
    for (int p = 0, taken; p < panel.count; p += taken, w += taken * steps * kTileBytes, half ^= 1) {
      const TilePiece* pieces = panel.pieces + p;
      const int used = tile_steps(kBf16Tiles, pieces[0].columns);
      taken = all == 1 && p + 1 < panel.count && tile_steps(kBf16Tiles, pieces[1].columns) == used ? 2 : 1;
      const int turns = (all + 1) / 2 * used;
      int turn = 0;
      const auto between = [&]() __attribute__((always_inline)) {
        decode();
        scale(waiting.count * ++turn / turns);
      };
      const auto source = [&](int t, int piece) {
        return source_of(a, t, pieces[piece].index * steps, w + piece * steps * kTileBytes, sums[half] + 2 * (t + piece) * kTileBytes);
      };
      if (taken == 2) {
        const PanelSource sources[2] = {source(0, 0), source(0, 1)};
        multiply_panel<T, 2, NB, false>(sources, used, true, between);
      } else {
        for (int t = 0; t < all; t += 2) {
          const PanelSource sources[2] = {source(t, 0), t + 1 < all ? source(t + 1, 0) : PanelSource{}};
          if (t + 1 < all) multiply_panel<T, 2, NB, true>(sources, used, true, between);
          else multiply_panel<T, 1, NB, true>(sources, used, true, between);
        }
      }
      scale(waiting.count);
      waiting = {&a, {pieces[0], pieces[taken - 1]}, sums[half], all * taken, 0};
    }
  });
  scale(waiting.count);
}

template <class V, class T, int EL, int NB>
void gemm_pairs(const BlockArgs* pairs, int count) {
  if constexpr (EL == EXPERTD_BF16) return summed_panels<V, T, Bf16Codes<V, EL>, NB>(pairs, count, pairs[0].g->piece);
  if constexpr (EL == EXPERTD_E2M1) {
    if (std::all_of(pairs, pairs + count, scales_fold<V>)) return summed_panels<V, T, FoldedCodes<V, NB>, NB>(pairs, count, kMaxPiece);
  }
  if constexpr (EL != EXPERTD_BF16) scaled_panels<V, T, EL, NB>(pairs, count);
}

// The pairs of a run, kPairsInTurns at a time. They have their own distance to what is fetched: the second-level cache has room for it.
template <class V, class T, int EL>
void gemm_panels_of(const BlockRun& run) {
  constexpr size_t kAhead = 16 << 10;
  const BlockArgs& f = run.first;
  const Geometry& g = *f.g;
  const size_t pair_bytes = 2 * g.block_bytes, out = size_t(f.n) * 2 * kRows, lanes = 2 * size_t(g.groups) * kRows;
  const int whole = run.blocks / 2, all = run.pairs();
  const auto args = [&](int i, int room, int distance) {
    BlockArgs a = f;
    a.pair += i * pair_bytes, a.out += i * out, a.scales += room * lanes;
    if (a.minus_zeros) a.minus_zeros += room * lanes;
    a.nb = i < whole ? 2 : 1;
    const int target = i + distance - all;
    a.ahead = target < 0 ? ptrdiff_t(distance * pair_bytes) : run.next ? run.next + target * pair_bytes - a.pair : 0;
    if (a.ahead)
      for (size_t at = 0; at < a.nb * g.header_bytes; at += kVector) __builtin_prefetch(a.pair + a.ahead + at, 0, 2);
    return a;
  };
  const auto distance = [&](int count) { return std::max(count, int(kAhead / pair_bytes) + 1); };
  T::configure((f.n + tiles_of(f.n) - 1) / tiles_of(f.n));
  for (int i = 0; i < whole; i += kPairsInTurns) {
    const int count = std::min(kPairsInTurns, whole - i);
    BlockArgs pairs[kPairsInTurns];
    for (int j = 0; j < count; j++) pairs[j] = args(i + j, j, distance(count));
    gemm_pairs<V, T, EL, 2>(pairs, count);
  }
  if (run.blocks % 2) {
    const BlockArgs last = args(whole, 0, distance(1));
    gemm_pairs<V, T, EL, 1>(&last, 1);
  }
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
