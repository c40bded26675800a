#include "model/buffer_scope.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "model/parameter_table.h"

namespace parka {

BufferScope::BufferScope(const PrecisionConfig& precision, const BatchShape& shape, Purpose purpose,
                         MemoryPlan& plan)
    : precision_(precision),
      formats_(precision),
      shape_(shape),
      purpose_(purpose),
      evaluation_(purpose == Purpose::kEvaluation),
      reruns_(purpose == Purpose::kTraining && precision.recompute == Recompute::kBlock),
      is_forward_only_(purpose == Purpose::kForwardOnly),
      plan_(plan) {}

void BufferScope::enter_block(std::string_view stack, int64_t l, const ActivationOffload& offload,
                              bool goes_backward) {
  first_entry_ = plan_.entries().size();
  is_forward_only_ = purpose_ == Purpose::kForwardOnly || (!evaluation_ && !goes_backward);
  if (is_forward_only_) {
    input_prefix_ = kept_prefix_ = std::string(stack) + "forward_only.";
    return;
  }
  int64_t owner = evaluation_ ? 0 : l;
  while (offload.block_before(owner) >= 0) owner = offload.block_before(owner);
  input_prefix_ = block_prefix(stack, owner);
  kept_prefix_ = reruns_ ? std::string(stack) + "block." : input_prefix_;
}

std::vector<TensorId> BufferScope::kept_in_block() const {
  std::vector<TensorId> ids;
  for (size_t i = first_entry_; i < plan_.entries().size(); ++i) {
    const MemoryPlan::Entry& entry = plan_.entries()[i];
    if (entry.category == kept_category() && entry.name.starts_with(input_prefix_)) {
      ids.push_back({static_cast<int>(i)});
    }
  }
  return ids;
}

TensorId BufferScope::batch(const std::string& name, DType dtype, std::vector<int64_t> dims) {
  return declare("batch", name, dtype, std::move(dims), kept_phases());
}

TensorId BufferScope::workspace(const std::string& name, DType dtype, std::vector<int64_t> dims, PhaseMask phases) {
  return declare(workspace_category(), name, dtype, std::move(dims), workspace_phases(phases));
}

MatrixId BufferScope::workspace(const std::string& name, const Format& format, int64_t rows, int64_t cols,
                                PhaseMask phases, TensorId shared_scale) {
  return declare(workspace_category(), name, format, rows, cols, workspace_phases(phases), shared_scale);
}

TensorId BufferScope::growing_workspace(const std::string& name, int64_t bytes, std::vector<int64_t> larger,
                                        PhaseMask phases) {
  const auto [known, is_new] = declared_.try_emplace({name, DType::kU8});
  if (is_new) {
    known->second =
        plan_.add_growing(workspace_category(), name, bytes, std::move(larger), workspace_phases(phases));
  }
  return known->second;
}

TensorId BufferScope::kept(const std::string& name, DType dtype, std::vector<int64_t> dims) {
  return declare(kept_category(), kept_prefix_ + name, dtype, std::move(dims), kept_phases());
}

MatrixId BufferScope::kept(const std::string& name, const Format& format, int64_t rows, int64_t cols,
                           TensorId shared_scale) {
  return declare(kept_category(), kept_prefix_ + name, format, rows, cols, kept_phases(), shared_scale);
}

TensorId BufferScope::residual(const std::string& name, int64_t width, bool is_first_of_block, bool keep) {
  if (reruns_ && is_first_of_block && !is_forward_only_) {
    return declare(kept_category(), input_prefix_ + "input", compute(), {tokens(), width}, kept_phases());
  }
  if (keep) return kept(name, compute(), {tokens(), width});
  return workspace("residual", compute(), {tokens(), width}, forward(kBlockForward) | kHeadNorm);
}

GemmInputIds BufferScope::gemm_input(const std::string& name, int64_t width, bool save, PhaseMask forward,
                                     PhaseMask backward, bool is_read_again, bool is_fp8, bool is_fp8_forward,
                                     int64_t rows, const std::string& kept_suffix) {
  if (rows == 0) rows = tokens();
  save = save && is_read_again;
  const Format& format = formats_.input_of(is_fp8_forward);
  if (!is_fp8_forward) {
    GemmInputIds plain = {save ? kept(name + kept_suffix, format, rows, width)
                               : workspace(name, format, rows, width, forward | backward),
                          {}};
    if (is_fp8 && has_backward() && is_read_again) {
      plain.transposed = workspace(name + "_t", formats_.activation, width, rows, backward);
    }
    return plain;
  }
  sample(width);
  const TensorId scale = kept_scale(name + kept_suffix);
  GemmInputIds ids;
  ids.row = workspace(name, format, rows, width, forward, scale);
  if (!has_backward() || !is_read_again) return ids;
  ids.transposed = save ? kept(name + "_t" + kept_suffix, format, width, rows, scale)
                        : workspace(name + "_t", format, width, rows, backward, scale);
  return ids;
}

void BufferScope::sample(int64_t cols, int64_t ones_cols) {
  sample_needs_.buffer_cols = std::max(sample_needs_.buffer_cols, cols);
  sample_needs_.ones_cols = std::max(sample_needs_.ones_cols, ones_cols);
}

TensorId BufferScope::kept_scale(const std::string& name) {
  if (formats_.activation.scaling != Scaling::kTensor) return {};
  return kept(name + ".scale", DType::kF32, {1});
}

TensorId BufferScope::declare(const std::string& category, const std::string& name, DType dtype,
                              std::vector<int64_t> dims, PhaseMask phases) {
  const auto [known, is_new] = declared_.try_emplace({name, dtype});
  if (is_new) {
    known->second = plan_.add(category, name, dtype, std::move(dims), phases);
  } else {
    PARKA_REQUIRE(plan_[known->second].shape == dims);
    plan_.add_phases(known->second, phases);
  }
  return known->second;
}

MatrixId BufferScope::declare(const std::string& category, const std::string& name, const Format& format,
                              int64_t rows, int64_t cols, PhaseMask phases, TensorId shared_scale) {
  MatrixId matrix;
  matrix.format = format;
  matrix.data = declare(category, name, format.dtype, {rows, cols}, phases);
  if (format.scaling == Scaling::kTensor) {
    matrix.scale =
        shared_scale.valid() ? shared_scale : declare(category, name + ".scale", DType::kF32, {1}, phases);
  } else if (format.scaling != Scaling::kNone) {
    const auto shape = scale_shape(format.scaling, format.group, rows, cols);
    matrix.scale = declare(category, name + ".scale", format.scale_dtype, {shape[0], shape[1]}, phases);
  }
  return matrix;
}

}  // namespace parka
