#include "model/weights.h"

#include <algorithm>

#include "kernels/ops/quantize.h"
#include "model/phases.h"

namespace parka {

ModelWeights::ModelWeights(const ParameterTable& table, const Formats& formats, Transposed transposed,
                           MemoryPlan& plan)
    : parameters_(table.all), copy_ids_(table.all.size()) {
  for (const ParameterInfo& p : parameters_) {
    plain_ids_.push_back(plan.add("weights", p.name, formats.compute.dtype, {p.rows, p.cols}));
  }
  if (!formats.fp8_gemm) return;
  int64_t most_codes = 0, most_scales = 1;
  for (const BlockParameters& block : table.blocks) {
    for (int index : {block.qkv, block.attention_out, block.up_gate, block.down}) {
      const ParameterInfo& p = parameters_[index];
      CopyIds& copies = copy_ids_[index];
      copies.w = add_matrix(plan, "fp8 weights", p.name + ".fp8", formats.weight, p.rows, p.cols, kAllPhases);
      if (transposed == Transposed::kCached) {
        copies.w_t = add_matrix(plan, "fp8 weights", p.name + ".fp8_t", formats.weight, p.cols, p.rows, kAllPhases,
                                copies.w.scale);
      }
      const auto scales = scale_shape(formats.weight.scaling, formats.weight.group, p.cols, p.rows);
      most_codes = std::max(most_codes, p.rows * p.cols);
      most_scales = std::max(most_scales, scales[0] * scales[1]);
    }
  }
  if (transposed != Transposed::kWorkspace) return;
  constexpr PhaseMask kUse = kBackwardLinear;
  workspace_id_ = {plan.add("workspace", "weight.fp8_t", formats.weight.dtype, {most_codes}, kUse),
                   plan.add("workspace", "weight.fp8_t.scale", DType::kF32, {most_scales}, kUse), formats.weight};
}

void ModelWeights::bind(const Arena& arena) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    plain_.push_back(arena[plain_ids_[i]]);
    const CopyIds& ids = copy_ids_[i];
    Copies copies = {ids.w.view(arena, p.rows, p.cols), ids.w_t.view(arena, p.cols, p.rows)};
    if (workspace_id_.valid() && ids.w.valid()) {
      copies.w_t = workspace_id_.view(arena, p.cols, p.rows);
      if (copies.w_t.scaling == Scaling::kTensor) copies.w_t.scale = copies.w.scale;
    }
    copies_.push_back(copies);
  }
}

void ModelWeights::quantize(Device& device) const {
  for (size_t i = 0; i < plain_.size(); ++i) {
    if (copies_[i].w.empty()) continue;
    const ScaledView cached_t = workspace_id_.valid() ? ScaledView{} : copies_[i].w_t;
    parka::quantize(device, {.x = plain_[i], .out = copies_[i].w, .out_t = cached_t});
  }
}

const ScaledView& ModelWeights::transposed(Device& device, int index) const {
  const ScaledView& w_t = copies_[index].w_t;
  if (!workspace_id_.valid()) return w_t;
  // Codes with one scale are moved; scales of blocks are found again, as they were from the same weight.
  const ScaledView from = w_t.scaling == Scaling::kTensor ? copies_[index].w : ScaledView(plain_[index]);
  parka::quantize(device, {.x = from, .out = {}, .out_t = w_t, .scale_given = w_t.scaling == Scaling::kTensor});
  return w_t;
}

TensorView ModelWeights::plain(int index) const {
  if (index < 0) return {};
  const TensorView& w = plain_[index];
  return w.dim[0] == 1 ? w.reshaped({w.dim[1]}) : w;
}

}  // namespace parka
