#include "model/coded_weights.h"

#include <algorithm>

#include "core/parallel.h"
#include "kernels/ops/quantize/quantize_4bit.h"
#include "model/phases.h"
#include "model/weights.h"

namespace parka {
namespace {

Format4Bit format_of(BaseFormat base) {
  PARKA_REQUIRE(is_4bit(base));
  return base == BaseFormat::kNf4 ? Format4Bit::kNf4 : Format4Bit::kFp4;
}

// The matrices of a weight in 4 bits, each with scales of its own: gate, up and down of each expert, as
// bitsandbytes has them. q, k and v are one.
int64_t num_matrices(const ParameterInfo& p) {
  return p.role == ParameterRole::kExperts ? static_cast<int64_t>(p.fused_rows.size()) : 1;
}

// The phases in which weights are decoded: those in 4 bits for every GEMM, FP8 codes for evaluation in bf16 alone.
// A weight that a block decodes when it runs again stays until the second branch has gone backward.
PhaseMask decoding_phases(bool any_4bit, bool runs_again) {
  if (!any_4bit) return kEvaluation;
  const PhaseMask again = runs_again ? kRerun | kBackwardSwiglu | kBackwardNorm : PhaseMask{0};
  return kEvaluation | kBlockForward | kBackwardLinear | again;
}

}  // namespace

CodedWeights::CodedWeights(const std::vector<ParameterInfo>& parameters, DType compute, bool runs_again,
                           MemoryPlan& plan)
    : parameters_(parameters), ids_(parameters.size()) {
  constexpr const char* kCategory = "coded weights";
  std::array<int64_t, kNumBuffers> largest = {};
  int64_t largest_4bit = 0;
  int unit = -1, in_unit = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    if (!p.is_coded()) continue;
    in_unit = p.unit == unit ? in_unit + 1 : 0;
    unit = p.unit;
    ids_[i].buffer = runs_again ? in_unit % kNumBuffers : 0;
    int64_t& of_buffer = largest[static_cast<size_t>(ids_[i].buffer)];
    of_buffer = std::max(of_buffer, p.numel());
    if (!is_4bit(p.base)) continue;
    largest_4bit = std::max(largest_4bit, p.numel());
    const int64_t blocks = ceil_div(p.numel(), kBlock4Bit), matrices = num_matrices(p);
    ids_[i].codes = plan.add(kCategory, p.name + ".codes", DType::kU8, {ceil_div(p.numel(), 2)});
    ids_[i].absmax = plan.add(kCategory, p.name + ".absmax", DType::kU8, {blocks});
    ids_[i].nested_absmax = plan.add(kCategory, p.name + ".nested_absmax", DType::kF32,
                                     {matrices * ceil_div(blocks / matrices, kNestedBlock)});
    ids_[i].offset = plan.add(kCategory, p.name + ".offset", DType::kF32, {matrices});
  }
  const PhaseMask buffer_phases = decoding_phases(largest_4bit > 0, runs_again);
  for (size_t b = 0; b < kNumBuffers; ++b) {
    const std::string name = b == 0 ? "decoded_weight" : "decoded_weight2";
    if (largest[b] > 0) buffer_ids_[b] = plan.add("workspace", name, compute, {largest[b]}, buffer_phases);
  }
  if (largest_4bit == 0) return;
  map_id_ = plan.add(kCategory, "absmax_map", DType::kF32, {static_cast<int64_t>(dynamic_map().size())});
  // Weights come in between steps, when evaluation's memory is free.
  absmax_id_ =
      plan.add("workspace", "weight_absmax", DType::kF32, {ceil_div(largest_4bit, kBlock4Bit)}, kEvaluation);
}

void CodedWeights::bind(const Arena& arena) {
  for (size_t b = 0; b < kNumBuffers; ++b) buffers_[b] = arena[buffer_ids_[b]];
  forget_decoded();
  absmax_ = arena[absmax_id_];
  map_ = arena[map_id_];
  codes_.clear();
  for (const Ids& ids : ids_) {
    codes_.push_back({arena[ids.codes], arena[ids.absmax], arena[ids.nested_absmax], arena[ids.offset]});
  }
}

