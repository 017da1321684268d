#define EXPERTD_AVX512_BF16
#include "simd_avx512.h"

#include "level_impl.h"
#include "processor.h"
#include "simd_amx.h"

namespace expertd {
namespace {

constexpr int kTilesFrom = 12;  // measured, docs/log/cpu-xeon.md

bool runs() { return processor().avx512_bf16; }

bool runs_with_bytes() { return processor().avx512_bf16 && processor().avx512_vbmi; }

bool runs_with_tiles() {
  static const bool allowed = runs_with_bytes() && AmxTiles::allowed();
  return allowed;
}

}  // namespace

// The same instructions; which of them is faster is the maker's affair. On a Xeon of 2023 whole layers ran at 80 GFLOP/s a core with
// vdpbf16ps and at 208 Gop/s with vpdpwssd; on Zen 5 vdpbf16ps does twice the multiply-adds of the integer ones.
const Level kAvx512Vnni = level<Avx512>("avx512_vnni", kI16, false, runs);
const Level kAvx512Bf16 = level<Avx512>("avx512_bf16", kBf16, true, runs);
const Level kAvx512Bytes = level<Avx512>("avx512_bytes", kBytes, true, runs_with_bytes);
const Level kAvx512BytesAhead = level<Avx512>("avx512_bytes_ahead", kBytes, false, runs_with_bytes, true);
const Level kAvx512Amx = level_with_tiles<Avx512, AmxTiles>("avx512_amx", kTilesFrom, runs_with_tiles);

}  // namespace expertd
