#include "model/formats.h"

namespace parka {
namespace {

constexpr int64_t kBlockSize = 128;  // of fp8_block: 1x128 activations and gradients, 128x128 weights

}  // namespace

Formats::Formats(const PrecisionConfig& config) {
  compute = {config.compute, Scaling::kNone, 0, DType::kF32};
  activation = weight = gradient = logits_gradient = compute;
  switch (config.gemm) {
    case GemmPrecision::kCompute: break;
    case GemmPrecision::kFp8Tensor:
      activation = weight = {kForwardFormat, Scaling::kTensor, 0, DType::kF32};
      gradient = {config.backward_format, Scaling::kTensor, 0, DType::kF32};
      break;
    case GemmPrecision::kFp8Block:
      activation = {kForwardFormat, Scaling::kGroup, kBlockSize, DType::kF32};
      weight = {kForwardFormat, Scaling::kBlock, kBlockSize, DType::kF32};
      gradient = {config.backward_format, Scaling::kGroup, kBlockSize, DType::kF32};
      break;
  }
  fp8_gemm = config.gemm != GemmPrecision::kCompute;
  fp8_head = fp8_gemm && config.head == Storage::kFp8;
  fp8_tower = fp8_gemm && config.tower == Storage::kFp8;
  samples_gradient_amax =
      config.sampled_amax && gradient.scaling == Scaling::kTensor && gradient.dtype == DType::kE5M2;
  if (fp8_head) {
    logits_gradient = gradient;
    // Probabilities span more powers of two than E4M3 has under one scale.
    if (gradient.scaling == Scaling::kTensor) logits_gradient.dtype = DType::kE5M2;
  }
  const Format group = {kForwardFormat, Scaling::kGroup, config.group_size, DType::kBF16};
  norm_input = config.norm_input == Storage::kFp8 ? group : compute;
  up_gate = config.up_gate == Storage::kFp8 ? group : compute;
  qkv = config.qkv == Storage::kFp8 ? group : compute;
  silu = group;
}

ScaledView MatrixId::view(const Arena& arena, int64_t rows, int64_t cols) const {
  if (!valid()) return {};
  TensorView codes = arena[data];
  PARKA_REQUIRE(rows * cols <= codes.numel());
  codes = TensorView(codes.data, codes.dtype, {rows, cols});
  if (format.scaling == Scaling::kNone) return codes;
  TensorView scales = arena[scale];
  if (format.scaling != Scaling::kTensor) {
    const auto shape = scale_shape(format.scaling, format.group, rows, cols);
    PARKA_REQUIRE(shape[0] * shape[1] <= scales.numel());
    scales = TensorView(scales.data, scales.dtype, {shape[0], shape[1]});
  }
  return {codes, scales, format.scaling, format.group};
}

MatrixId add_matrix(MemoryPlan& plan, const std::string& category, const std::string& name, const Format& format,
                    int64_t rows, int64_t cols, PhaseMask phases, TensorId shared_scale) {
  MatrixId matrix;
  matrix.format = format;
  matrix.data = plan.add(category, name, format.dtype, {rows, cols}, phases);
  if (format.scaling == Scaling::kTensor) {
    matrix.scale =
        shared_scale.valid() ? shared_scale : plan.add(category, name + ".scale", DType::kF32, {1}, phases);
  } else if (format.scaling != Scaling::kNone) {
    const auto shape = scale_shape(format.scaling, format.group, rows, cols);
    matrix.scale = plan.add(category, name + ".scale", format.scale_dtype, {shape[0], shape[1]}, phases);
  }
  return matrix;
}

}  // namespace parka
