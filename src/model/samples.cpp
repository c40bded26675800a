#include "model/samples.h"

#include <algorithm>
#include <vector>

#include "kernels/ops/quantize/quantization_statistics.h"
#include "model/buffer_scope.h"
#include "model/phases.h"

namespace parka {

void Samples::add(Device& device, int64_t block, QuantizedTensor which, const TensorView& x, const ScaledView& q,
                  bool is_more) const {
  if (!active() || q.scaling == Scaling::kNone) return;
  add_whole(device, block, which, first_rows(x), first_rows(q), is_more);
}

void Samples::add(Device& device, int64_t block, const SwigluForward& a, const TensorView& projected,
                  bool is_more) const {
  if (!active()) return;
  const int64_t f = a.product.data.dim[1];
  add(device, block, QuantizedTensor::kUpGate, projected, a.up_gate, is_more);
  if (!a.silu.empty()) {
    // d_up = d_product act(gate): with ones for d_product the first f columns are what was quantized.
    const TensorView d_up_gate = buffer(2 * f);
    swiglu_backward(device, {.up_gate = first_rows(a.up_gate),
                             .d_product = ones(f),
                             .d_up_gate = d_up_gate,
                             .activation = a.activation});
    add(device, block, QuantizedTensor::kSilu, d_up_gate, a.silu, is_more);
  }
  if (a.product.scaling == Scaling::kNone) return;
  const TensorView product = buffer(f);
  swiglu_backward(device, {.up_gate = first_rows(a.up_gate),
                           .silu = first_rows(a.silu),
                           .product = product,
                           .activation = a.activation,
                           .row_factor = first_rows(a.row_factor)});
  add(device, block, QuantizedTensor::kProduct, product, a.product, is_more);
}

void Samples::add(Device& device, int64_t block, const SwigluBackward& a, bool is_more) const {
  if (!active() || a.d_up_gate.scaling == Scaling::kNone) return;
  const TensorView d_up_gate = buffer(a.d_up_gate.data.dim[1]);
  swiglu_backward(device, {.up_gate = first_rows(a.up_gate),
                           .silu = first_rows(a.silu),
                           .d_product = first_rows(a.d_product),
                           .d_up_gate = d_up_gate,
                           .activation = a.activation,
                           .row_factor = first_rows(a.row_factor)});
  add(device, block, QuantizedTensor::kUpGateGradient, d_up_gate, a.d_up_gate, is_more);
}

void Samples::add_whole(Device& device, int64_t block, QuantizedTensor which, const TensorView& x,
                        const ScaledView& q, bool is_more) const {
  const TensorView totals = statistics_.rows(block * kNumQuantizedTensors + static_cast<int64_t>(which), 1);
  quantization_statistics(
      device, {.x = x, .q = q, .totals = totals.reshaped({QuantizationTotals::kCount}), .accumulate = is_more});
}

void Samples::add_attention(Device& device, int64_t block, const AttentionBackward& a) const {
  if (attention_.empty()) return;
  attention_statistics(device, {.qkv = a.qkv,
                                .out = a.out,
                                .d_out = a.d_out,
                                .lse = a.lse,
                                .totals = attention_.rows(block, 1).reshaped({AttentionTotals::kCount}),
                                .rows = rows_,
                                .sequence_length = a.sequence_length,
                                .num_heads = a.num_heads,
                                .num_kv_heads = a.num_kv_heads,
                                .scale = a.scale,
                                .first_key = a.first_key,
                                .window = a.window,
                                .causal = a.causal});
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

TensorView Samples::ones(int64_t cols) const {
  PARKA_REQUIRE(rows_ * cols <= ones_.numel());
  return {ones_.data, ones_.dtype, {rows_, cols}};
}

void SampleBuffers::declare(int64_t num_blocks, int64_t tokens, bool quantizes, const SampleNeeds& needs,
                            MemoryPlan& plan) {
  attention_id_ = plan.add("telemetry", "attention_statistics", DType::kF32, {num_blocks, AttentionTotals::kCount});
  if (!quantizes) return;
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
  attention_ = arena[attention_id_];
  buffer_ = arena[buffer_id_];
  ones_ = arena[ones_id_];
  if (ones_.empty()) return;
  const std::vector<BFloat16> host(static_cast<size_t>(ones_.numel()), encode_bf16(1.0f));
  device.copy_to_device(ones_.as<BFloat16>(), host.data(), ones_.bytes());
}

Samples SampleBuffers::start(Device& device, int64_t tokens) const {
  if (attention_.empty()) return {};
  if (!statistics_.empty()) device.fill_zero(statistics_.data, statistics_.bytes());
  return {std::min(tokens, kTelemetryRows), statistics_, attention_, buffer_, ones_};
}

}  // namespace parka
