// What this processor can do and the system lets it, asked of both directly: the run-time library of ziglang's compiler answers every
// __builtin_cpu_supports with no.
#pragma once

namespace expertd {

struct Processor {
  bool avx2 = false;         // and FMA
  bool avx512 = false;       // F, BW, VL, DQ
  bool avx512_vnni = false;  // those and VNNI
  bool avx512_bf16 = false;  // those, VNNI and BF16
  bool avx512_vbmi = false;
  bool slow_subnormals = false;  // a product with a subnormal number takes microcode, hundreds of cycles (Intel)
};

const Processor& processor();

}  // namespace expertd
