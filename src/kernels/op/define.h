#pragma once
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/tensor.h"
#include "kernels/device/device.h"
#include "kernels/op/op.h"

// The pieces with which ops/*.cpp define an op: checks of its arguments, its cost, and its dispatch.
namespace parka {

// ---- Checks: every message names the op and the tensor, and says what was given and wanted ----

// Throws Error(kInternal) unless t has this shape and one of these dtypes.
void check_tensor(std::string_view op, std::string_view name, const TensorView& t,
                  std::initializer_list<int64_t> shape, std::initializer_list<DType> dtypes);

// Throws Error(kInternal) unless t is a [rows, cols] matrix whose dtype, scaling and scale tensor fit together:
// plain fp32 or bf16, or fp8 with the scale that core/tensor.h describes for its scaling.
void check_matrix(std::string_view op, std::string_view name, const ScaledView& t, int64_t rows, int64_t cols);

// Throws Error(kInternal) if both views are given, are scaled per tensor, and do not share one scale.
void check_shared_scale(std::string_view op, const ScaledView& t, const ScaledView& t_transposed);

// ---- Costs ----

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

// ---- Dispatch ----

template <typename Args, typename Run>
void run_op(Device& device, const char* op, const Args& args, const Run& run) {
  if (OpRecorder* recorder = device.op_recorder()) {
    recorder->record(op, cost_of(args), workspace_of(args));
    return;
  }
  OpTimer* timer = device.op_timer();
  if (timer) timer->begin(op, cost_of(args));
  run();
  if (timer) timer->end();
}

}  // namespace parka

// How ops/*.cpp reach an implementation: after its checks, `PARKA_DISPATCH(rmsnorm, device, a)` calls
// cpu::rmsnorm(device, a) or cuda::rmsnorm(device, a). A macro because it pastes the op's name.
#ifdef PARKA_CUDA
#define PARKA_DISPATCH(op, device, args)                 \
  ::parka::run_op(device, #op, args, [&] {               \
    if ((device).kind() == ::parka::DeviceKind::kCuda) { \
      cuda::op(device, args);                            \
    } else {                                             \
      cpu::op(device, args);                             \
    }                                                    \
  })
#else
#define PARKA_DISPATCH(op, device, args) ::parka::run_op(device, #op, args, [&] { cpu::op(device, args); })
#endif
