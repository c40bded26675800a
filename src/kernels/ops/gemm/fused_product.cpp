#include "kernels/ops/gemm/fused_product.h"

#include "kernels/device/device.h"
#include "kernels/device/product_recorder.h"
#include "kernels/op/check.h"

namespace parka {
namespace {

// The overload for this op alone: without one there is no way to compile, where a call would convert `Op` to a
// FusedProduct and come back to where it came from.
template <typename Op>
constexpr auto of_op(void (*overload)(Device&, const Op&)) {
  return overload;
}
template <typename Op, typename Result>
constexpr auto of_op(Result (*overload)(const Op&)) {
  return overload;
}

bool suits_one_kernel(const FusedProduct& a) {
  return std::visit([]<typename Op>(const Op& op) { return of_op<Op, bool>(parka::suits_one_kernel)(op); }, a);
}

}  // namespace

std::string_view op_of(const FusedProduct& a) {
  return std::visit([](const auto& op) { return op.kName; }, a);
}

bool is_fused_product(std::string_view op) {
  return [&]<typename... Ops>(const std::variant<Ops...>*) {
    return ((op == Ops::kName) || ...);
  }(static_cast<const FusedProduct*>(nullptr));
}

void run_as_one(Device& device, const FusedProduct& a) {
  std::visit([&]<typename Op>(const Op& op) { of_op<Op>(run_as_one)(device, op); }, a);
}

void run_as_two(Device& device, const FusedProduct& a) {
  std::visit([&]<typename Op>(const Op& op) { of_op<Op>(run_as_two)(device, op); }, a);
}

std::string key_of(const FusedProduct& a) {
  return std::visit([](const auto& op) { return fmt::format("{}, {}", key_of(op.projection), effect_of(op)); }, a);
}

const Gemm& gemm_of(const FusedProduct& a) {
  return std::visit([](const auto& op) -> const Gemm& { return op.projection; }, a);
}

int64_t workspace_of(const FusedProduct& a) {
  return std::visit([]<typename Op>(const Op& op) { return of_op<Op, int64_t>(workspace_of)(op); }, a);
}

bool has_one_kernel(Device& device, const FusedProduct& a) {
  if (!suits_one_kernel(a)) return false;
#ifdef PARKA_CUDA
  if (device.kind() == DeviceKind::kCuda) {
    return std::visit([&](const auto& op) { return cuda::has_one_kernel(device, op); }, a);
  }
#endif
  return device.kind() == DeviceKind::kCpu;
}

bool chooses_one_kernel(Device& device, const FusedProduct& a) {
  if (!suits_one_kernel(a)) return false;
  if (auto* recorder = dynamic_cast<ProductRecorder*>(device.op_recorder())) recorder->record_fused_product(a);
  return device.fuses(key_of(a));
}

}  // namespace parka
