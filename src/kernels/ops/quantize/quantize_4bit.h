#pragma once
#include "core/formats_4bit.h"
#include "core/tensor.h"
#include "kernels/op/op.h"

// Weights in 4 bits, as bitsandbytes stores them: a tensor is taken as its N elements in row-major order, in blocks
// of block_size (a power of two from 32 to 4096; the last block may be short) that have one scale each.
namespace parka {

inline constexpr int64_t kSmallestBlock4Bit = 32, kLargestBlock4Bit = 4096;
inline constexpr int64_t kNestedBlock = 256;  // scales that share a scale of theirs
inline constexpr int64_t kMostTensors4Bit = 65535;

// For each block: absmax = max |x|; t = x * (1 / absmax), both in fp32; code = that of the value nearest to t
// (core/formats_4bit.h). If 1 / absmax is infinite, all codes are that of zero. A block with a NaN or an infinity
// gets the absmax NaN, so that all of it decodes to NaN.
struct Quantize4Bit {
  TensorView x;       // [N] fp32 or bf16, in
  TensorView codes;   // [ceil(N / 2)] uint8, out
  TensorView absmax;  // [ceil(N / block_size)] fp32, out
  Format4Bit format = Format4Bit::kNf4;
  int64_t block_size = 64;
};
PARKA_OP(quantize_4bit, Quantize4Bit);

// Scales in 8 bits ("double quantization"): offset = the mean of absmax; y = absmax - offset; for each 256 of them
// nested_absmax = max |y|; code = that of the value of `map` nearest to y * (1 / nested_absmax), the lower one of
// two; 1 / nested_absmax counts as 0 where it is infinite. The sum is made in fp64, in the same order on every
// device. A NaN makes the offset NaN, so that all scales decode to NaN. Of P tensors of equal size, one after the
// other, each has its own offset, and the 256 begin anew.
struct QuantizeAbsmax {
  TensorView absmax;         // [P B] fp32, in
  TensorView map;            // [256] fp32, in rising order, in
  TensorView codes;          // [P B] uint8, out
  TensorView nested_absmax;  // [P ceil(B / 256)] fp32, out
  TensorView offset;         // [P] fp32, out
};
PARKA_OP(quantize_absmax, QuantizeAbsmax);

// out = value of the code * scale of the block, multiplied in fp32 and rounded once to the dtype of out. The scale
// is absmax, or if that is in 8 bits, map[absmax] * nested_absmax + offset, each operation rounded to fp32. The
// scales in 8 bits may be those of P tensors (QuantizeAbsmax), each of whole blocks.
struct Dequantize4Bit {
  TensorView codes;               // [ceil(N / 2)] uint8, in
  TensorView absmax;              // [ceil(N / block_size)] fp32 or uint8, in
  TensorView map = {};            // [256] fp32, in; this and the next two with absmax in uint8 alone
  TensorView nested_absmax = {};  // [P ceil(ceil(N / P / block_size) / 256)] fp32, in
  TensorView offset = {};         // [P] fp32, in
  TensorView out;                 // [N] fp32 or bf16, out
  Format4Bit format = Format4Bit::kNf4;
  int64_t block_size = 64;
};
PARKA_OP(dequantize_4bit, Dequantize4Bit);

}  // namespace parka
