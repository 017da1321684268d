// What the codes of weights become in a panel (panels.h): numbers of bf16, where it is exact with their scales.
#pragma once
#include "tiles.h"

namespace expertd {
namespace {

// As ByteCodes in tiles.h: numbers of bf16, without their scales.
template <class V, int EL>
struct Bf16Codes {
  static constexpr int kInput = bf16_step(EL), kVectors = bf16_positions(EL), kColumns = 2 * kVectors;
  Bf16Pairs<V, EL> pairs;
  explicit Bf16Codes(const BlockArgs& a) : pairs(a.g->spec.zeros) {}
  template <int I>
  typename V::I get(const uint8_t* from, size_t step, int) const { return pairs.template get<I>(from, step); }
  void next() {}
};

// Numbers of e2m1 with their scales, powers of two from kLeast to kMost as e8m0. A number is in the table as twice its value, times 2^-100,
// so that it stays normal; its zeros become 2^-27 of the least number instead, which no sum of f32 can tell from zero.
template <class V, int NB>
class FoldedCodes {
 public:
  static constexpr int kInput = 1, kVectors = 4, kColumns = 8, kLeast = 27, kMost = 227;
  explicit FoldedCodes(const BlockArgs& a) : scales_(a.pair), header_(a.g->header_bytes), group_(a.g->group) {
    static constexpr uint16_t kLow[16] = {0x0000, 0x0D80, 0x0E00, 0x0E40, 0x0E80, 0x0EC0, 0x0F00, 0x0F40,
                                          0x8000, 0x8D80, 0x8E00, 0x8E40, 0x8E80, 0x8EC0, 0x8F00, 0x8F40};
    table_ = V::table16(kLow);
    next_group();
  }
  template <int I>
  typename V::I get(const uint8_t* from, size_t, int b) const {
    return V::add16(V::lookup16(table_, V::template srl16<4 * I>(V::loadi(from))), exponents_[b]);
  }
  void next() {
    if ((left_ -= kColumns) <= 0) next_group();
  }

 private:
  void next_group() {
    for (int b = 0; b < NB; b++) {
      const typename V::I e = V::template sll<7>(V::addi(V::load_u8(scales_ + b * header_), V::bcasti(-kLeast)));
      exponents_[b] = V::ori(e, V::template sll<16>(e));
    }
    scales_ += kRows;
    left_ = group_;
  }

  typename V::I table_, exponents_[NB];
  const uint8_t* scales_;  // of the next group
  size_t header_;
  int group_, left_ = 0;  // columns of a group, and of the present one that are left
};

// Whether all scales of a pair can become part of its numbers, and its rows lie as one run: no piece but the last has gaps.
template <class V>
bool scales_fold(const BlockArgs& a) {
  using Codes = FoldedCodes<V, 1>;
  const Geometry& g = *a.g;
  if (g.spec.scale_type != EXPERTD_SCALE_E8M0 || g.lanes != kRows || g.piece % 32 || (g.groups > 1 && g.group % g.piece)) return false;
  typename V::I beyond = V::bcasti(0);
  for (int b = 0; b < a.nb; b++)
    for (int i = 0; i < g.groups; i++) {
      const typename V::I e = V::load_u8(a.pair + b * g.header_bytes + i * kRows);
      beyond = V::maxi(beyond, V::maxi(V::addi(e, V::bcasti(-Codes::kMost)), V::subi(V::bcasti(Codes::kLeast), e)));
    }
  alignas(64) int32_t lanes[V::W];
  V::storei(lanes, beyond);
  return *std::max_element(lanes, lanes + V::W) == 0;
}

}  // namespace
}  // namespace expertd
