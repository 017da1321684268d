// Self-test of the C ABI without Python, for builds with sanitizers or with emulated instructions:
//   python -m expertd_kernels.native.csrc.build --sanitize address,undefined --program tests/kernels/native/self_test.cpp \
//     --out build/self_test && build/self_test
// With an argument (wrong, overflow, misaligned, race) it makes that mistake itself: a proof that mistakes are seen.
// Every buffer has exactly the size that the ABI asks for, so that reading or writing past one is seen. Packs, unpacks, and computes
// with each level of this machine and several numbers of threads; the answers must agree with a plain loop over dequantized weights.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "context.h"

using expertd::Geometry;

namespace {

uint64_t state = 1;
uint32_t next_random() {  // a linear congruential generator: the same on every machine
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return uint32_t(state >> 33);
}
float uniform() { return float(next_random() % 4096) / 2048.0f - 1.0f; }

using Bytes = std::unique_ptr<uint8_t[]>;
Bytes bytes(size_t n) { return Bytes(new uint8_t[n]); }

uint16_t to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return uint16_t(u >> 16);
}
float from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

float rounded_bf16(float f) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return from_bits((u + 0x7FFFu + (u >> 16 & 1)) & 0xFFFF0000u);
}

float scale_value(int type, const uint8_t* p, size_t i) {
  uint16_t h;
  switch (type) {
    case EXPERTD_SCALE_NONE: return 1.0f;
    case EXPERTD_SCALE_F32: float f; std::memcpy(&f, p + 4 * i, 4); return f;
    case EXPERTD_SCALE_BF16: std::memcpy(&h, p + 2 * i, 2); return from_bits(uint32_t(h) << 16);
    case EXPERTD_SCALE_F16: std::memcpy(&h, p + 2 * i, 2); return from_bits(uint32_t(h & 0x7FFF) << 13) * 0x1p112f * (h & 0x8000 ? -1 : 1);
    case EXPERTD_SCALE_E8M0: return std::ldexp(1.0f, p[i] - 127);
    default: return from_bits(uint32_t(p[i] & 0x7F) << 20) * 0x1p120f * (p[i] & 0x80 ? -1 : 1);
  }
}

