#include "optim/rules/update_rule.h"

#include "core/error.h"

namespace parka {
namespace {

// `fp8`: the format where states are FP8.
DType state_dtype(StateFormat states, DType fp8) {
  switch (states) {
    case StateFormat::kFp32: return DType::kF32;
    case StateFormat::kBf16: return DType::kBF16;
    case StateFormat::kFp8:
    case StateFormat::kFp8Expanded: return fp8;
  }
  throw_internal("unknown state format {}", static_cast<int>(states));
}

}  // namespace

UpdateRule rule_of(const OptimizerConfig&, const ParameterInfo&) { return UpdateRule::kAdamw; }

std::vector<StateKind> state_kinds(const OptimizerConfig& config, UpdateRule rule) {
  switch (rule) {
    case UpdateRule::kAdamw:
      return {{"exp_avg", state_dtype(config.states, DType::kE4M3)},
              {"exp_avg_sq", state_dtype(config.states, config.exp_avg_sq_format), /*is_second=*/true}};
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
