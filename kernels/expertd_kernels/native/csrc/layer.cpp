// One expert layer for a batch of tokens:
//   out[t] = sum over routes (t, e, w) of  w * (w2[e] @ act(w13[e] @ x[t] + b13[e]) + b2[e])
// in four phases over the pool: input rows, w13 and activation, middle rows, w2 and weighted sum.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "context.h"
#include "processor.h"

namespace expertd {
namespace {

constexpr int kSerial = 24 << 10;              // elements below which preparing rows is not worth waking threads
constexpr double kSerialUs = 40;               // phases shorter than this are not worth waking threads
constexpr size_t kPassBytes = size_t(384) << 20;  // rows of one pass over the layer; more tokens take more passes, which read all weights again

struct Routes {       // sorted by expert, then by token
  int count, active;  // routes; experts that have any
  int* token;         // [count]
  float* weight;      // [count]
  int* index;         // [count] 0, 1, 2, ...
  int* expert;        // [active]
  int* first;         // [active + 1]
  int *tile_first, *tile_rows;  // [count] as in Rows, where rows go through matrix tiles
  int *own_first, *own_rows;    // [tokens] the same for tokens: each is a tile of its own
};

struct Pass {
  expertd_context& context;
  const expertd_layer& layer;
  const expertd_call& call;
  Geometry g13, g2;
  int m;             // tokens of this pass
  const char* x;     // first row
  char* out;
  Routes routes;
  Rows tokens, input, middle;
  bool shared;       // one input row a token, not one a route
  bool tiles;        // rows go through matrix tiles: one input row a route, copied from its token's where that is shared
  float* hidden;     // [routes][hidden_stride]
  size_t hidden_stride;
  int ahead13, ahead2;  // pairs_ahead() of the matrices
  bool last;            // no other pass follows
};

bool avoid_subnormals(const expertd_layer& layer) {
  return layer.subnormals == EXPERTD_SUBNORMALS_AUTO ? processor().slow_subnormals : layer.subnormals == EXPERTD_SUBNORMALS_AVOID;
}

Path path_of(const Pass& p, const Geometry& g) {
  return path_of(*p.context.level, p.layer.compute, g.spec.element, p.tiles, p.layer.batch_invariant != 0);
}

Rows make_rows(RowBuffers& b, const Geometry& g, Path path, bool one_scale, const int* tile_first, const int* tile_rows, int count) {
  Rows r{};
  r.one_scale = one_scale;
  if (is_tiled(path)) {
    r.tile_first = tile_first;
    r.tile_rows = tile_rows;
    r.stride = row_bytes(path, g);
    count += kTileRows;  // tiles are read whole
  } else {
    r.stride = row_bytes(path, g) / 64 * 64 + 128;  // not a multiple of 4096: rows must not share cache sets
    if (r.stride % 4096 == 0) r.stride += 64;
  }
  r.data = b.data.get<uint8_t>(r.stride * count);
  r.pieces = g.pieces;
  if (path != kF32) r.sums = b.sums.get<float>(size_t(g.pieces) * count);
  if (is_integer(path)) r.scales = b.scales.get<float>(size_t(g.pieces) * count * (path == kI8 ? parts_of(g.piece) : 1));
  if (is_integer(path) && path != kI8) r.starts = b.starts.get<int32_t>(size_t(g.pieces) * count);
  return r;
}

// Counting sort of the pass's routes by expert.
Routes sort_routes(const Pass& p, const int32_t* ids, const float* weights) {
  const int k = p.call.top_k, E = p.layer.w13.spec.experts, most = p.m * k;
  int* memory = p.context.routes.get<int>(size_t(5) * most + 2 * size_t(p.m) + 3 * size_t(E) + 2);
  Routes r{};
  r.token = memory;
  r.weight = reinterpret_cast<float*>(memory + most);
  r.index = memory + 2 * size_t(most);
  r.expert = memory + 3 * size_t(most);
  r.first = r.expert + E;
  int* next = r.first + E + 1;
  r.tile_first = next + E;
  r.tile_rows = r.tile_first + most;
  r.own_first = r.tile_rows + most;
  r.own_rows = r.own_first + p.m;
  std::fill(next, next + E, 0);
  for (int i = 0; i < most; i++)
    if (ids[i] >= 0) next[ids[i]]++;
  for (int e = 0; e < E; e++) {
    const int n = next[e];
    next[e] = r.count;
    if (!n) continue;
    r.expert[r.active] = e;
    r.first[r.active++] = r.count;
    r.count += n;
  }
  r.first[r.active] = r.count;
  for (int i = 0; i < most; i++) {
    if (ids[i] < 0) continue;
    const int at = next[ids[i]]++;
    r.token[at] = i / k;
    r.weight[at] = weights[i];
    r.index[at] = at;
  }
  return r;
}

void place_in_tiles(const Routes& r, int tokens) {
  for (int t = 0; t < tokens; t++) r.own_first[t] = t, r.own_rows[t] = 1;
  for (int a = 0; a < r.active; a++)
    for (int at = r.first[a]; at < r.first[a + 1]; at += kSlice) {
      const int n = std::min(kSlice, r.first[a + 1] - at);
      for (int t = 0; t < tiles_of(n); t++) {
        const int begin = tile_begin(n, t), end = tile_begin(n, t + 1);
        for (int i = begin; i < end; i++) r.tile_first[at + i] = at + begin, r.tile_rows[at + i] = end - begin;
      }
    }
}

// One row of a matrix's input: loaded, permuted, and rounded where the kernel wants that.
void make_row(Pass& p, const Geometry& g, const expertd_matrix& matrix, const Rows& rows, int row, int expert, const void* src,
              bool f32, float factor, int thread) {
  const Level& level = *p.context.level;
  const Path path = path_of(p, g);
  const int32_t* map = matrix.columns ? matrix.columns + size_t(expert) * g.kp : nullptr;
  factor *= input_factor(path, g.spec.element);
  if (path != kF32 && f32 && factor == 1.0f && !map && g.kp == g.spec.k) {  // as it lies
    return level.round_row(path, g, static_cast<const float*>(src), rows, row);
  }
  float* loaded = path == kF32 ? reinterpret_cast<float*>(rows.data + size_t(row) * rows.stride)
                               : p.context.scratch[thread].row.get<float>(g.kp + 16);
  level.load_row(src, f32, map, g.spec.k, g.kp, factor, loaded);
  if (path != kF32) level.round_row(path, g, loaded, rows, row);
}

template <class F>
void for_rows(Pass& p, int rows, int columns, F&& f) {
  if (int64_t(rows) * columns < kSerial) {
    for (int i = 0; i < rows; i++) f(i, 0);
  } else {
    p.context.pool.run_even(rows, f);
  }
}

// What a phase that reads the active experts' part of a matrix may take one thread: 20 GB/s, 50 multiply-adds a ns.
double forecast_us(const Pass& p, const Geometry& g) {
  const double bytes = double(g.expert_bytes) * p.routes.active, macs = double(p.routes.count) * g.spec.n * g.spec.k;
  return bytes / 20e3 + macs / 50e3;
}

// Whether it takes long enough to share it.
bool worth_sharing(const Pass& p, const Geometry& g) { return forecast_us(p, g) > kSerialUs; }

int expert_of_route(const Routes& r, int route) {
  return int(std::upper_bound(r.first, r.first + r.active, route) - r.first) - 1;
}

// One row of tiles to its place in another.
void copy_tiled_row(const Rows& from, int row, const Rows& to, int place) {
  const uint8_t* source = from.data + size_t(row) * from.stride;
  const size_t first = to.tile_first[place], tile = size_t(to.tile_rows[place]) * kVector, pieces = from.pieces;
  uint8_t* target = to.data + first * to.stride + (place - first) * kVector;
  for (size_t at = 0; at < from.stride; at += kVector, target += tile) std::memcpy(target, source + at, kVector);
  std::memcpy(to.sums + place * pieces, from.sums + row * pieces, pieces * sizeof(float));
  if (!from.scales) return;
  std::memcpy(to.scales + place * pieces, from.scales + row * pieces, pieces * sizeof(float));
  std::memcpy(to.starts + place * pieces, from.starts + row * pieces, pieces * sizeof(int32_t));
}

void input_rows(Pass& p) {
  const size_t bytes = size_t(p.call.x_stride) * (p.call.x_f32 ? 4 : 2);
  for_rows(p, p.shared ? p.m : p.routes.count, p.g13.kp, [&](int i, int thread) {
    const int token = p.shared ? i : p.routes.token[i];
    const int expert = p.shared ? 0 : p.routes.expert[expert_of_route(p.routes, i)];
    const float factor = p.call.weight_on_input ? p.routes.weight[i] : 1.0f;
    make_row(p, p.g13, p.layer.w13, p.shared ? p.tokens : p.input, i, expert, p.x + token * bytes, p.call.x_f32, factor, thread);
  });
  if (!p.shared || !is_tiled(path_of(p, p.g13))) return;
  for_rows(p, p.routes.count, p.g13.kp, [&](int i, int) { copy_tiled_row(p.tokens, p.routes.token[i], p.input, i); });
}

void middle_rows(Pass& p) {
  for_rows(p, p.routes.count, p.g2.kp, [&](int i, int thread) {
    const int expert = p.routes.expert[expert_of_route(p.routes, i)];
    make_row(p, p.g2, p.layer.w2, p.middle, i, expert, p.hidden + i * p.hidden_stride, true, 1.0f, thread);
  });
}

const uint8_t* block_at(const Pass& p, const Geometry& g, const expertd_matrix& matrix, int active, int block) {
  return matrix.stream + p.routes.expert[active] * g.expert_bytes + block * g.block_bytes;
}

// Where units of the second phase begin, and how many there are: each has the same blocks of w2 of every active expert.
struct DownUnits {
  int blocks, step, count;
  DownUnits(const Pass& p) : blocks(p.g2.blocks) {
    // Blocks whose sums of all tokens stay in the cache. Tiles read all rows of activations for each unit: fewer units, then.
    const int fit = std::max(1, (p.tiles ? 1024 << 10 : 64 << 10) / (64 * p.m));
    // A thread's units: four where there are many threads that steal from each other, fewer where each jump to another expert counts more.
    const int threads = p.context.pool.threads(), each = p.tiles ? 4 : std::min(4, threads), fair = std::max(1, blocks / (each * threads));
    step = std::max(4, std::min(fit, fair) & ~1);
    count = (blocks + step - 1) / step;
  }
  int first(int thread, int threads) const { return int(int64_t(count) * thread / threads); }  // as Pool::run_even
};

// While a pair of blocks is read, another one is fetched from memory: the one that its thread will read some pairs later, be it of
// the next expert, unit or phase. Without that, each jump to another place would wait for the memory. A pair that is longer than
// the distance fetches itself: then the next place is `ahead` bytes on.
size_t bytes_ahead(const Pass& p, const Geometry& g) {
  constexpr size_t kBytesAhead = 32 << 10;  // into the second level (docs/log/cpu-zen4.md)
  return path_of(p, g) == kBytes ? kBytesAhead : p.context.level->ahead;
}

int pairs_ahead(const Pass& p, const Geometry& g) {
  const size_t ahead = bytes_ahead(p, g), pair = 2 * g.block_bytes;
  return pair > 5 * ahead ? 0 : std::max(1, int((ahead + pair / 2) / pair));
}

// Where a thread's reading goes on after pair `end` - 1 of the first phase's list (expert after expert, `pairs` each); its list ends at
// `last`, w2 follows.
const uint8_t* after_up(const Pass& p, int end, int last, int thread) {
  const int pairs = (p.g13.blocks + 1) / 2;
  if (end < last) return block_at(p, p.g13, p.layer.w13, end / pairs, end % pairs * 2);
  const DownUnits units(p);
  return block_at(p, p.g2, p.layer.w2, 0, units.first(thread, p.context.pool.threads()) * units.step);
}

// The same after the blocks of a unit of w2 of one expert.
const uint8_t* after_down(const Pass& p, const DownUnits& units, int unit, int active) {
  if (active + 1 < p.routes.active) return block_at(p, p.g2, p.layer.w2, active + 1, unit * units.step);
  return unit + 1 < units.count ? block_at(p, p.g2, p.layer.w2, 0, (unit + 1) * units.step) : nullptr;
}

// `blocks` blocks from b on of an expert, for gemm(). next: what the thread reads after them, or nullptr.
BlockRun block_run(Pass& p, const Geometry& g, const expertd_matrix& matrix, const Rows& rows, int expert, int b, int blocks,
                   const uint8_t* next, int distance, int thread) {
  ThreadScratch& s = p.context.scratch[thread];
  const size_t lanes = size_t(2) * g.groups * kRows;
  float* scales = s.scales.get<float>(lanes);
  float* zeros = g.spec.zeros ? s.zeros.get<float>(lanes) : nullptr;
  const uint8_t* pair = matrix.stream + expert * g.expert_bytes + b * g.block_bytes;
  BlockArgs first{&g, pair, 2, 0, {}, scales, zeros, &rows, nullptr, 0, nullptr, p.layer.batch_invariant != 0, avoid_subnormals(p.layer)};
  const float factor = scale_factor(path_of(p, g), g.spec.element, first.normal);
  for (int i = 0; i < 2; i++) {  // b is even, and a run of two segments has both: all pairs have the same factors
    const int segments = g.spec.segments;
    const float global = matrix.global_scales ? matrix.global_scales[size_t(expert) * segments + (b + i) % segments] : 1.0f;
    first.factor[i] = global * factor;
  }
  return {first, blocks, distance, ptrdiff_t(bytes_ahead(p, g)), next};
}

// Calls use(pair, first row, rows, tile [rows][32]) for all pairs of a run and all rows [from, to) of an index list.
template <class Use>
void gemm(Pass& p, const BlockRun& run, const int32_t* index, int from, int to, int thread, const Use& use) {
  if (p.layer.compute == EXPERTD_COMPUTE_READ) {
    p.context.level->read(run.first.pair, run.blocks * run.first.g->block_bytes, false);
    return;
  }
  const int room = path_of(p, *run.first.g) == kBf16Tiles ? kPanelRows : kSlice;
  const int rows = std::min(kSlice, to - from), fit = std::max(1, room / rows), pairs = run.pairs();
  const size_t pair_bytes = 2 * run.first.g->block_bytes;
  BlockRun part = run;
  if (!fetches(*p.context.level, path_of(p, *run.first.g), run.first.g->spec.element, rows)) part.distance = 0, part.near = 0;
  part.first.out = p.context.scratch[thread].tile.get<float>(size_t(room) * 2 * kRows);
  for (int pair = 0; pair < pairs; pair += fit) {
    const int n = std::min(fit, pairs - pair);
    part.first.pair = run.first.pair + pair * pair_bytes;
    part.blocks = std::min(2 * n, run.blocks - 2 * pair);
    part.next = pair + n < pairs ? part.first.pair + n * pair_bytes : run.next;
    for (int at = from; at < to; at += kSlice) {
      part.first.n = std::min(kSlice, to - at);
      part.first.index = index + at;
      p.context.level->gemm(path_of(p, *part.first.g), part);
      for (int i = 0; i < n; i++) use(pair + i, at, part.first.n, part.first.out + size_t(i) * part.first.n * 2 * kRows);
    }
  }
}

const float kNoBias[2 * kRows] = {};

// Pairs [from, to) of one expert's w13 for all its rows: gate and up, or two neighbours where there is no mul.
void up_pairs(Pass& p, int active, int from, int to, const uint8_t* next, int thread) {
  const Geometry& g = p.g13;
  const bool gated = g.spec.segments == 2;
  const int expert = p.routes.expert[active], blocks = std::min(2 * to, g.blocks) - 2 * from;
  const BlockRun run = block_run(p, g, p.layer.w13, p.input, expert, 2 * from, blocks, next, p.ahead13, thread);
  const float* biases = p.layer.w13.bias ? p.layer.w13.bias + (size_t(expert) * g.blocks + 2 * from) * kRows : nullptr;
  const Activation act{p.layer.activation, p.layer.has_limit != 0, p.layer.alpha, p.layer.beta, p.layer.limit};
  const int columns = gated ? kRows : 2 * kRows;
  const int* index = p.shared && !is_tiled(path_of(p, g)) ? p.routes.token : p.routes.index;
  gemm(p, run, index, p.routes.first[active], p.routes.first[active + 1], thread,
       [&](int pair, int row, int n, const float* tile) {
         float bias[2 * kRows] = {};
         if (biases) std::memcpy(bias, biases + size_t(pair) * 2 * kRows, sizeof(float) * kRows * std::min(2, blocks - 2 * pair));
         p.context.level->activate(act, tile, bias, n, gated, p.hidden + row * p.hidden_stride + (from + pair) * columns, p.hidden_stride);
       });
}

// Units of `step` pairs, expert after expert: each thread's range is one run of memory. Ranges are cut by cost: a pair costs its
// bytes, and arithmetic for each row.
void up_phase(Pass& p) {
  const int pairs = (p.g13.blocks + 1) / 2, step = 4, per_expert = (pairs + step - 1) / step;
  const int n = p.routes.active * per_expert, threads = p.context.pool.threads();
  std::vector<int> start(threads + 1, n);
  const auto cost = [&](int a) { return 4.0 + (p.routes.first[a + 1] - p.routes.first[a]); };
  double total = 0, done = 0;
  for (int a = 0; a < p.routes.active; a++) total += cost(a) * per_expert;
  for (int a = 0, t = 0; a < p.routes.active; a++) {
    for (int i = 0; i < per_expert; i++, done += cost(a))
      while (t < threads && done >= total * t / threads) start[t++] = a * per_expert + i;
  }
  auto unit = [&](int u, int thread) {
    const int active = u / per_expert, from = u % per_expert * step;
    const int stop = u >= start[thread] && u < start[thread + 1] ? start[thread + 1] : n;
    const int end = stop / per_expert * pairs + stop % per_expert * step;
    const int to = std::min(from + step, pairs);
    up_pairs(p, active, from, to, after_up(p, active * pairs + to, end, thread), thread);
  };
  if (worth_sharing(p, p.g13)) {
    p.context.pool.run(n, start.data(), unit);
  } else {
    for (int u = 0; u < n; u++) unit(u, 0);
  }
}

// Output columns of one unit's blocks of w2, for all experts and tokens: experts are added in ascending order, so the answer does
// not depend on the threads.
void down_unit(Pass& p, const DownUnits& units, int unit, int thread) {
  const Geometry& g = p.g2;
  const int from = unit * units.step, to = std::min(from + units.step, units.blocks), columns = (to - from) * kRows;
  float* acc = p.context.scratch[thread].acc.get<float>(size_t(p.m) * columns);
  std::memset(acc, 0, sizeof(float) * p.m * columns);
  for (int active = 0; active < p.routes.active; active++) {
    const int expert = p.routes.expert[active];
    const uint8_t* next = after_down(p, units, unit, active);
    const BlockRun run = block_run(p, g, p.layer.w2, p.middle, expert, from, to - from, next, p.ahead2, thread);
    const float* bias = p.layer.w2.bias ? p.layer.w2.bias + (size_t(expert) * g.blocks + from) * kRows : nullptr;
    gemm(p, run, p.routes.index, p.routes.first[active], p.routes.first[active + 1], thread, [&](int pair, int row, int n, const float* tile) {
      const int width = std::min(2 * kRows, columns - pair * 2 * kRows);
      for (int i = 0; i < n; i++) {
        const float weight = p.call.weight_on_input ? 1.0f : p.routes.weight[row + i];
        float* to_row = acc + size_t(p.routes.token[row + i]) * columns + pair * 2 * kRows;
        p.context.level->combine(tile + i * 2 * kRows, bias ? bias + pair * 2 * kRows : kNoBias, weight, width, to_row);
      }
    });
  }
  if (p.layer.compute == EXPERTD_COMPUTE_READ) return;
  const int H = g.spec.n, at = from * kRows, width = std::min(columns, H - at), size = p.call.out_f32 ? 4 : 2;
  for (int t = 0; t < p.m; t++) {
    p.context.level->store(acc + size_t(t) * columns, width, p.call.out_f32, p.out + (size_t(t) * H + at) * size);
  }
}

void down_phase(Pass& p) {
  const DownUnits units(p);
  auto unit = [&](int u, int thread) { down_unit(p, units, u, thread); };
  if (worth_sharing(p, p.g2)) {
    p.context.pool.run_even(units.count, unit);
  } else {
    for (int u = 0; u < units.count; u++) unit(u, 0);
  }
}

// Returns what it may take one thread.
double run_pass(Pass& p, const int32_t* ids, const float* weights) {
  p.routes = sort_routes(p, ids, weights);
  p.tiles = use_tiles(*p.context.level, p.layer, p.g13, p.g2, p.routes.count, p.routes.active);
  if (p.tiles) place_in_tiles(p.routes, p.m);
  p.ahead13 = pairs_ahead(p, p.g13);
  p.ahead2 = pairs_ahead(p, p.g2);
  const Path path = path_of(p, p.g13);
  const Routes& r = p.routes;
  const bool one_scale = p.layer.compute == EXPERTD_COMPUTE_INT8_TOKEN;
  if (p.shared) p.tokens = make_rows(p.context.tokens, p.g13, path, one_scale, r.own_first, r.own_rows, p.m);
  p.input = p.shared && !is_tiled(path) ? p.tokens : make_rows(p.context.input, p.g13, path, one_scale, r.tile_first, r.tile_rows, r.count);
  p.middle = make_rows(p.context.middle, p.g2, path_of(p, p.g2), one_scale, r.tile_first, r.tile_rows, r.count);
  p.hidden_stride = size_t(p.g2.spec.k + 31) / 32 * 32 + 16;
  p.hidden = p.context.hidden.get<float>(p.hidden_stride * p.routes.count);
  const bool computes = p.layer.compute != EXPERTD_COMPUTE_READ;
  if (computes) input_rows(p);
  up_phase(p);
  if (computes) middle_rows(p);
  if (p.last) p.context.pool.expect_more(false);
  down_phase(p);
  return forecast_us(p, p.g13) + forecast_us(p, p.g2);
}

// Calls f(), which returns what it may take one thread, with as many threads as the crew has, and tells the crew how that went.
template <class F>
void with_crew(expertd_context& context, const F& f) {
  using Clock = std::chrono::steady_clock;
  context.pool.use(context.crew.size());
  context.pool.expect_more(true);
  context.pool.late_us();
  const auto start = Clock::now();
  const double forecast = f(), us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  if (forecast < 4 * kSerialUs) return;  // so little may have been one thread's
  context.crew.took(us, forecast, context.pool.late_us());
  context.threads = context.crew.chosen();
}

bool valid(const expertd_layer& layer, const expertd_call& call, Geometry& g13, Geometry& g2) {
  if (!geometry_of(layer.w13.spec, g13) || !geometry_of(layer.w2.spec, g2)) return false;
  const expertd_spec &a = layer.w13.spec, &b = layer.w2.spec;
  const int segments = layer.activation == EXPERTD_RELU2 ? 1 : 2;
  if (a.segments != segments || b.segments != 1 || a.experts != b.experts || a.k != b.n || a.n != segments * b.k) return false;
  if (layer.activation < EXPERTD_SILU || layer.activation > EXPERTD_RELU2 || !layer.w13.stream || !layer.w2.stream) return false;
  if (call.m < 0 || call.top_k < 1 || call.m > INT32_MAX / call.top_k / 4 || call.x_stride < a.k) return false;
  for (int64_t i = 0; i < call.m * call.top_k; i++)
    if (call.ids[i] < -1 || call.ids[i] >= a.experts) return false;
  return true;
}

}  // namespace
}  // namespace expertd

