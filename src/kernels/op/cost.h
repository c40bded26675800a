#pragma once
#include <initializer_list>
#include <string>

#include "core/tensor.h"
#include "kernels/device/op_timer.h"

// The terms of the costs of ops.
namespace parka {

double bytes_of(const TensorView& t);  // 0 for one that is not given
double bytes_of(const ScaledView& t);  // with its scales

template <typename... Tensors>
double all_bytes(const Tensors&... tensors) {
  return (bytes_of(tensors) + ...);
}

std::string shape_of(const TensorView& t);  // "8192 x 4096"

// True if the source of the codes is read again: a tensor-wide scale is known only when every number has been
// seen.
bool read_twice(const ScaledView& out, const ScaledView& out_t = {});

bool has_tensor_scale(const ScaledView& t);  // and is given

// The cost of an op without a GEMM.
OpCost moved(double bytes, const TensorView& shape);

}  // namespace parka
