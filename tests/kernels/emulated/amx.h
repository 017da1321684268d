// The matrix tiles that csrc/simd_amx.h uses, for processors without them: what each instruction is defined to do, in plain C++. Eight
// tiles of 16 rows x 64 bytes a thread; those of activations and sums have as many rows as configured. As in avx512.h, bf16 subnormals count as zero, inputs and results alike.
#pragma once
#include <cstdlib>

#include "avx512.h"

#pragma GCC push_options
#pragma GCC optimize("O2")
namespace emulated {

struct Tiles {
  union Tile {
    int32_t i[16][16];
    float f[16][16];
    uint8_t u[16][64];
    int8_t s[16][64];
    uint16_t h[16][32];
  };
  static Tile& tile(int n) {
    static thread_local Tile tiles[8];
    return tiles[n];
  }
  static bool& configured() {
    static thread_local bool is = false;
    return is;
  }
  static Tile& use(int n) {  // without a configuration the processor faults
    if (!configured()) std::abort();
    return tile(n);
  }
  static int& height() {
    static thread_local int rows = 0;
    return rows;
  }
  static int rows_of(int n) { return n < 6 ? height() : 16; }
  static void configure(int rows) {
    if (rows < 1 || rows > 16) std::abort();
    configured() = true;
    height() = rows;
    for (int t = 0; t < 8; t++) tile(t) = Tile{};
  }
  static void release() {
    for (int t = 0; t < 8; t++) tile(t) = Tile{};
    configured() = false;
  }
  template <int T> static void zero() { use(T) = Tile{}; }
  template <int T> static void load(const void* p, size_t stride) { copy(use(T), const_cast<void*>(p), stride, rows_of(T), true); }
  template <int T> static void store(void* p) { copy(use(T), p, 64, rows_of(T), false); }
  template <int C, int A, int B> static void dot_su() {
    const Tile &a = use(A), &b = use(B);
    dot(use(C), 64, [&](int m, int n, int k) { return int32_t(a.s[m][k]) * b.u[k / 4][4 * n + k % 4]; });
  }
  template <int C, int A, int B> static void dot_uu() {
    const Tile &a = use(A), &b = use(B);
    dot(use(C), 64, [&](int m, int n, int k) { return int32_t(a.u[m][k]) * b.u[k / 4][4 * n + k % 4]; });
  }
  template <int C, int A, int B> static void dot_bf16() { add_bf16(use(C), use(A), use(B)); }

 private:
  static void copy(Tile& t, void* p, size_t stride, int rows, bool in) {
    for (int r = 0; r < rows; r++) {
      char* at = static_cast<char*>(p) + r * stride;
      __builtin_memcpy(in ? static_cast<void*>(t.u[r]) : at, in ? at : static_cast<const void*>(t.u[r]), 64);
    }
  }
  template <class F>
  static void dot(Tile& c, int depth, const F& product) {
    for (int m = 0; m < 16; m++)
      for (int n = 0; n < 16; n++)
        for (int k = 0; k < depth; k++) c.i[m][n] += product(m, n, k);
  }
  static void add_bf16(Tile& c, const Tile& a, const Tile& b) {
    for (int m = 0; m < 16; m++)
      for (int k = 0; k < 16; k++)
        for (int n = 0; n < 16; n++) {
          const float odd = flushed(__builtin_fmaf(bf16(a.h[m][2 * k + 1]), bf16(b.h[k][2 * n + 1]), flushed(c.f[m][n])));
          c.f[m][n] = flushed(__builtin_fmaf(bf16(a.h[m][2 * k]), bf16(b.h[k][2 * n]), odd));
        }
  }
};

}  // namespace emulated
#pragma GCC pop_options
