#include "model/weights.h"

#include "kernels/ops/quantize.h"

namespace parka {

ModelWeights::ModelWeights(const ParameterTable& table, const Formats& formats, bool for_training, MemoryPlan& plan)
    : parameters_(table.all), copy_ids_(table.all.size()) {
  for (const ParameterInfo& p : parameters_) {
    plain_ids_.push_back(plan.add("weights", p.name, formats.compute.dtype, {p.rows, p.cols}));
  }
  if (!formats.fp8_gemm) return;
  for (const BlockParameters& block : table.blocks) {
    for (int index : {block.qkv, block.attention_out, block.up_gate, block.down}) {
      const ParameterInfo& p = parameters_[index];
      Copies& copies = copy_ids_[index];
      copies.w = add_matrix(plan, "fp8 weights", p.name + ".fp8", formats.weight, p.rows, p.cols, kAllPhases);
      if (!for_training) continue;
      copies.w_t = add_matrix(plan, "fp8 weights", p.name + ".fp8_t", formats.weight, p.cols, p.rows, kAllPhases,
                              copies.w.scale);
    }
  }
}

void ModelWeights::bind(const Arena& arena) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    plain_.push_back(arena[plain_ids_[i]]);
    copies_.push_back({copy_ids_[i].w.view(arena, p.rows, p.cols), copy_ids_[i].w_t.view(arena, p.cols, p.rows)});
  }
}

void ModelWeights::quantize(Device& device) const {
  for (size_t i = 0; i < plain_.size(); ++i) {
    if (copies_[i].w.empty()) continue;
    parka::quantize(device, {.x = plain_[i], .out = copies_[i].w, .out_t = copies_[i].w_t});
  }
}

TensorView ModelWeights::plain(int index) const {
  if (index < 0) return {};
  const TensorView& w = plain_[index];
  return w.dim[0] == 1 ? w.reshaped({w.dim[1]}) : w;
}

LinearWeight ModelWeights::linear(int index, bool fp8) const {
  return fp8 ? copies_[index] : LinearWeight{plain_[index], {}};
}

}  // namespace parka
