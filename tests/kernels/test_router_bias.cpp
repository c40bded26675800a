#include <limits>
#include <vector>

#include "kernels/ops/moe/router_bias.h"
#include "tests/kernels/op_bounds.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

std::vector<float> moved(Device& device, const std::vector<float>& load, const std::vector<float>& bias,
                         float coefficient = 1.0f) {
  const auto E = static_cast<int64_t>(bias.size());
  const TestTensor loads(device, DType::kF32, {static_cast<int64_t>(load.size())}, load),
      factor(device, DType::kF32, {1}, {coefficient}), biases(device, DType::kF32, {E}, bias);
  move_router_bias(device, {.load = loads, .coefficient = factor, .rate = 0.5f, .bias = biases});
  CHECK((biases.guard_intact() && loads.host() == load));
  return biases.host();
}

TEST_CASE("move_router_bias raises experts with few tokens, and lowers those with many", "[kernels][moe]") {
  for (Device* device : devices()) {
    CAPTURE(device->name());
    // The mean is 3; what follows the experts' numbers does not count.
    CHECK(moved(*device, {0, 3, 9, 0, 100}, {1, 2, 3, 4}) == std::vector<float>{1.5f, 2, 2.5f, 4.5f});
    CHECK(moved(*device, {2, 2, 2}, {1, 2, 3}) == std::vector<float>{1, 2, 3});
    // A mean of 2^22 + 1/3, and numbers that fp32 holds only as long as nobody multiplies them by so many experts.
    CHECK(moved(*device, {4194304, 4194304, 4194305}, {0, 0, 0}) == std::vector<float>{0.5f, 0.5f, -0.5f});
    std::vector<float> load(500, 7), wanted(500, 0.5f);
    load[499] = 8;
    wanted[499] = -0.5f;
    CHECK(moved(*device, load, std::vector<float>(500)) == wanted);
  }
}

TEST_CASE("move_router_bias leaves all as it is in a step that is skipped", "[kernels][moe]") {
  for (Device* device : devices()) {
    CAPTURE(device->name());
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK(moved(*device, {0, 3, 9}, {1, 2, 3}, nan) == std::vector<float>{1, 2, 3});
  }
}

TEST_CASE("move_router_bias refuses loads of fewer experts", "[kernels][moe]") {
  Device& device = *devices().front();
  const TestTensor three(device, DType::kF32, {3}), four(device, DType::kF32, {4}), one(device, DType::kF32, {1});
  CHECK(contains(internal_error([&] {
                   move_router_bias(device, {.load = three, .coefficient = one, .rate = 1, .bias = four});
                 }),
                 "load"));
}

}  // namespace
