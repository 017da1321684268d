// Stored scales and zero points of a block as f32.
#pragma once
#include "level.h"

namespace expertd {
namespace {

// Magnitudes of a shorter float at the place of f32's exponent and mantissa -> their values, `more` being the difference of the exponents'
// biases. No operand is subnormal: `n` is right for normal numbers, 2 n minus the least normal number for the others, and the right one is
// the lesser.
template <class V>
typename V::F widened(typename V::I bits, int more) {
  const typename V::I bias = V::bcasti(more << 23);
  const typename V::F n = V::cast(V::addi(bits, bias)), least = V::cast(V::addi(bias, V::bcasti(1 << 23)));
  return V::min(n, V::fma(n, V::bcastf(2.0f), V::sub(V::bcastf(0.0f), least)));
}

// V::W stored scales as f32, bit for bit; e8m0 code 0 is the subnormal 2^-127.
template <class V, int TYPE>
typename V::F load_scales(const uint8_t* p) {
  using I = typename V::I;
  if constexpr (TYPE == EXPERTD_SCALE_F32) {
    return V::cast(V::loadi(p));
  } else if constexpr (TYPE == EXPERTD_SCALE_BF16) {
    return V::cast(V::template sll<16>(V::load_u16(p)));
  } else if constexpr (TYPE == EXPERTD_SCALE_F16) {
    const I h = V::load_u16(p), sign = V::template sll<16>(V::andi(h, V::bcasti(0x8000)));
    return V::cast(V::ori(V::bits(widened<V>(V::template sll<13>(V::andi(h, V::bcasti(0x7FFF))), 112)), sign));
  } else if constexpr (TYPE == EXPERTD_SCALE_E4M3) {
    const I b = V::load_u8(p), sign = V::template sll<24>(V::andi(b, V::bcasti(0x80)));
    return V::cast(V::ori(V::bits(widened<V>(V::template sll<20>(V::andi(b, V::bcasti(0x7F))), 120)), sign));
  } else {
    return V::cast(V::maxi(V::template sll<23>(V::load_u8(p)), V::bcasti(0x00400000)));
  }
}

constexpr int stored_bytes(int type) {
  return type == EXPERTD_SCALE_F32 ? 4 : type == EXPERTD_SCALE_F16 || type == EXPERTD_SCALE_BF16 ? 2 : 1;
}

// n scales, a multiple of 16, times factor.
template <class V, int TYPE>
void expand_scales(const uint8_t* p, int n, float factor, float* scales) {
  const typename V::F f = V::bcastf(factor);
  for (int i = 0; i < n; i += 16) {
#pragma GCC unroll 2
    for (int r = i; r < i + 16; r += V::W) {
      const typename V::F scale = load_scales<V, TYPE>(p + r * stored_bytes(TYPE));
      V::storef(scales + r, V::mul(scale, f));
    }
  }
}

template <class V>
void stored_scales(int type, const uint8_t* p, int n, float factor, float* scales) {
  switch (type) {
    case EXPERTD_SCALE_F32: return expand_scales<V, EXPERTD_SCALE_F32>(p, n, factor, scales);
    case EXPERTD_SCALE_F16: return expand_scales<V, EXPERTD_SCALE_F16>(p, n, factor, scales);
    case EXPERTD_SCALE_BF16: return expand_scales<V, EXPERTD_SCALE_BF16>(p, n, factor, scales);
    case EXPERTD_SCALE_E8M0: return expand_scales<V, EXPERTD_SCALE_E8M0>(p, n, factor, scales);
    default: return expand_scales<V, EXPERTD_SCALE_E4M3>(p, n, factor, scales);
  }
}

// Header of one block -> scales and minus_zeros [groups][16] f32. factor: global scale times a power of two (scale_factor in level.h).
template <class V>
void prepare(const Geometry& g, const uint8_t* block, float factor, float* scales, float* minus_zeros) {
  const int element = g.spec.element, n = g.groups * kRows;
  if (!g.scale_bytes) {
    for (int i = 0; i < n; i++) scales[i] = factor;
  } else if (g.lanes == kRows) {
    stored_scales<V>(g.spec.scale_type, block, n, factor, scales);
  } else {  // one scale a group, into the front; then spread from the back
    for (int i = 0; i < g.groups; i += kRows) {
      uint8_t part[kRows * 4] = {};
      const int left = g.groups - i < kRows ? g.groups - i : kRows;
      __builtin_memcpy(part, block + size_t(i) * g.scale_bytes, size_t(left) * g.scale_bytes);
      float values[kRows];
      stored_scales<V>(g.spec.scale_type, part, kRows, factor, values);
      for (int c = 0; c < left; c++)
        for (int r = 0; r < kRows; r += V::W) V::storef(scales + size_t(i + c) * kRows + r, V::bcastf(values[c]));
    }
  }
  if (!g.spec.zeros) return;
  const uint8_t* z = block + size_t(g.groups) * g.lanes * g.scale_bytes;
  for (int i = 0; i < n; i += V::W) {
    if (g.lanes != kRows) {
      const int code = z[i / kRows];
      V::storef(minus_zeros + i, V::bcastf(-float(element == EXPERTD_INT8 ? int8_t(code) : code)));
      continue;
    }
    typename V::I code = V::load_u8(z + i);
    if (element == EXPERTD_INT8) code = V::template sra<24>(V::template sll<24>(code));
    V::storef(minus_zeros + i, V::sub(V::bcastf(0.0f), V::cvt(code)));
  }
}

template <class V>
void prepare_all(const BlockArgs& a) {
  const Geometry& g = *a.g;
  const size_t lanes = size_t(g.groups) * kRows;
  for (int b = 0; b < a.nb; b++) {
    prepare<V>(g, a.pair + b * g.header_bytes, a.factor[b], a.scales + b * lanes, a.minus_zeros ? a.minus_zeros + b * lanes : nullptr);
  }
}

}  // namespace
}  // namespace expertd
