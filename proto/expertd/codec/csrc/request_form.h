#pragma once

#include <cstdint>

namespace expertd::wire {

// What is the same in many requests; encode.py packs it.
struct TensorForm {
  int32_t dtype;
  uint32_t spelling;  // number of the field of Tensor.data
  uint32_t rows, columns, block;
};
struct RequestForm {
  int32_t output_dtype, output_form;
  uint32_t weight_on_input;
  TensorForm hidden, ids, weights;
};

}  // namespace expertd::wire
