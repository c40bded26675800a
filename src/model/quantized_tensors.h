#pragma once
#include <cstdint>
#include <iterator>

#include "core/config_fields.h"

namespace parka {

// The tensors of a block that a recipe may store in FP8, as telemetry tells them apart. Gradients are those of a
// linear layer's output, which its GEMMs read.
enum class QuantizedTensor : uint8_t {
  kAttentionNormInput,
  kAttentionNormOutput,
  kQkv,
  kAttention,
  kAttentionPostNormInput,
  kFfnNormInput,
  kFfnNormOutput,
  kUpGate,
  kSilu,
  kProduct,
  kFfnPostNormInput,
  kQkvWeight,
  kAttentionOutWeight,
  kUpGateWeight,
  kDownWeight,
  kQkvGradient,
  kAttentionOutGradient,
  kUpGateGradient,
  kDownGradient,
};

template <>
struct EnumNames<QuantizedTensor> {
  static constexpr EnumName<QuantizedTensor> kAll[] = {
      {QuantizedTensor::kAttentionNormInput, "attention_norm.input"},
      {QuantizedTensor::kAttentionNormOutput, "attention_norm.output"},
      {QuantizedTensor::kQkv, "qkv"},
      {QuantizedTensor::kAttention, "attention"},
      {QuantizedTensor::kAttentionPostNormInput, "attention_post_norm.input"},
      {QuantizedTensor::kFfnNormInput, "ffn_norm.input"},
      {QuantizedTensor::kFfnNormOutput, "ffn_norm.output"},
      {QuantizedTensor::kUpGate, "up_gate"},
      {QuantizedTensor::kSilu, "silu"},
      {QuantizedTensor::kProduct, "product"},
      {QuantizedTensor::kFfnPostNormInput, "ffn_post_norm.input"},
      {QuantizedTensor::kQkvWeight, "qkv.weight"},
      {QuantizedTensor::kAttentionOutWeight, "attention_out.weight"},
      {QuantizedTensor::kUpGateWeight, "up_gate.weight"},
      {QuantizedTensor::kDownWeight, "down.weight"},
      {QuantizedTensor::kQkvGradient, "qkv.gradient"},
      {QuantizedTensor::kAttentionOutGradient, "attention_out.gradient"},
      {QuantizedTensor::kUpGateGradient, "up_gate.gradient"},
      {QuantizedTensor::kDownGradient, "down.gradient"},
  };
};
inline constexpr int64_t kNumQuantizedTensors = std::size(EnumNames<QuantizedTensor>::kAll);

// Tokens of a micro-batch of which telemetry takes statistics.
inline constexpr int64_t kTelemetryRows = 512;

}  // namespace parka
