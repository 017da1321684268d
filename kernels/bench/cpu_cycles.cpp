// Cycles for 64 bytes of codes of one pair of blocks that stays in the caches, for each level that runs here, element and number of
// rows: a line "level element rows path cycles" each. Built by cpu_mca.py.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "context.h"

using namespace expertd;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kColumns = 1024, kTimes = 40;

double seconds_of(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Cycles a second now, by additions that wait for each other: one a cycle on every x86.
double cycles_a_second() {
  constexpr int kRounds = 20000;
  uint64_t sum = 0;
  const auto start = Clock::now();
  for (int i = 0; i < kRounds; i++)
    asm volatile("add $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0\n\tadd $1, %0" : "+r"(sum));
  return kRounds * 8 / seconds_of(start);
}

struct Case {
  const char* name;
  int element, scale_type, rows, cols;
};
constexpr Case kCases[] = {{"int4_g128", EXPERTD_INT4, EXPERTD_SCALE_BF16, 1, 128},
                           {"mxfp4", EXPERTD_E2M1, EXPERTD_SCALE_E8M0, 1, 32},
                           {"int8_g128", EXPERTD_INT8, EXPERTD_SCALE_BF16, 1, 128},
                           {"e4m3_block128", EXPERTD_E4M3, EXPERTD_SCALE_F32, 128, 128}};

void fill(const Geometry& g, uint8_t* pair) {
  uint32_t state = 1;
  for (size_t i = 0; i < 2 * g.block_bytes; i++) {
    state = state * 1664525 + 1013904223;
    pair[i] = uint8_t(state >> 24) & 0x7E;
  }
  for (size_t at = 0; at < 2 * g.header_bytes; at += g.scale_bytes) {  // about 1
    const float one = 1.0f;
    if (g.scale_bytes == 1) pair[at] = 127;
    else std::memcpy(pair + at, reinterpret_cast<const uint8_t*>(&one) + (4 - g.scale_bytes), g.scale_bytes);
  }
}

void measure(const Level& level, const Case& c, int rows) {
  Geometry g;
  if (!geometry_of({c.element, c.scale_type, 1, 2 * kRows, kColumns, 1, c.rows, c.cols, 0, 0}, g)) return;
  const Path path = path_of(level, EXPERTD_COMPUTE_BF16, c.element, false);
  Buffer memory[7];
  uint8_t* pair = memory[0].get<uint8_t>(2 * g.block_bytes + 4096);
  fill(g, pair);
  Rows r{};
  r.stride = row_bytes(path, g) / 64 * 64 + 128;
  r.data = memory[1].get<uint8_t>(r.stride * rows);
  r.pieces = g.pieces;
  const size_t pieces = size_t(g.pieces) * rows;
  r.scales = memory[2].get<float>(pieces * parts_of(g.piece));
  r.sums = memory[3].get<float>(pieces);
  r.starts = memory[4].get<int32_t>(pieces);
  std::vector<float> x(g.kp + 16);
  for (int i = 0; i < g.kp; i++) x[i] = float(i % 13) - 6.5f;
  std::vector<int32_t> index(rows);
  for (int m = 0; m < rows; m++) {
    index[m] = m;
    if (path == kF32) std::memcpy(r.data + m * r.stride, x.data(), sizeof(float) * g.kp);
    else level.round_row(path, g, x.data(), r, m);
  }
  BlockRun run{};
  run.first.g = &g;
  run.first.pair = pair;
  run.first.nb = 2;
  run.first.factor[0] = run.first.factor[1] = 1.0f;
  run.first.scales = memory[5].get<float>(size_t(2) * g.groups * kRows);
  run.first.rows = &r;
  run.first.index = index.data();
  run.first.n = rows;
  run.first.out = memory[6].get<float>(size_t(rows) * 2 * kRows);
  run.blocks = 2;
  const double vectors = 2.0 * g.kp / g.per_lane;
  double least = 1e30, rate = 0;  // a neighbour makes times longer and rates lower, never the other way round
  for (int round = 0; round < 200; round++) {
    rate = std::max(rate, cycles_a_second());
    const auto start = Clock::now();
    for (int i = 0; i < kTimes; i++) level.gemm(path, run);
    least = std::min(least, seconds_of(start) / kTimes);
  }
  std::printf("%s %s %d %d %.2f\n", level.name, c.name, rows, int(path), least * rate / vectors);
}

}  // namespace

int main(int n, char** levels) {
  for (int i = 1; i < n; i++) {
    const Level* level = find_level(levels[i]);
    for (const Case& c : kCases)
      for (int rows : {1, 4})
        if (level) measure(*level, c, rows);
  }
  return 0;
}
