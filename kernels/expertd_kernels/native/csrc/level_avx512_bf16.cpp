#define EXPERTD_AVX512_BF16
#include "simd_avx512.h"

#include "level_impl.h"
#include "processor.h"
#include "simd_amx.h"

namespace expertd {
namespace {

constexpr int kTilesFrom = 12;  // measured, docs/log/cpu-xeon.md

bool has_vnni() { return processor().avx512_vnni; }

bool has_vnni_and_vbmi() { return processor().avx512_vnni && processor().avx512_vbmi; }

bool has_bf16() { return processor().avx512_bf16; }

bool has_bf16_and_vbmi() { return processor().avx512_bf16 && processor().avx512_vbmi; }

bool has_tiles() {
  static const bool allowed = has_bf16_and_vbmi() && AmxTiles::allowed();
  return allowed;
}

}  // namespace

// The same instructions; which of them is faster is the maker's affair. On a Xeon of 2023 whole layers ran at 80 GFLOP/s a core with
// vdpbf16ps and at 208 Gop/s with vpdpwssd; on Zen 5 vdpbf16ps does twice the multiply-adds of the integer ones. The two levels without
// products of bf16 run where there is VNNI alone (Cascade Lake; with VBMI, Ice Lake): only tile_bf16() and peak() have such instructions.
const Level kAvx512Vnni = level<Avx512>("avx512_vnni", kI16, false, has_vnni);
const Level kAvx512Bf16 = level<Avx512>("avx512_bf16", kBf16, true, has_bf16);
const Level kAvx512Bytes = level<Avx512>("avx512_bytes", kBytes, true, has_bf16_and_vbmi);
const Level kAvx512BytesAhead = level<Avx512>("avx512_bytes_ahead", kBytes, false, has_vnni_and_vbmi, true);
const Level kAvx512Amx = level_with_tiles<Avx512, AmxTiles>("avx512_amx", kTilesFrom, has_tiles);

}  // namespace expertd
