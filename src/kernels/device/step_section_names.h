#pragma once
#include "core/config_fields.h"
#include "kernels/device/op_timer.h"

// Not in op_timer.h, which CUDA sources include: nvcc cannot compile fmt.
namespace parka {

template <>
struct EnumNames<StepSection> {
  static constexpr EnumName<StepSection> kAll[] = {
      {StepSection::kNone, ""},
      {StepSection::kEmbedding, "embedding"},
      {StepSection::kBlockForward, "block forward"},
      {StepSection::kHead, "head"},
      {StepSection::kBlockBackward, "block backward"},
      {StepSection::kOptimizer, "optimizer"},
      {StepSection::kTelemetry, "telemetry"},
  };
};

}  // namespace parka