using namespace expertd;

extern "C" int32_t expertd_cpu_forward(expertd_context* context, const expertd_layer* layer, const expertd_call* call) {
  Geometry g13, g2;
  if (!context || !valid(*layer, *call, g13, g2)) return EXPERTD_BAD_ARGUMENT;
  std::lock_guard<std::mutex> lock(context->busy);
  const size_t route_bytes = size_t(g2.spec.k) * 8 + size_t(g13.kp) * (call->weight_on_input || layer->w13.columns || context->level->tile_rows ? 4 : 0) + 64;
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(4096, kPassBytes / (route_bytes * call->top_k)));
  const int64_t passes = std::max<int64_t>(1, (call->m + most - 1) / most), pass = (call->m + passes - 1) / passes;  // of nearly equal size
  const auto all_passes = [&] {
    double forecast = 0;
    for (int64_t at = 0; at < call->m; at += pass) {
      const size_t x_row = size_t(call->x_stride) * (call->x_f32 ? 4 : 2), out_row = size_t(g2.spec.n) * (call->out_f32 ? 4 : 2);
      Pass p{*context, *layer, *call, g13, g2, int(std::min(pass, call->m - at)), static_cast<const char*>(call->x) + at * x_row,
             static_cast<char*>(call->out) + at * out_row, {}, {}, {}, {}, !call->weight_on_input && !layer->w13.columns, false, nullptr, 0, 0, 0, at + pass >= call->m};
      forecast += run_pass(p, call->ids + at * call->top_k, call->weights + at * call->top_k);
    }
    return forecast;
  };
  try {
    with_crew(*context, all_passes);
  } catch (const std::bad_alloc&) {
    return EXPERTD_NO_MEMORY;
  }
  return EXPERTD_OK;
}
