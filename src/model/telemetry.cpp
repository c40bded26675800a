#include <algorithm>

#include "kernels/ops.h"
#include "model/pass.h"

// Statistics of what a micro-batch quantizes. Each is taken where the codes have just been made. Some originals are
// in memory there; the others exist within kernels only, and are computed again for the first rows, in a buffer of
// telemetry's own, with the same ops, which then write plain numbers. Nothing that the pass itself reads is
// written.
namespace parka {
namespace {

TensorView first_rows(const TensorView& x, int64_t count) { return x.empty() ? x : x.rows(0, count); }

// Scales of blocks of rows do not go with a part of them.
ScaledView first_rows(const ScaledView& x, int64_t count) {
  PARKA_REQUIRE(x.scaling != Scaling::kBlock);
  const TensorView scale = x.scaling == Scaling::kGroup ? x.scale.rows(0, count) : x.scale;
  return x.empty() ? x : ScaledView(x.data.rows(0, count), scale, x.scaling, x.group);
}

// Of the widest original that has to be computed again; 0 if none has.
int64_t buffer_width(const ModelConfig& model, const PrecisionConfig& precision, const Formats& formats) {
  const int64_t of_qkv = formats.qkv.scaling != Scaling::kNone ? model.d_qkv() : 0;
  const int64_t of_silu = precision.save_silu ? 2 * model.d_ffn : 0;
  const int64_t of_gemms = formats.fp8_gemm ? std::max(model.d_model, 2 * model.d_ffn) : 0;
  return std::max({of_qkv, of_silu, of_gemms});
}

}  // namespace

void Model::Pass::declare_telemetry(MemoryPlan& plan) {
  if (!precision_.has_fp8()) return;
  const int64_t rows = std::min(max_shape_.num_tokens(), kTelemetryRows);
  telemetry_.statistics = plan.add("telemetry", "quantization_statistics", DType::kF32,
                                   {config_.num_layers * kNumQuantizedTensors, QuantizationTotals::kCount});
  const int64_t width = buffer_width(config_, precision_, formats_);
  constexpr PhaseMask kSampled = kForwardAttention | kForwardFfn | kBackward;
  if (width > 0) telemetry_.buffer = plan.add("telemetry", "sample", DType::kF32, {rows, width}, kSampled);
  if (precision_.save_silu) telemetry_.ones = plan.add("telemetry", "ones", DType::kBF16, {rows, config_.d_ffn});
}

void Model::Pass::bind_telemetry(Device& device) {
  if (!telemetry_.ones.valid()) return;
  const TensorView ones = (*arena_)[telemetry_.ones];
  const std::vector<BFloat16> host(static_cast<size_t>(ones.numel()), encode_bf16(1.0f));
  device.copy_to_device(ones.as<BFloat16>(), host.data(), ones.bytes());
}

TensorView Model::Pass::telemetry_statistics() const { return (*arena_)[telemetry_.statistics]; }

void Model::Pass::start_sampling(Device& device) {
  const TensorView statistics = telemetry_statistics();
  if (statistics.empty()) return;
  device.fill_zero(statistics.data, statistics.bytes());
  sampled_rows_ = std::min(num_tokens_, kTelemetryRows);
  if (!formats_.fp8_gemm) return;
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    const BlockParameters& p = table_->blocks[l];
    for (const auto& [which, index] : {std::pair(QuantizedTensor::kQkvWeight, p.qkv),
                                       {QuantizedTensor::kAttentionOutWeight, p.attention_out},
                                       {QuantizedTensor::kUpGateWeight, p.up_gate},
                                       {QuantizedTensor::kDownWeight, p.down}}) {
      compare(device, l, which, weights_->plain(index), weights_->quantized(device, index));
    }
  }
}

TensorView Model::Pass::sample_buffer(int64_t cols) const {
  const TensorView whole = (*arena_)[telemetry_.buffer];
  PARKA_REQUIRE(sampled_rows_ * cols <= whole.numel());
  return {whole.data, DType::kF32, {sampled_rows_, cols}};
}

void Model::Pass::compare(Device& device, int64_t l, QuantizedTensor which, const TensorView& x,
                          const ScaledView& q) const {
  const TensorView totals = telemetry_statistics().rows(l * kNumQuantizedTensors + static_cast<int64_t>(which), 1);
  quantization_statistics(device, {.x = x, .q = q, .totals = totals.reshaped({QuantizationTotals::kCount})});
}

