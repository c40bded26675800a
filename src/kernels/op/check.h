#pragma once
#include <initializer_list>
#include <string_view>

#include "core/tensor.h"

// Argument checks of ops/*.cpp: every message names the op and the tensor, and says what was given and wanted.
namespace parka {

// Throws Error(kInternal) unless t has this shape and one of these dtypes.
void check_tensor(std::string_view op, std::string_view name, const TensorView& t,
                  std::initializer_list<int64_t> shape, std::initializer_list<DType> dtypes);

// Throws Error(kInternal) unless t is a [rows, cols] matrix whose dtype, scaling and scale tensor fit together:
// plain fp32 or bf16, or fp8 with the scale that core/tensor.h describes for its scaling.
void check_matrix(std::string_view op, std::string_view name, const ScaledView& t, int64_t rows, int64_t cols);

// Throws Error(kInternal) if both views are given, are scaled per tensor, and do not share one scale.
void check_shared_scale(std::string_view op, const ScaledView& t, const ScaledView& t_transposed);

}  // namespace parka
