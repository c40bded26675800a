#pragma once
#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// y = x * m, or y += x * m, where m is 0 with probability p and else 1 / (1 - p), rounded to fp32: computed in fp32
// and rounded once to the dtype of y. m is a function of the element's place in the data, which is the same on any
// number of ranks: row t is token t % S of sequence first + (t / S) * stride of step's batch, with the numbers of
// `position`, and m is 0 where its word of dropout_words() is less than dropout_threshold(p).
struct Dropout {
  TensorView x;             // [T, K] fp32 or bf16, or [K, T] if transposed, in
  TensorView y;             // of the same shape and dtype, out or in/out; may be x where it does not accumulate
  TensorView position;      // [3] int32, none of them negative: step, first, stride, in
  int64_t sequence_length;  // S
  double probability;       // p, in [0, 1)
  uint64_t seed = 0;
  uint32_t stream = 0;  // of each use in a step its own
  bool accumulate = false;
  bool transposed = false;
};
PARKA_OP(dropout, Dropout);

inline uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(std::llround(std::ldexp(probability, 32)));
}
inline float dropout_factor(double probability) { return static_cast<float>(1 / (1 - probability)); }

// The random bits of columns [4 c, 4 c + 4) of a row, whose place in the batch is `row` = sequence * S + token, in
// a matrix of `chunks` = ceil(K / 4) such groups of columns.
PARKA_HOST_DEVICE inline std::array<uint32_t, 4> dropout_words(uint64_t seed, uint32_t stream, uint32_t step,
                                                               uint64_t row, uint64_t chunks, uint64_t c) {
  return philox4x32(seed, uint64_t{step} << 32 | stream, row * chunks + c);
}

}  // namespace parka