void Model::Pass::sample(Device& device, int64_t l, QuantizedTensor which, const TensorView& x,
                         const ScaledView& q) const {
  if (sampled_rows_ == 0 || q.scaling == Scaling::kNone) return;
  compare(device, l, which, first_rows(x, sampled_rows_), first_rows(q, sampled_rows_));
}

void Model::Pass::sample_norm(Device& device, int64_t l, const NormBuffers& norm, int weight, QuantizedTensor input,
                              QuantizedTensor output) const {
  if (sampled_rows_ == 0) return;
  const int64_t T = num_tokens_, d = config_.d_model;
  const TensorView residual = tensor(norm.residual, T, d);
  const ScaledView x = matrix(norm.x, T, d);
  sample(device, l, input, residual, x);
  if (!formats_.fp8_gemm) return;
  const TensorView y = sample_buffer(d);
  norm_recompute(device, {.kind = config_.norm,
                          .x = first_rows(x.empty() ? ScaledView(residual) : x, sampled_rows_),
                          .weight = weights_->plain(weight),
                          .mean = first_rows(vector(norm.mean, T), sampled_rows_),
                          .rstd = first_rows(vector(norm.rstd, T), sampled_rows_),
                          .y = y});
  sample(device, l, output, y, matrix(norm.y, T, d));
}

TensorView Model::Pass::sample_turned(Device& device, const TensorView& qkv, const ScaledView& saved) const {
  if (sampled_rows_ == 0 || saved.empty()) return {};
  const TensorView turned = sample_buffer(config_.d_qkv());
  quantize(device, {.x = first_rows(qkv, sampled_rows_), .out = turned});
  rope_forward(device, {.qkv = turned,
                        .cos_sin = cos_sin_.rows(0, shape_.sequence_length),
                        .num_heads = config_.num_heads,
                        .num_kv_heads = config_.kv_heads(),
                        .saved = {}});
  return turned;
}

void Model::Pass::sample_ffn(Device& device, int64_t l, const TensorView& up_gate_plain) const {
  if (sampled_rows_ == 0) return;
  const BlockBuffers& b = activations_.blocks[l];
  const int64_t T = num_tokens_, f = config_.d_ffn;
  const ScaledView up_gate = matrix(b.up_gate, T, 2 * f), silu = matrix(b.silu, T, f);
  sample(device, l, QuantizedTensor::kUpGate, up_gate_plain, up_gate);
  if (!silu.empty()) {
    // d_up = d_product silu(gate): with ones for d_product the first f columns are what was quantized.
    const TensorView d_up_gate = sample_buffer(2 * f);
    swiglu_backward(device, {.up_gate = first_rows(up_gate, sampled_rows_),
                             .d_product = first_rows((*arena_)[telemetry_.ones], sampled_rows_),
                             .d_up_gate = d_up_gate});
    sample(device, l, QuantizedTensor::kSilu, d_up_gate, silu);
  }
  if (!formats_.fp8_gemm) return;
  const TensorView product = sample_buffer(f);
  swiglu_backward(
      device,
      {.up_gate = first_rows(up_gate, sampled_rows_), .silu = first_rows(silu, sampled_rows_), .product = product});
  sample(device, l, QuantizedTensor::kProduct, product, matrix(b.product, T, f));
}

void Model::Pass::sample_up_gate_gradient(Device& device, int64_t l) const {
  if (sampled_rows_ == 0 || !formats_.fp8_gemm) return;
  const BlockBuffers& b = activations_.blocks[l];
  const BackwardBuffers& w = activations_.backward;
  const int64_t T = num_tokens_, f = config_.d_ffn;
  const TensorView d_up_gate = sample_buffer(2 * f);
  swiglu_backward(device, {.up_gate = first_rows(matrix(b.up_gate, T, 2 * f), sampled_rows_),
                           .silu = first_rows(matrix(b.silu, T, f), sampled_rows_),
                           .d_product = first_rows(tensor(w.d_product, T, f), sampled_rows_),
                           .d_up_gate = d_up_gate});
  sample(device, l, QuantizedTensor::kUpGateGradient, d_up_gate, matrix(w.d_up_gate, T, 2 * f));
}

}  // namespace parka
