#include "model/samples.h"

#include <vector>

#include "kernels/ops/quantization_statistics.h"
#include "model/phases.h"

namespace parka {

void Samples::add(Device& device, int64_t block, QuantizedTensor which, const TensorView& x,
                  const ScaledView& q) const {
  if (!active() || q.scaling == Scaling::kNone) return;
  add_whole(device, block, which, first_rows(x), first_rows(q));
}

void Samples::add_whole(Device& device, int64_t block, QuantizedTensor which, const TensorView& x,
                        const ScaledView& q) const {
  const TensorView totals = statistics_.rows(block * kNumQuantizedTensors + static_cast<int64_t>(which), 1);
  quantization_statistics(device, {.x = x, .q = q, .totals = totals.reshaped({QuantizationTotals::kCount})});
}

// Scales of blocks of rows do not go with a part of them.
ScaledView Samples::first_rows(const ScaledView& x) const {
  PARKA_REQUIRE(x.scaling != Scaling::kBlock);
  const TensorView scale = x.scaling == Scaling::kGroup ? x.scale.rows(0, rows_) : x.scale;
  return x.empty() ? x : ScaledView(x.data.rows(0, rows_), scale, x.scaling, x.group);
}

TensorView Samples::buffer(int64_t cols) const {
  PARKA_REQUIRE(rows_ * cols <= buffer_.numel());
  return {buffer_.data, DType::kF32, {rows_, cols}};
}

void SampleBuffers::declare(int64_t num_blocks, int64_t tokens, const SampleNeeds& needs, MemoryPlan& plan) {
  const int64_t rows = std::min(tokens, kTelemetryRows);
  statistics_id_ = plan.add("telemetry", "quantization_statistics", DType::kF32,
                            {num_blocks * kNumQuantizedTensors, QuantizationTotals::kCount});
  constexpr PhaseMask kSampled = kForwardAttention | kForwardFfn | kBackward;
  if (needs.buffer_cols > 0) {
    buffer_id_ = plan.add("telemetry", "sample", DType::kF32, {rows, needs.buffer_cols}, kSampled);
  }
  if (needs.ones_cols > 0) ones_id_ = plan.add("telemetry", "ones", DType::kBF16, {rows, needs.ones_cols});
}

void SampleBuffers::bind(Device& device, const Arena& arena) {
  statistics_ = arena[statistics_id_];
  buffer_ = arena[buffer_id_];
  ones_ = arena[ones_id_];
  if (ones_.empty()) return;
  const std::vector<BFloat16> host(static_cast<size_t>(ones_.numel()), encode_bf16(1.0f));
  device.copy_to_device(ones_.as<BFloat16>(), host.data(), ones_.bytes());
}

Samples SampleBuffers::start(Device& device, int64_t tokens) const {
  if (statistics_.empty()) return {};
  device.fill_zero(statistics_.data, statistics_.bytes());
  return {std::min(tokens, kTelemetryRows), statistics_, buffer_, ones_};
}

}  // namespace parka
