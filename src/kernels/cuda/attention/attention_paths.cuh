#pragma once
#include <cstdint>
#include <type_traits>

#include "core/error.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/ops/attention.h"

// The implementations that attention.cu chooses from.
namespace parka::cuda {

// B sequences of S rows; H query heads and Hkv key/value heads of width D.
struct AttentionDims {
  int B, S, H, Hkv, D;

  template <typename Args>
  explicit AttentionDims(const Args& a)
      : B(static_cast<int>(a.qkv.dim[0] / a.sequence_length)),
        S(static_cast<int>(a.sequence_length)),
        H(static_cast<int>(a.num_heads)),
        Hkv(static_cast<int>(a.num_kv_heads)),
        D(static_cast<int>(a.qkv.dim[1] / (a.num_heads + 2 * a.num_kv_heads))) {}

  __host__ __device__ int group() const { return H / Hkv; }  // query heads per key/value head
  __host__ __device__ int64_t qkv_stride() const { return int64_t{H + 2 * Hkv} * D; }
  __host__ __device__ int64_t out_stride() const { return int64_t{H} * D; }
  // First element of a head's row i of sequence b. In the fused QKV buffer key head g is head H + g and value head
  // g is head H + Hkv + g.
  __host__ __device__ int64_t qkv_row(int b, int i, int head) const {
    return (int64_t{b} * S + i) * qkv_stride() + int64_t{head} * D;
  }
  __host__ __device__ int64_t out_row(int b, int i, int head) const {
    return (int64_t{b} * S + i) * out_stride() + int64_t{head} * D;
  }
  // Of a row's log-sum-exp and of whatever else there is one of per query.
  __host__ __device__ int64_t query(int b, int i, int head) const { return (int64_t{b} * H + head) * S + i; }
};

// Null where rows see their sequence from its beginning.
template <typename Args>
const int32_t* first_keys(const Args& a) {
  return a.first_key.empty() ? nullptr : a.first_key.template as<int32_t>();
}

// Calls f with a head width of the tensor-core kernels, as a type.
template <typename F>
void with_mma_head_dim(int D, const F& f) {
  switch (D) {
    case 64: f(std::integral_constant<int, 64>{}); return;
    case 128: f(std::integral_constant<int, 128>{}); return;
    case 256: f(std::integral_constant<int, 256>{}); return;
    default: PARKA_REQUIRE(!"a head width of the tensor-core kernels");
  }
}

// What backward kernels do with gradients.
template <typename T>
struct GradientOutput {
  T* d_qkv;
  const float* cos_sin;  // null: queries and keys are not rotated back
  float* amax;           // null: not wanted

  explicit GradientOutput(const AttentionBackward& a)
      : d_qkv(a.d_qkv.as<T>()),
        cos_sin(a.cos_sin.empty() ? nullptr : a.cos_sin.as<float>()),
        amax(a.d_qkv_amax.empty() ? nullptr : a.d_qkv_amax.as<float>()) {}
};

// bf16 on tensor cores: D of 64, 128 or 256, scale > 0, tensors aligned to 16 bytes. Backward raises d_qkv_amax.
void attention_forward_mma(CudaDevice& device, const AttentionForward& a);
void attention_backward_mma(CudaDevice& device, const AttentionBackward& a);

// The same on compute capability 9.0, for D of 64 or 128.
void attention_forward_sm90(CudaDevice& device, const AttentionForward& a);
void attention_backward_sm90(CudaDevice& device, const AttentionBackward& a);

// Per query and head, what the score gradient needs. For rows of a tile past the end all of it is zero, and so are
// their queries and d_out: they add nothing.
struct alignas(8) RowStatistics {
  float lse_log2;  // log-sum-exp in units of log 2: p = exp2(scale_log2 * q . k - lse_log2)
  float delta;     // d_out . out
};
// Of all queries, at AttentionDims::query, for D of 64, 128 or 256.
void compute_row_statistics(CudaDevice& device, const AttentionBackward& a, RowStatistics* statistics);

// fp32 or bf16, in fp32 arithmetic; D up to kGenericMaxHeadDim. Backward raises d_qkv_amax.
constexpr int64_t kGenericMaxHeadDim = 512;
void attention_forward_generic(CudaDevice& device, const AttentionForward& a);
void attention_backward_generic(CudaDevice& device, const AttentionBackward& a);

}  // namespace parka::cuda
