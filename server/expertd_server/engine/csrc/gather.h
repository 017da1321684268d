// Tensors of requests <-> tensors of a batch, on the host: conversion between element types, global expert ids to slots
// with their checks.  Nothing here allocates.
#pragma once

#include <cstdint>

#include "core.h"
#include "e4m3.h"

namespace expertd {

// n elements of one row-major tensor.  from: f32, f16, bf16, or e4m3 with f32 scales of 128 columns of rows of
// `columns`; to: bf16 or f32.
void load_floats(void* to, uint8_t to_dtype, const void* from, uint8_t from_dtype, const float* scales, uint64_t rows,
                 uint64_t columns);

// Of [rows, columns] in memory, e4m3 with its scales.
inline uint64_t tensor_bytes(uint8_t dtype, uint64_t rows, uint64_t columns) {
  return dtype == kE4m3 ? e4m3::bytes_of(rows, columns) : rows * columns * size_of(dtype);
}

// from: bf16 or f32; to: f32, f16 or bf16, rounded to nearest even, or e4m3.
void store_floats(void* to, uint8_t to_dtype, const void* from, uint8_t from_dtype, uint64_t rows, uint64_t columns);

struct Bad {
  bool any = false, weight = false;  // which tensor
  uint32_t row = 0, column = 0;
  double value = 0;
  bool hidden = false;  // hidden states, instead of ids or weights
};

// [rows, columns] of bf16 or f32, after their conversion to what the experts read.  kRefuse: the first that is NaN or
// infinite is said, and all become 0; kZero: those that are become 0.
void settle_floats(void* x, uint8_t dtype, uint64_t rows, uint64_t columns, uint8_t policy, Bad* bad);

// Ids [M, k] and weights [M, k] of one request into [M, wide] slots and weights; what is behind column k gets -1 and 0.
// On a bad id or weight every slot of the request becomes -1 and every weight 0, and what was bad is said.
// Where something is bad already, the same.  Returns the routes that experts here serve; counts[slot] grows by them.
uint32_t load_routes(const Forward& f, const LayerFacts& layer, uint32_t wide, int32_t* slots, float* weights,
                     uint64_t* counts, uint8_t policy, Bad* bad);

// For what a device found bad: the value at its row and column, as the caller's memory has it now; 0 where that is good
// (it was changed meanwhile), or not this processor's to read.
double bad_value(const Forward& f, const LayerFacts& layer, const Bad& bad);

// The same tensors for a device, which checks and maps ids itself: ids as i32 (one that i32 cannot hold as INT32_MIN).
void load_ids(const Forward& f, int32_t* ids, float* weights, uint8_t policy);

}  // namespace expertd
