#include "optim/rules/update_rule.h"

#include "core/error.h"

namespace parka {
namespace {

DType state_dtype(StateFormat states) {
  switch (states) {
    case StateFormat::kFp32: return DType::kF32;
    case StateFormat::kBf16: return DType::kBF16;
    case StateFormat::kFp8:
    case StateFormat::kFp8Expanded: return DType::kE4M3;
  }
  throw_internal("unknown state format {}", static_cast<int>(states));
}

}  // namespace

// Embeddings, heads, norms, biases and what finetune.method adds are AdamW's, as in Moonlight.
UpdateRule rule_of(const OptimizerConfig& config, const ParameterInfo& parameter) {
  const bool is_matrix = parameter.is_of_block() && parameter.rows > 1 && parameter.cols > 1;
  return config.kind == OptimizerKind::kMuon && is_matrix ? UpdateRule::kMuon : UpdateRule::kAdamw;
}

std::vector<StateKind> state_kinds(const OptimizerConfig& config, UpdateRule rule) {
  const DType format = state_dtype(config.states);
  switch (rule) {
    case UpdateRule::kAdamw: return {{"exp_avg", format}, {"exp_avg_sq", format, /*is_second=*/true}};
    case UpdateRule::kMuon: return {{"momentum", format}};
  }
  throw_internal("unknown update rule {}", static_cast<int>(rule));
}

ParameterState ParameterState::part(int64_t begin, int64_t count) const {
  PARKA_REQUIRE(begin % kMomentGroup == 0);
  ParameterState result = *this;
  result.visit([&](TensorView& tensor, int64_t group) {
    if (!tensor.empty()) tensor = tensor.rows(begin / group, ceil_div(count, group));
  });
  return result;
}

}  // namespace parka
