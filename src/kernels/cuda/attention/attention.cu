#include "kernels/ops/attention/attention.h"

#include <initializer_list>
#include <string>
#include <string_view>

#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"

namespace parka::cuda {
namespace {

// True if the tensor-core kernels take this call. `tensors` are those they access 16 bytes at a time.
template <typename Args>
bool suits_mma(const Args& a, std::initializer_list<TensorView> tensors, const TensorView& cos_sin = {}) {
  const int64_t D = AttentionDims(a).D;
  const bool has_width = D == 64 || D == 128 || (a.causal ? D == 256 : D == kHeadDimToPad && cos_sin.empty());
  // They take the maximum of the scores before scaling them.
  if (a.qkv.dtype != DType::kBF16 || !has_width || !(a.scale > 0.0f)) return false;
  for (const TensorView& t : tensors) {
    if (!is_aligned(t.data, 16)) return false;
  }
  return true;
}

// True if those for compute capability 9.0 do: they are there, heads are not wide, and later keys are masked.
template <typename Args>
bool runs_sm90_kernels(const CudaDevice& device, const Args& a) {
  constexpr bool kBuilt = std::string_view(PARKA_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;
  return kBuilt && a.causal && AttentionDims(a).D <= 128 && device.properties().major == 9 &&
         device.properties().minor == 0;
}

}  // namespace

void check_head_dim(int64_t D) {
  if (D <= kMaxGpuHeadDim) return;
  throw Error(ExitCode::kBadInput, "attention on a GPU takes heads of up to " + std::to_string(kMaxGpuHeadDim) +
                                       " columns, not " + std::to_string(D) + ": use more heads");
}

void find_out_amax(CudaDevice& device, const char* op, const TensorView& out, const TensorView& amax) {
  check(cudaMemsetAsync(amax.data, 0, sizeof(float), device.stream()), op);
  with_plain_type(out.dtype, [&](auto x) {
    find_amax(device, PlainSource<decltype(x)>(out), out.dim[0], out.dim[1], amax.as<float>());
  });
}

void attention_forward(Device& device, const AttentionForward& a) {
  CudaDevice& cuda = as_cuda(device);
  if (suits_mma(a, {a.qkv, a.out})) {
    if (runs_sm90_kernels(cuda, a)) {
      attention_forward_sm90(cuda, a);  // finds out_amax, too
      return;
    }
    attention_forward_mma(cuda, a);
  } else {
    check_head_dim(AttentionDims(a).D);
    attention_forward_generic(cuda, a);
  }
  if (!a.out_amax.empty()) find_out_amax(cuda, "attention_forward", a.out, a.out_amax);
}

void attention_backward(Device& device, const AttentionBackward& a) {
  CudaDevice& cuda = as_cuda(device);
  if (!a.d_qkv_amax.empty()) {
    check(cudaMemsetAsync(a.d_qkv_amax.data, 0, sizeof(float), cuda.stream()), "attention_backward");
  }
  if (suits_mma(a, {a.qkv, a.out, a.d_out, a.d_qkv, a.cos_sin, a.scratch}, a.cos_sin)) {
    auto* const backward = runs_sm90_kernels(cuda, a) ? attention_backward_sm90 : attention_backward_mma;
    backward(cuda, a);
  } else {
    check_head_dim(AttentionDims(a).D);
    attention_backward_generic(cuda, a);
  }
}

}  // namespace parka::cuda
