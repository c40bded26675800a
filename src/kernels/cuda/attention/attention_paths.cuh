#pragma once
#include <cstdint>
#include <type_traits>

#include "core/error.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/ops/attention/attention.h"

// The implementations that attention.cu chooses from.
namespace parka::cuda {

// B sequences of S rows; H query heads and Hkv key/value heads of width D.
struct AttentionDims {
  int B, S, H, Hkv, D;
  bool causal;

  template <typename Args>
  explicit AttentionDims(const Args& a)
      : B(static_cast<int>(a.qkv.dim[0] / a.sequence_length)),
        S(static_cast<int>(a.sequence_length)),
        H(static_cast<int>(a.num_heads)),
        Hkv(static_cast<int>(a.num_kv_heads)),
        D(static_cast<int>(a.qkv.dim[1] / (a.num_heads + 2 * a.num_kv_heads))),
        causal(a.causal) {}

  __host__ __device__ int group() const { return H / Hkv; }                    // query heads per key/value head
  __host__ __device__ int key_end(int i) const { return causal ? i + 1 : S; }  // behind the last key of row i
  __host__ __device__ int64_t qkv_stride() const { return int64_t{H + 2 * Hkv} * D; }
  __host__ __device__ int64_t out_stride() const { return int64_t{H} * D; }
  // First element of a head's row i of sequence b. In the QKV buffer key head g is H + g, value head g H + Hkv + g.
  __host__ __device__ int64_t qkv_row(int b, int i, int head) const {
    return (int64_t{b} * S + i) * qkv_stride() + int64_t{head} * D;
  }
  __host__ __device__ int64_t out_row(int b, int i, int head) const {
    return (int64_t{b} * S + i) * out_stride() + int64_t{head} * D;
  }
  // The place of a row's log-sum-exp and of whatever else there is one of per query.
  __host__ __device__ int64_t query(int b, int i, int head) const { return (int64_t{b} * H + head) * S + i; }
};

// Null where rows see their sequence from its beginning.
template <typename Args>
const int32_t* first_keys(const Args& a) {
  return a.first_key.empty() ? nullptr : a.first_key.template as<int32_t>();
}

// A row attends to the rows before it and itself, those of its document or window among them, or to all rows.
enum class Mask { kCausal, kDocuments, kNone };

// The head width of 72, that of SigLIP's so400m, is padded to this in shared memory and registers: whole fragments.
constexpr int kPaddedHeadDim = 80, kHeadDimToPad = 72;

// Calls f with a head width of the tensor-core kernels and the mask, as types.
template <typename Args, typename F>
void with_mma_form(const Args& a, const F& f) {
  const int D = AttentionDims(a).D;
  const auto with_mask = [&](auto width) {
    if (!a.causal) return f(width, std::integral_constant<Mask, Mask::kNone>{});
    if (a.first_key.empty()) return f(width, std::integral_constant<Mask, Mask::kCausal>{});
    f(width, std::integral_constant<Mask, Mask::kDocuments>{});
  };
  if (D == 64) return with_mask(std::integral_constant<int, 64>{});
  if (D == 128) return with_mask(std::integral_constant<int, 128>{});
  using Padded = std::integral_constant<int, kPaddedHeadDim>;
  if (D == kHeadDimToPad && !a.causal) return f(Padded{}, std::integral_constant<Mask, Mask::kNone>{});
  PARKA_REQUIRE(D == 256 && a.causal);
  using Wide = std::integral_constant<int, 256>;
  if (a.first_key.empty()) return f(Wide{}, std::integral_constant<Mask, Mask::kCausal>{});
  f(Wide{}, std::integral_constant<Mask, Mask::kDocuments>{});
}

// The fate of gradients in backward kernels.
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

// bf16 on tensor cores: causal with D of 64, 128 or 256, over all keys with D of 64, 72 (backward without cos_sin)
// or 128; scale > 0, tensors aligned to 16 bytes. Backward raises d_qkv_amax.
void attention_forward_mma(CudaDevice& device, const AttentionForward& a);
void attention_backward_mma(CudaDevice& device, const AttentionBackward& a);

// The same on compute capability 9.0, causal with D of 64 or 128.
void attention_forward_sm90(CudaDevice& device, const AttentionForward& a);
void attention_backward_sm90(CudaDevice& device, const AttentionBackward& a);

// Per query and head, what the score gradient needs. For rows of a tile past the end all of it is zero, and so are
// their queries and d_out: they add nothing.
struct alignas(8) RowStatistics {
  float lse_log2;  // log-sum-exp in units of log 2: p = exp2(scale_log2 * q . k - lse_log2)
  float delta;     // d_out . out
};
// Computes those of all queries, at AttentionDims::query, for calls that attention_backward_mma takes.
void compute_row_statistics(CudaDevice& device, const AttentionBackward& a, RowStatistics* statistics);

// Refuses heads of D that are too wide for a GPU.
void check_head_dim(int64_t D);
// *amax = max |out|
void find_out_amax(CudaDevice& device, const char* op, const TensorView& out, const TensorView& amax);

// fp32 or bf16, in fp32 arithmetic; D up to kMaxGpuHeadDim. Backward raises d_qkv_amax.
void attention_forward_generic(CudaDevice& device, const AttentionForward& a);
void attention_backward_generic(CudaDevice& device, const AttentionBackward& a);

}  // namespace parka::cuda
