// Matrix tiles of AMX: eight registers of 16 rows x 64 bytes. As assembly, because a tile's number is part of the instruction, and the
// compilers' intrinsics take it as a literal only. "memory": a tile reads what was stored before it.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <cpuid.h>

namespace expertd {
namespace {

struct AmxTiles {
  struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  // rows: of the tiles of activations (4, 5) and of sums (0..3); a product takes as many steps.
  static void configure(int rows) {
    alignas(64) Config config;
    for (int t = 0; t < 6; t++) config.rows[t] = uint8_t(rows);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static void release() { asm volatile("tilerelease"); }
  template <int T> static void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
  template <int T> static void load(const void* p, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
  }
  template <int T> static void store(void* p) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(size_t(64)) : "memory");
  }
  // Sums C += activations A times weights B. su: signed times unsigned bytes; uu: unsigned both.
  template <int C, int A, int B> static void dot_su() { asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
  template <int C, int A, int B> static void dot_uu() { asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
  template <int C, int A, int B> static void dot_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }

  // Whether the processor has tiles of bytes and of bf16, and the system lets this process use them.
  static bool allowed() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    if ((d & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8)) return false;
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA of asm/prctl.h
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }
};

}  // namespace
}  // namespace expertd
