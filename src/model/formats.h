#pragma once
#include "core/memory/memory_plan.h"
#include "core/tensor.h"
#include "kernels/device/arena.h"
#include "model/model_config.h"

namespace parka {

// A number format with its scaling: what a ScaledView is made of, before there is memory.
struct Format {
  DType dtype = DType::kBF16;
  Scaling scaling = Scaling::kNone;
  int64_t group = 0;
  DType scale_dtype = DType::kF32;
};

// The format of weights and activations in FP8.
inline constexpr DType kForwardFormat = DType::kE4M3;

// The format of rows of `cols` in INT8 (kernels/ops/gemm/int8.h).
inline Format int8_rows(int64_t cols) { return {DType::kI8, Scaling::kGroup, cols, DType::kF32}; }

// The format of every kind of tensor under a precision config. docs/precision.md says why each is what it is.
struct Formats {
  Format compute;                         // residual stream, attention, everything that is not FP8
  Format activation;                      // inputs of the blocks' linear layers
  Format weight;                          // weights of the blocks' linear layers
  Format gradient;                        // output gradients of the blocks' linear layers
  Format logits_gradient;                 // the head's output gradient
  Format norm_input, up_gate, silu, qkv;  // what is kept for backward
  bool fp8_gemm = false;                  // FP8 GEMMs need transposed copies: their operands are K-major only
  bool fp8_head = false;                  // the head's, too
  bool fp8_tower = false;                 // and those of a vision tower's blocks
  bool samples_gradient_amax = false;     // precision.sampled_amax, where gradients have the format for it

  explicit Formats(const PrecisionConfig& config);

  // Inputs and output gradients of a linear layer, whose products are FP8 or not.
  const Format& input_of(bool is_fp8) const { return is_fp8 ? activation : compute; }
  const Format& gradient_of(bool is_fp8) const { return is_fp8 ? gradient : compute; }
  // True if weights have FP8 codes with one scale for a whole tensor, which can be moved as they are.
  bool has_tensor_scales() const { return fp8_gemm && weight.scaling == Scaling::kTensor; }
};

// A matrix declared in a MemoryPlan: codes and scale. The scale of a kTensor matrix may be shared with another.
struct MatrixId {
  TensorId data;
  TensorId scale;
  Format format;

  bool valid() const { return data.valid(); }
  // The first `rows` x `cols` of it as a dense matrix; the buffer may have been declared larger (a shorter batch).
  ScaledView view(const Arena& arena, int64_t rows, int64_t cols) const;
};

// Declares a [rows, cols] matrix in `format`. For kTensor scaling `shared_scale` is used if it is valid.
MatrixId add_matrix(MemoryPlan& plan, const std::string& category, const std::string& name, const Format& format,
                    int64_t rows, int64_t cols, PhaseMask phases, TensorId shared_scale = {});

}  // namespace parka