float code_value(int element, const uint8_t* row, int k) {
  static const float e2m1[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  const int nibble = row[expertd::is_nibble(element) ? k / 2 : 0] >> (k % 2 * 4) & 15;
  uint16_t h;
  switch (element) {
    case EXPERTD_INT4: return float(nibble);
    case EXPERTD_E2M1: return e2m1[nibble & 7] * (nibble & 8 ? -1 : 1);
    case EXPERTD_INT8: return float(int8_t(row[k]));
    case EXPERTD_E4M3: return scale_value(EXPERTD_SCALE_E4M3, row, k);
    case EXPERTD_BF16: std::memcpy(&h, row + 2 * k, 2); return from_bits(uint32_t(h) << 16);
    case EXPERTD_F16: return scale_value(EXPERTD_SCALE_F16, row, k);
    default: return scale_value(EXPERTD_SCALE_F32, row, k);
  }
}

struct Matrix {
  expertd_spec spec;
  Geometry g;
  size_t row_bytes, scales;
  Bytes codes, scale, zero, stream;
  std::vector<float> bias, global, dense;  // dense [E, N, K]
  std::vector<int32_t> columns;
  std::vector<int32_t> map;
};

void fill_codes(Matrix& m) {
  const int bits = expertd::element_bits(m.spec.element);
  const size_t n = m.row_bytes * m.spec.experts * m.spec.n;
  m.codes = bytes(n);
  for (size_t i = 0; i < n; i++) m.codes[i] = uint8_t(next_random());
  if (bits == 4 && m.spec.k % 2) {
    for (size_t r = 1; r <= size_t(m.spec.experts) * m.spec.n; r++) m.codes[r * m.row_bytes - 1] &= 15;
  }
  for (size_t i = 0; i < n; i++) {
    if (m.spec.element == EXPERTD_E4M3 && (m.codes[i] & 0x7F) == 0x7F) m.codes[i] ^= 1;  // NaN
    if (bits == 16 && i % 2) m.codes[i] = uint8_t((m.codes[i] & 0x83) | 0x3C);           // about 1
    if (bits == 32 && i % 4 == 3) m.codes[i] = uint8_t((m.codes[i] & 0x80) | 0x3F);
    if (bits == 32 && i % 4 == 2) m.codes[i] &= 0x7F;
  }
}

void fill_scales(Matrix& m) {
  m.scales = size_t(m.spec.experts) * m.g.scale_rows * m.g.groups;
  if (m.g.scale_bytes) m.scale = bytes(m.scales * m.g.scale_bytes);
  if (m.spec.zeros) m.zero = bytes(m.scales);
  for (size_t i = 0; i < m.scales; i++) {
    const float value = (0.25f + 0.5f * std::fabs(uniform())) * (next_random() % 2 ? 1 : -1);
    uint8_t* p = m.scale ? m.scale.get() + i * m.g.scale_bytes : nullptr;
    const uint16_t h = m.spec.scale_type == EXPERTD_SCALE_BF16 ? to_bf16(value) : uint16_t(0x3400 | (next_random() & 0x83FF));
    switch (m.spec.scale_type) {
      case EXPERTD_SCALE_NONE: break;
      case EXPERTD_SCALE_F32: std::memcpy(p, &value, 4); break;
      case EXPERTD_SCALE_F16:
      case EXPERTD_SCALE_BF16: std::memcpy(p, &h, 2); break;
      // With a global scale, and seldom in groups of 96: such small ones that matrix tiles do not make them part of the codes.
      case EXPERTD_SCALE_E8M0:
        *p = uint8_t((m.spec.global_scale || (m.spec.cols == 96 && i % 501 == 500) ? 20 : 125) + next_random() % 3);
        break;
      default: *p = uint8_t(0x28 | (next_random() & 0x87)); break;
    }
    if (m.spec.zeros) m.zero[i] = m.spec.element == EXPERTD_INT4 ? next_random() % 16 : uint8_t(next_random());
  }
}

// Dequantized weights in natural column order, as the definition says.
void fill_dense(Matrix& m) {
  const expertd_spec& s = m.spec;
  m.dense.resize(size_t(s.experts) * s.n * s.k);
  for (int e = 0; e < s.experts; e++)
    for (int n = 0; n < s.n; n++) {
      const int segment = n / m.g.seg_rows;
      const size_t block = (size_t(e) * m.g.scale_rows + m.g.scale_row(segment, n % m.g.seg_rows)) * m.g.groups;
      for (int k = 0; k < s.k; k++) {
        const size_t i = block + k / m.g.group_cols;
        float v = code_value(s.element, m.codes.get() + (size_t(e) * s.n + n) * m.row_bytes, k);
        if (s.zeros) v -= s.element == EXPERTD_INT4 ? float(m.zero[i]) : float(int8_t(m.zero[i]));
        else if (s.element == EXPERTD_INT4) v -= 8;
        v *= scale_value(s.scale_type, m.scale.get(), i) * (s.global_scale ? m.global[e * s.segments + segment] : 1.0f);
        const int column = m.columns.empty() ? k : m.columns[size_t(e) * s.k + k];
        m.dense[(size_t(e) * s.n + n) * s.k + column] = v;
      }
    }
}

Matrix make(expertd_spec spec, bool bias, bool permuted) {
  Matrix m{};
  m.spec = spec;
  if (!expertd::geometry_of(spec, m.g)) std::abort();
  const int bits = expertd::element_bits(spec.element);
  m.row_bytes = bits == 4 ? size_t(spec.k + 1) / 2 : size_t(spec.k) * bits / 8;
  fill_codes(m);
  fill_scales(m);
  if (spec.global_scale)
    for (int i = 0; i < spec.experts * spec.segments; i++) m.global.push_back((0.5f + 0.25f * uniform()) * (spec.scale_type == EXPERTD_SCALE_E8M0 ? 0x1p105f : 1.0f));
  if (bias)
    for (int i = 0; i < spec.experts * m.g.blocks * 16; i++) m.bias.push_back(i / 16 % m.g.blocks / spec.segments * 16 + i % 16 < m.g.seg_rows ? uniform() : 0);
  if (permuted)
    for (int e = 0; e < spec.experts; e++)
      for (int k = 0; k < spec.k; k++) m.columns.push_back((k * 7 + e) % spec.k);  // 7 and k must have no common factor
  if (permuted || m.g.group != m.g.group_cols) {
    m.map.assign(size_t(spec.experts) * m.g.kp, -1);
    for (int e = 0; e < spec.experts; e++)
      for (int k = 0; k < spec.k; k++) m.map[size_t(e) * m.g.kp + m.g.packed_column(k)] = permuted ? m.columns[size_t(e) * spec.k + k] : k;
  }
  fill_dense(m);
  return m;
}

bool pack_and_back(expertd_context* context, Matrix& m) {
  int32_t kp = 0, blocks = 0;
  const int64_t size = expertd_cpu_stream_bytes(&m.spec, &kp, &blocks);
  m.stream = bytes(size_t(size));
  const expertd_canonical from{m.codes.get(), m.scale.get(), m.zero.get()};
  if (expertd_cpu_pack(context, &m.spec, &from, m.stream.get())) return false;
  const size_t n = m.row_bytes * m.spec.experts * m.spec.n, s = m.scales * m.g.scale_bytes;
  Bytes codes = bytes(n), scale = m.scale ? bytes(s) : nullptr, zero = m.zero ? bytes(m.scales) : nullptr;
  if (expertd_cpu_unpack(context, &m.spec, m.stream.get(), codes.get(), scale.get(), zero.get())) return false;
  return !std::memcmp(codes.get(), m.codes.get(), n) && (!scale || !std::memcmp(scale.get(), m.scale.get(), s)) &&
         (!zero || !std::memcmp(zero.get(), m.zero.get(), m.scales));
}

expertd_matrix view(const Matrix& m) {
  return {m.spec, m.stream.get(), m.bias.empty() ? nullptr : m.bias.data(), m.global.empty() ? nullptr : m.global.data(),
          m.map.empty() ? nullptr : m.map.data()};
}

float bias_of(const Matrix& m, int e, int n) {
  const int segment = n / m.g.seg_rows, row = n % m.g.seg_rows;
  return m.bias.empty() ? 0.0f : m.bias[(size_t(e) * m.g.blocks + row / 16 * m.spec.segments + segment) * 16 + row % 16];
}

float activation(const expertd_layer& l, float g, float u) {
  if (l.activation == EXPERTD_RELU2) return g > 0 ? g * g : 0;
  if (l.has_limit) g = std::fmin(g, l.limit), u = std::fmax(-l.limit, std::fmin(u, l.limit));
  switch (l.activation) {
    case EXPERTD_SILU: return g / (1 + std::exp(-g)) * u;
    case EXPERTD_GELU: return 0.5f * g * (1 + std::erf(g * 0.70710678f)) * u;
    case EXPERTD_GELU_TANH: return 0.5f * g * (1 + std::tanh(0.79788456f * (g + 0.044715f * g * g * g))) * u;
    default: return (u + l.beta) * g / (1 + std::exp(-l.alpha * g));
  }
}

// bf16: both matrices' inputs are rounded to bf16, as the kernels for dot products of bf16 pairs do.
std::vector<float> expected(const Matrix& a, const Matrix& b, const expertd_layer& l, const expertd_call& c, bool bf16) {
  const int H = a.spec.k, I = b.spec.k;
  const float* x = static_cast<const float*>(c.x);
  std::vector<float> out(size_t(c.m) * H, 0.0f), up(a.spec.n), h(I), row(H);
  for (int64_t route = 0; route < c.m * c.top_k; route++) {
    const int e = c.ids[route];
    if (e < 0) continue;
    const float w = c.weights[route], in = c.weight_on_input ? w : 1.0f;
    for (int k = 0; k < H; k++) row[k] = x[route / c.top_k * c.x_stride + k] * in;
    if (bf16) for (float& f : row) f = rounded_bf16(f);
    for (int n = 0; n < a.spec.n; n++) {
      double sum = 0;
      for (int k = 0; k < H; k++) sum += double(a.dense[(size_t(e) * a.spec.n + n) * H + k]) * row[k];
      up[n] = float(sum) + bias_of(a, e, n);
    }
    for (int i = 0; i < I; i++) h[i] = activation(l, up[i], a.spec.segments == 2 ? up[I + i] : 0);
    if (bf16) for (float& f : h) f = rounded_bf16(f);
    for (int n = 0; n < H; n++) {
      double sum = 0;
      for (int k = 0; k < I; k++) sum += double(b.dense[(size_t(e) * H + n) * I + k]) * h[k];
      out[route / c.top_k * H + n] += (c.weight_on_input ? 1.0f : w) * (float(sum) + bias_of(b, e, n));
    }
  }
  return out;
}

int failures = 0, cases = 0, tiled = 0;
std::string mistake;

void check(const std::string& what, double error, double most) {
  cases++;
  if (error <= most) return;
  failures++;
  std::printf("%s: relative error %g, want at most %g\n", what.c_str(), error, most);
}

struct Case {
  expertd_spec scheme;  // element, scale type, rows, cols, zeros, global scale
  int experts, hidden, intermediate, top_k, tokens, activation;
  bool bias, permuted, on_input;
  int only = -1;  // all tokens on this expert
  std::vector<int> rows = {};  // of each expert: one a token
};

expertd_context* create(const std::string& level, int threads) {
  expertd_context* context = nullptr;
  if (expertd_cpu_create(level.c_str(), threads, nullptr, nullptr, &context)) std::abort();
  return context;
}

bool has_tiles(const std::string& level) {
  expertd_context* context = create(level, 1);
  const bool has = context->level->tile_rows != 0;
  expertd_cpu_destroy(context);
  return has;
}

// Jobs of all small sizes: each unit is done once.
void check_pool(int threads) {
  expertd::Pool pool(threads, {});
  for (int n = 0; n < 120; n++) {
    std::vector<int> done(n, 0);
    int shared = 0;
    std::atomic<int> begun{0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    pool.run_even(n, [&](int unit, int) {
      done[unit]++;
      if (mistake != "race") return;
      begun.fetch_add(1, std::memory_order_relaxed);  // two units under way are two threads: one alone races with nobody
      while (threads > 1 && n > 1 && begun.load(std::memory_order_relaxed) < 2 && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
      shared++;
    });
    int wrong = 0;
    for (const int d : done) wrong += d != 1;
    check("pool of " + std::to_string(threads) + ", " + std::to_string(n) + " units", wrong, 0);
  }
}

// Weights rounded come near to themselves. Their bits are compared by tests/kernels/native/test_rounding.py.
void check_rounding(const std::string& level, int threads) {
  constexpr int kRows = 37, kColumns = 96, kBlock = 32, kBlocks = kRows * kColumns / kBlock;
  struct {
    int kind, scale_type, element;
    std::vector<float> tries;
    double most;
  } cases[] = {{EXPERTD_ROUND_INT4, EXPERTD_SCALE_BF16, EXPERTD_INT4, {8, 9}, 0.1},
               {EXPERTD_ROUND_INT4_ZEROS, EXPERTD_SCALE_F16, EXPERTD_INT4, {1, 0.9f}, 0.1},
               {EXPERTD_ROUND_MXFP4, EXPERTD_SCALE_E8M0, EXPERTD_E2M1, {0}, 0.2},
               {EXPERTD_ROUND_NVFP4, EXPERTD_SCALE_E4M3, EXPERTD_E2M1, {6, 5}, 0.15},
               {EXPERTD_ROUND_E4M3, EXPERTD_SCALE_F32, EXPERTD_E4M3, {1}, 0.05}};
  expertd_context* context = create(level, threads);
  for (const auto& c : cases) {
    for (const bool f32 : {false, true}) {
      const size_t row_bytes = expertd::is_nibble(c.element) ? kColumns / 2 : kColumns, scale_bytes = c.scale_type == EXPERTD_SCALE_F32 ? 4 : c.scale_type >= EXPERTD_SCALE_E8M0 ? 1 : 2;
      Bytes weights = bytes(size_t(kRows) * kColumns * (f32 ? 4 : 2)), codes = bytes(kRows * row_bytes), scales = bytes(kBlocks * scale_bytes);
      Bytes zeros = c.kind == EXPERTD_ROUND_INT4_ZEROS ? bytes(kBlocks) : nullptr;
      std::vector<float> w(size_t(kRows) * kColumns), second((kRows + 9) / 10, 0.5f);
      for (size_t i = 0; i < w.size(); i++) {
        w[i] = i < kBlock ? 0.0f : from_bits(uint32_t(to_bf16(uniform())) << 16);  // a block of zeros
        const uint16_t half = to_bf16(w[i]);
        std::memcpy(weights.get() + i * (f32 ? 4 : 2), f32 ? static_cast<const void*>(&w[i]) : &half, f32 ? 4 : 2);
      }
      const expertd_rounding r{weights.get(), codes.get(),  scales.get(), zeros.get(),      second.data(),           c.tries.data(),
                               kRows,         kColumns,     kBlock,       10,               c.kind,                  c.scale_type,
                               f32 ? EXPERTD_F32 : EXPERTD_BF16,          int32_t(c.tries.size())};
      check("rounding", expertd_cpu_round(context, &r), EXPERTD_OK);
      double error = 0, norm = 0;
      for (size_t i = 0; i < w.size(); i++) {
        const float number = code_value(c.element, codes.get() + i / kColumns * row_bytes, int(i % kColumns));
        const float zero = zeros ? zeros[i / kBlock] : c.element == EXPERTD_INT4 ? 8 : 0, s = scale_value(c.scale_type, scales.get(), i / kBlock);
        error += std::pow((number - zero) * s * (c.kind == EXPERTD_ROUND_NVFP4 ? 0.5f : 1.0f) - w[i], 2), norm += std::pow(w[i], 2);
      }
      check("rounding to kind " + std::to_string(c.kind) + " on " + level, std::sqrt(error / norm), c.most);
    }
  }
  expertd_cpu_destroy(context);
}

// A worker whose core was taken is noticed, and takes no part where fewer do. It is late by several times what the job had taken until then,
// three times: on a busy machine others are late as well.
void check_late_worker() {
  using Clock = std::chrono::steady_clock;
  constexpr int kThreads = 4;
  expertd::Pool pool(kThreads, {});
  std::mutex mutex;
  std::vector<std::thread::id> seen;
  std::thread::id slow;
  // Each thread takes one unit: none ends before all have begun.
  const auto together = [&](int threads, bool late) {
    std::atomic<int> begun{0};
    const auto start = Clock::now();
    seen.clear();
    pool.run_even(threads, [&](int, int number) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        seen.push_back(std::this_thread::get_id());
        if (late && number == 2) slow = seen.back();
      }
      begun++;
      while (begun < threads) std::this_thread::yield();
      if (late && std::this_thread::get_id() == slow) std::this_thread::sleep_for(std::chrono::milliseconds(30) + 5 * (Clock::now() - start));
    });
  };
  together(kThreads, false);
  pool.late_us();
  for (int i = 0; i < 3; i++) together(kThreads, true);
  check("a late worker is waited for, and that is said", pool.late_us() < 10e3, 0);
  pool.use(kThreads - 1);
  for (int i = 0; i < 20; i++) {
    together(kThreads - 1, false);
    check("the late worker takes part", std::count(seen.begin(), seen.end(), slow), 0);
  }
  pool.use(kThreads);
  together(kThreads, false);
  check("the late worker does not come back", std::count(seen.begin(), seen.end(), slow) != 1, 0);
}

// Calls on a made-up host of 16 cores, of which others take some: who waits for a thread on a taken core, waits long.
struct Host {
  expertd::Crew crew{16};
  int taken = 0, calls = 0, others = 0;  // others: calls with another number of threads than the best one
  void call(int best) {
    const int n = crew.size(), lost = std::max(0, n - (16 - taken));
    const double work = 1000.0 / n;
    crew.took(work + (lost ? 3000 : 0), 1000, lost ? 3000 : 0);
    calls++, others += n != best;
  }
  void settle(int best, int most) {
    for (int i = 0; i < most; i++) call(best);
    calls = others = 0;
    for (int i = 0; i < 20000; i++) call(best);
  }
};

void check_crew() {
  Host host;
  host.settle(16, 1);
  check("a quiet host: another number of threads is tried", host.others, 0);
  host.taken = 2;
  host.settle(14, 1000);
  check("two cores of 16 are taken: threads in use", std::abs(host.crew.chosen() - 14), 0);
  check("two cores of 16 are taken: calls that try others", double(host.others) / host.calls, 0.02);
  host.taken = 0;
  host.settle(16, 40000);
  check("the cores are free again: threads in use", std::abs(host.crew.chosen() - 16), 0);
  expertd::Crew two(2);  // both cores have a neighbour: half of each is more than half of one
  for (int i = 0; i < 5000; i++) two.took(two.size() == 2 ? 2000 : 3000, 1000, two.size() == 2 ? 900 : 0);
  check("threads of which fewer would be slower", std::abs(two.chosen() - 2), 0);
}

struct Found {
  size_t count, active;  // routes that are not -1, experts that have any
};
Found routes_of(const int32_t* ids, size_t n, int experts) {
  std::vector<int> rows(experts, 0);
  Found f{0, 0};
  for (size_t i = 0; i < n; i++)
    if (ids[i] >= 0) f.count++, f.active += !rows[ids[i]]++;
  return f;
}

void run(const Case& c, const std::string& level, int threads) {
  expertd_context *context = create(level, threads), *other = create(level, threads % 8 + 1);
  const int segments = c.activation == EXPERTD_RELU2 ? 1 : 2;
  expertd_spec s13 = c.scheme, s2 = c.scheme;
  s13.experts = s2.experts = c.experts;
  s13.n = segments * c.intermediate, s13.k = c.hidden, s13.segments = segments;
  s2.n = c.hidden, s2.k = c.intermediate, s2.segments = 1;
  Matrix a = make(s13, c.bias, c.permuted), b = make(s2, c.bias, c.permuted);
  const std::string name = level + " element " + std::to_string(c.scheme.element) + " H " + std::to_string(c.hidden) + " threads " + std::to_string(threads);
  check(name + " round trip", pack_and_back(context, a) && pack_and_back(context, b) ? 0 : 1, 0);
  if (mistake == "wrong") for (size_t i = 0; i < 256; i++) a.stream[i] ^= 1;
  const size_t routes = size_t(c.tokens) * c.top_k, skew = mistake == "misaligned";
  const size_t values = size_t(c.tokens) * c.hidden;
  std::unique_ptr<float[]> x(new float[values]), out(new float[values]), again(new float[values]), weights(new float[routes + skew]);
  std::unique_ptr<int32_t[]> ids(new int32_t[routes - (mistake == "overflow")]);
  for (size_t i = 0; i < values; i++) x[i] = uniform();
  for (size_t i = 0; i < routes + skew; i++) weights[i] = uniform();
  for (size_t i = 0; i < routes - (mistake == "overflow"); i++) ids[i] = c.only >= 0 ? c.only : int(next_random() % (c.experts + 1)) - 1;
  ids[0] = 0;
  for (int e = 0, i = 0; e < int(c.rows.size()); e++)
    for (const int end = i + c.rows[e]; i < end; i++) ids[i * 37 % c.tokens] = e;  // 37 and tokens must have no common factor
  const Found found = routes_of(ids.get(), routes - (mistake == "overflow"), c.experts);
  for (const int compute : {EXPERTD_COMPUTE_BF16, EXPERTD_COMPUTE_F32, EXPERTD_COMPUTE_INT8}) {
    if (compute == EXPERTD_COMPUTE_INT8 && c.scheme.element != EXPERTD_INT4) continue;
    const expertd_layer layer{view(a), view(b), c.activation, c.bias, 1.702f, 1.0f, 7.0f, compute, 0, c.tokens % 2 ? EXPERTD_SUBNORMALS_AVOID : EXPERTD_SUBNORMALS_KEEP};
    expertd_call call{x.get(), ids.get(), weights.get(), again.get(), c.tokens, c.hidden, c.top_k, 1, 1, c.on_input};
    for (size_t i = 0; i < values; i++) out[i] = again[i] = NAN;
    if (expertd_cpu_forward(other, &layer, &call)) std::abort();
    call.out = out.get();
    double error = 0, norm = 0;
    const bool tiles = expertd::use_tiles(*context->level, layer, a.g, b.g, int(found.count), int(found.active));
    const expertd::Path path = expertd::path_of(*context->level, compute, c.scheme.element, tiles, false);
    tiled += tiles;
    const std::vector<float> want = expected(a, b, layer, call, path == expertd::kBf16 || path == expertd::kBf16Tiles);
    // Of the router's weights: every level reads them one at a time, and hidden states by vectors that may lie anywhere.
    call.weights = reinterpret_cast<const float*>(reinterpret_cast<const char*>(weights.get()) + skew);
    if (expertd_cpu_forward(context, &layer, &call)) std::abort();
    check(name + ": another number of threads gives other bits", std::memcmp(out.get(), again.get(), values * sizeof(float)) != 0, 0);
    for (size_t i = 0; i < want.size(); i++) error += std::pow(double(out[i]) - want[i], 2), norm += std::pow(double(want[i]), 2);
    error = std::isfinite(error) ? std::sqrt(error / norm) : INFINITY;
    // kF32, kI16, kBytes (12 bits of int4's activations), kBf16, kI8, tiles. kBf16: an intermediate value may fall on the other side of a
    // rounding boundary.
    const double most[] = {1e-4, 5e-4, c.scheme.element == EXPERTD_INT4 ? 4e-3 : 5e-4, 2e-3, 6e-2, 5e-4, 2e-3};
    check(name + " compute " + std::to_string(compute), error, most[path]);
  }
  expertd_cpu_destroy(context);
  expertd_cpu_destroy(other);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) mistake = argv[1];
  const auto scheme = [](int element, int type, int rows, int cols, int zeros, int global) {
    return expertd_spec{element, type, 0, 0, 0, 0, rows, cols, zeros, global};
  };
  const expertd_spec schemes[] = {
      scheme(EXPERTD_INT4, EXPERTD_SCALE_BF16, 1, 32, 0, 0), scheme(EXPERTD_INT4, EXPERTD_SCALE_F16, 1, 20, 1, 0),
      scheme(EXPERTD_INT4, EXPERTD_SCALE_F32, 1, 0, 1, 0),   scheme(EXPERTD_INT8, EXPERTD_SCALE_BF16, 1, 128, 0, 0),
      scheme(EXPERTD_INT8, EXPERTD_SCALE_F32, 1, 0, 1, 1),   scheme(EXPERTD_E2M1, EXPERTD_SCALE_E8M0, 1, 32, 0, 0),
      scheme(EXPERTD_E2M1, EXPERTD_SCALE_E8M0, 1, 64, 0, 0), scheme(EXPERTD_E2M1, EXPERTD_SCALE_E8M0, 1, 32, 0, 1),
      scheme(EXPERTD_INT4, EXPERTD_SCALE_BF16, 1, 64, 1, 0), scheme(EXPERTD_INT4, EXPERTD_SCALE_BF16, 1, 128, 0, 0),
      scheme(EXPERTD_E2M1, EXPERTD_SCALE_E8M0, 1, 96, 0, 0), scheme(EXPERTD_E2M1, EXPERTD_SCALE_E8M0, 1, 248, 0, 0),
      scheme(EXPERTD_E2M1, EXPERTD_SCALE_E4M3, 1, 16, 0, 1), scheme(EXPERTD_E4M3, EXPERTD_SCALE_F32, 128, 128, 0, 0),
      scheme(EXPERTD_E4M3, EXPERTD_SCALE_F32, 24, 40, 0, 0), scheme(EXPERTD_E4M3, EXPERTD_SCALE_E8M0, 1, 32, 0, 0),
      scheme(EXPERTD_E4M3, EXPERTD_SCALE_F32, 0, 0, 0, 0),   scheme(EXPERTD_BF16, EXPERTD_SCALE_NONE, 1, 0, 0, 0),
      scheme(EXPERTD_F16, EXPERTD_SCALE_NONE, 1, 0, 0, 0),   scheme(EXPERTD_F32, EXPERTD_SCALE_NONE, 1, 0, 0, 0),
  };
  for (int threads = 1; threads <= 8; threads++) check_pool(threads);
  if (mistake == "race") return 0;  // nobody saw it
  check_late_worker();
  check_crew();
  std::string levels = expertd_cpu_levels();
  std::printf("levels: %s\n", levels.c_str());
  while (!levels.empty()) {
    const size_t comma = levels.find(',');
    const std::string level = levels.substr(0, comma);
    levels = comma == std::string::npos ? "" : levels.substr(comma + 1);
    check_rounding(level, 3);
    for (const expertd_spec& s : schemes) {
      run({s, 3, 264, 136, 2, 5, EXPERTD_SILU, false, false, false}, level, 1);
      if (mistake == "wrong") break;  // seen in one layer or not at all
      run({s, 2, 77, 45, 2, 33, EXPERTD_SWIGLUOAI, true, false, false}, level, 3);
      run({s, 3, 40, 17, 1, 9, EXPERTD_GELU, false, true, true}, level, 2);
      run({s, 2, 31, 50, 2, 1, EXPERTD_RELU2, true, false, false}, level, 1);
      run({s, 1, 16, 16, 1, 130, EXPERTD_GELU_TANH, false, true, false}, level, 2);
      run({s, 4, 136, 72, 1, 2, EXPERTD_SILU, true, false, false, 2}, level, 8);
      run({s, 4, 72, 40, 3, 3, EXPERTD_SWIGLUOAI, false, false, false}, level, 7);
      run({s, 3, 56, 33, 1, 27, EXPERTD_SILU, false, false, false, 1}, level, 5);
      if (has_tiles(level)) run({s, 5, 264, 72, 1, 82, EXPERTD_SILU, true, false, false, -1, {1, 15, 16, 17, 33}}, level, 3);
    }
  }
  std::printf("%d through matrix tiles\n", tiled);
  std::printf("%d passed, %d failed\n", cases - failures, failures);
  return failures ? 1 : 0;
}