TensorView CodedWeights::buffer(size_t i) const {
  const ParameterInfo& p = parameters_.at(i);
  PARKA_REQUIRE(p.is_coded());
  const auto number = static_cast<size_t>(ids_[i].buffer);
  held_[number] = kNothing;
  return {buffers_[number].data, buffers_[number].dtype, {p.rows, p.cols}};
}

void CodedWeights::stage(Device& device, size_t i, std::span<const float> values, int64_t first) const {
  const TensorView target = buffer(i);
  const auto count = static_cast<int64_t>(values.size());
  PARKA_REQUIRE(first >= 0 && first + count <= target.numel());
  if (target.dtype == DType::kF32) {
    device.copy_to_device(target.as<float>() + first, values.data(), static_cast<int64_t>(values.size_bytes()));
    return;
  }
  std::vector<BFloat16> rounded(values.size());
  parallel_for(count, 1 << 16, [&](int64_t begin, int64_t end) {
    std::transform(values.begin() + begin, values.begin() + end, rounded.begin() + begin, encode_bf16);
  });
  device.copy_to_device(target.as<BFloat16>() + first, rounded.data(), count * size_of(DType::kBF16));
}

void CodedWeights::encode(Device& device, size_t i) const {
  const ParameterInfo& p = parameters_.at(i);
  const Codes& codes = codes_[i];
  if (device.op_recorder() == nullptr) device.copy_to_device(map_.data, dynamic_map().data(), map_.bytes());
  const TensorView absmax = absmax_.rows(0, codes.absmax.numel());
  quantize_4bit(device, {.x = buffer(i).reshaped({p.numel()}),
                         .codes = codes.codes,
                         .absmax = absmax,
                         .format = format_of(p.base),
                         .block_size = kBlock4Bit});
  quantize_absmax(device, {.absmax = absmax,
                           .map = map_,
                           .codes = codes.absmax,
                           .nested_absmax = codes.nested_absmax,
                           .offset = codes.offset});
}

TensorView CodedWeights::decode(Device& device, size_t i) const {
  const ParameterInfo& p = parameters_.at(i);
  const Codes& codes = codes_[i];
  size_t& held = held_[static_cast<size_t>(ids_[i].buffer)];
  const bool is_there = held == i;
  const TensorView out = buffer(i);
  held = i;
  if (is_there) return out;
  dequantize_4bit(device, {.codes = codes.codes,
                           .absmax = codes.absmax,
                           .map = map_,
                           .nested_absmax = codes.nested_absmax,
                           .offset = codes.offset,
                           .out = out.reshaped({p.numel()}),
                           .format = format_of(p.base),
                           .block_size = kBlock4Bit});
  return out;
}

std::vector<CodeTensor> CodedWeights::tensors(size_t i) const {
  const Codes& codes = codes_.at(i);
  PARKA_REQUIRE(is_4bit(parameters_[i].base));
  return {{".codes", codes.codes},
          {".absmax", codes.absmax},
          {".nested_absmax", codes.nested_absmax},
          {".offset", codes.offset}};
}

// A model of this one weight.
std::vector<float> coded_values(const ParameterInfo& parameter, BaseFormat base, const PrecisionConfig& precision,
                                std::span<const float> values) {
  ParameterInfo one = parameter;
  one.unit = 1;
  one.first_element = 0;
  one.placement = {};
  one.trainable = false;
  one.base = base;
  ParameterTable table({one});
  table.num_blocks = 1;
  MemoryPlan plan;
  ModelWeights weights(table, Formats(precision), {WeightCopies::kRows}, WeightUse::kForward, plan);
  plan.finish();
  const auto device = make_cpu_device();
  const Arena arena(*device, plan);
  weights.bind(arena);
  weights.stage_coded(*device, 0, values, 0);
  weights.encode(*device, 0);
  const TensorView decoded = weights.operand(*device, 0);
  std::vector<float> all(values.size());
  parallel_for(decoded.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      all[static_cast<size_t>(k)] =
          decoded.dtype == DType::kF32 ? decoded.as<float>()[k] : decode_bf16(decoded.as<BFloat16>()[k]);
    }
  });
  return all;
}

}  // namespace parka
