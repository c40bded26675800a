#pragma once
#include <memory>

#include "core/tensor.h"

// The CPU reference computes on fp32 matrices: decode inputs, loop over the definition, encode outputs.
namespace parka::cpu {

// A row-major fp32 working matrix. Contents undefined until written.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols)
      : rows_(rows),
        cols_(cols),
        data_(std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rows * cols))) {}
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  float* row(int64_t r) { return data_.get() + r * cols_; }
  const float* row(int64_t r) const { return data_.get() + r * cols_; }

 private:
  int64_t rows_, cols_;
  std::unique_ptr<float[]> data_;
};

// `count` elements of a plain or FP8 tensor from element `offset`, as fp32, without any scale.
void decode_elements(const TensorView& x, int64_t offset, int64_t count, float* out);
// Writes fp32 values to elements [offset, offset + count): rounds to nearest even, FP8 saturating, no scale.
void encode_elements(const float* values, int64_t offset, int64_t count, const TensorView& out);

// The values of a matrix, scales applied. Rank-1 tensors count as one row.
Matrix decode(const ScaledView& x);
// The same for rows [begin, begin + count) only, into out [count, cols].
void decode_rows(const ScaledView& x, int64_t begin, int64_t count, float* out);
// The codes of a matrix as numbers, scales left out.
Matrix decode_codes(const TensorView& x);

Matrix transposed(const Matrix& x);
// x_t [C, R] = codes of x [R, C], transposed and otherwise unchanged. One fp8 dtype for both.
void transpose_codes(const TensorView& x, const TensorView& x_t);

// Rounds x in place to what storing it as `dtype` (fp32 or bf16) and reading it back gives.
void round_to(DType dtype, Matrix& x);

// The largest magnitude; NaN is skipped.
float max_abs(const float* x, int64_t count);
float max_abs(const Matrix& x);
// The fp32 scale of a tensor with this maximum, by the rule of ops/quantize/quantize.h.
float tensor_scale(float amax, DType format);

enum class ScaleSource { kCompute, kGiven };
// Stores x in out's format and scaling by the rule of ops/quantize/quantize.h. kGiven: a kTensor scale is read, not
// written. Does nothing when out is empty.
void encode(const Matrix& x, const ScaledView& out, ScaleSource source = ScaleSource::kCompute);
// Stores row r of a matrix whose rows do not depend on each other: scaling kNone or kGroup.
void encode_row(const float* values, int64_t r, const ScaledView& out);
// Stores x in `out` and its transpose in `out_t`, either of which may be empty.
void encode_with_transpose(const Matrix& x, const ScaledView& out, const ScaledView& out_t,
                           ScaleSource source = ScaleSource::kCompute);

}  // namespace parka::cpu
