#include "model/layers/expert_adapters.h"

#include <algorithm>

#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/moe/grouped_gemm.h"
#include "model/layers/adapters.h"
#include "model/step_context.h"

namespace parka {
namespace {

// out [R, N] = rows of a [R, K] times the weight [N, K]^T of their expert, or the weight [K, N] where `transposed`.
void product(const StepContext& step, const ExpertAdapters::Experts& experts, const TensorView& a, int weight,
             const TensorView& out, bool transposed = false) {
  grouped_gemm(step.device, {.a = a,
                             .b = step.weights.plain(weight),
                             .b_transposed = transposed,
                             .offsets = experts.offsets,
                             .counts = experts.counts,
                             .out = out});
}

}  // namespace

ExpertAdapters::ExpertAdapters(const ParameterTable& table, const std::string& layer) : rules_(table.lora) {
  std::ranges::copy_if(table.adapters, std::back_inserter(adapters_),
                       [&](const LoraAdapter& adapter) { return adapter.layer == layer; });
  const ParameterInfo& weight = table.all[static_cast<size_t>(table.index_of(layer))];
  cols_ = weight.cols;
  out_cols_ = weight.rows / weight.num_stacked;
}

void ExpertAdapters::declare(BufferScope& scope, const std::string& name, int64_t rows, PhaseMask forward,
                             PhaseMask backward) {
  if (empty()) return;
  const bool goes_back = scope.has_backward();
  const int64_t all_rows = static_cast<int64_t>(adapters_.size()) * rows;
  int64_t widest = goes_back ? cols_ : 0;
  for (const LoraAdapter& adapter : adapters_) widest = std::max(widest, adapter.rows);
  inner_ = scope.kept(name + ".lora_inner", scope.compute(), {all_rows, rules_.rank});
  part_ = scope.workspace(name + ".lora_part", scope.compute(), {rows, widest},
                          forward | (goes_back ? backward : PhaseMask{0}));
  if (goes_back)
    d_inner_ = scope.workspace(name + ".d_lora_inner", scope.compute(), {all_rows, rules_.rank}, backward);
}

TensorView ExpertAdapters::inner(const StepContext& step, TensorId id, size_t i, int64_t rows) const {
  return step.tensor(id, static_cast<int64_t>(adapters_.size()) * rows, rules_.rank)
      .rows(static_cast<int64_t>(i) * rows, rows);
}

void ExpertAdapters::forward(const StepContext& step, const Experts& experts, const TensorView& x,
                             const TensorView& out) const {
  const int64_t R = x.dim[0];
  for (size_t i = 0; i < adapters_.size(); ++i) {
    const LoraAdapter& adapter = adapters_[i];
    const TensorView inner = this->inner(step, inner_, i, R), part = step.tensor(part_, R, adapter.rows);
    product(step, experts, x, adapter.in, inner);
    if (out.empty()) continue;
    product(step, experts, inner, adapter.out, part);
    TensorView columns = from_column(out, adapter.first_row);
    columns.dim[1] = adapter.rows;
    add_columns(
        step.device,
        {.x = part, .y = columns, .factor = scale(), .accumulate = true, .y_padding = out_cols_ - adapter.rows});
  }
}

void ExpertAdapters::input_gradient(const StepContext& step, const Experts& experts, const TensorView& d_out,
                                    const TensorView& d_x) const {
  const int64_t R = d_out.dim[0];
  for (size_t i = 0; i < adapters_.size(); ++i) {
    const LoraAdapter& adapter = adapters_[i];
    const TensorView d_inner = inner(step, d_inner_, i, R), d_part = step.tensor(part_, R, adapter.rows),
                     d_input = step.tensor(part_, R, cols_);
    TensorView columns = from_column(d_out, adapter.first_row);
    columns.dim[1] = adapter.rows;
    add_columns(step.device, {.x = columns, .y = d_part, .factor = scale(), .x_padding = out_cols_ - adapter.rows});
    product(step, experts, d_part, adapter.out, d_inner, /*transposed=*/true);
    grouped_weight_gradient(step.device, {.d_y = d_part,
                                          .x = inner(step, inner_, i, R),
                                          .offsets = experts.offsets,
                                          .counts = experts.counts,
                                          .out = step.gradient(adapter.out),
                                          .accumulate = step.adds_to_gradients()});
    product(step, experts, d_inner, adapter.in, d_input, /*transposed=*/true);
    add_columns(step.device, {.x = d_input, .y = d_x, .accumulate = true});
  }
}

void ExpertAdapters::weight_gradient(const StepContext& step, const Experts& experts, const TensorView& x) const {
  for (size_t i = 0; i < adapters_.size(); ++i) {
    grouped_weight_gradient(step.device, {.d_y = inner(step, d_inner_, i, x.dim[0]),
                                          .x = x,
                                          .offsets = experts.offsets,
                                          .counts = experts.counts,
                                          .out = step.gradient(adapters_[i].in),
                                          .accumulate = step.adds_to_gradients()});
  }
}

}  // namespace parka
