#include "engine/products/product_tuning.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/log/log.h"
#include "core/median.h"
#include "core/number_formats.h"
#include "engine/products/product_scratch.h"
#include "engine/products/random_operands.h"
#include "engine/products/timed_runs.h"

namespace parka {
namespace {

constexpr int kRounds = 5;

void run(Device& device, const FusedProduct& a, bool as_one) {
  if (as_one) {
    run_as_one(device, a);
  } else {
    run_as_two(device, a);
  }
}

// What operands alone do not have.
void fill_tables(Device&, const SwigluProjection&) {}
void fill_tables(Device& device, const RopeProjection& a) {
  const TensorView& cos_sin = a.rope.cos_sin;
  const std::vector<float> table = rope_table(cos_sin.dim[0], cos_sin.dim[1], /*theta=*/10000);
  device.copy_to_device(cos_sin.data, table.data(), cos_sin.bytes());
}

// A product on memory of its own.
class KernelContest {
 public:
  KernelContest(Device& device, const FusedProduct& a)
      : device_(device),
        scratch_(device, a, RandomOperands::workspace_of(gemm_of(a))),
        product_(scratch_.place(a)) {
    const RandomOperands operands(device, RandomOperands::elements_of(gemm_of(product_)));
    operands.fill(gemm_of(product_));
    std::visit([&](const auto& op) { fill_tables(device, op); }, product_);
    for (const bool as_one : {false, true}) run(device_, product_, as_one);  // libraries set themselves up
    seconds_of_two_ = time(false, 1);
  }

  GemmChoice choose(double seconds) const {
    const int64_t half_of_turn = runs_in(seconds / (4 * kRounds), seconds_of_two_);
    std::vector<double> of_two, ratios;
    for (int round = 0; round < kRounds; ++round) {
      double seconds_of[2] = {};
      for (const bool as_one : {round % 2 == 0, round % 2 != 0}) {
        time(as_one, half_of_turn);
        seconds_of[as_one ? 1 : 0] = time(as_one, half_of_turn);
      }
      of_two.push_back(seconds_of[0]);
      ratios.push_back(seconds_of[1] / seconds_of[0]);
    }
    GemmChoice choice = choose_kernels(key_of(product_), median(of_two), median(ratios));
    choice.shape = cost_of(gemm_of(product_)).shape;
    if (choice.algorithm == GemmChoice::kTwoKernels || one_kernel_agrees(device_, product_)) return choice;
    log_warning("{}: one kernel is faster, but does not leave what two leave, the same each time: two are used",
                choice.gemm);
    return choose_kernels(key_of(product_), median(of_two), 1);
  }

 private:
  double time(bool as_one, int64_t count) const {
    return seconds_of_each(device_, count, [&] { run(device_, product_, as_one); });
  }

  Device& device_;
  ProductScratch scratch_;
  FusedProduct product_;
  double seconds_of_two_ = 0;
};

// What the ops leave; codes with a scale per group are the first.
std::vector<ScaledView> outputs_of(const SwigluProjection& a) {
  return {a.swiglu.up_gate, a.swiglu.product, a.swiglu.product_t, a.swiglu.silu};
}
std::vector<ScaledView> outputs_of(const RopeProjection& a) { return {a.rope.saved, a.rope.qkv}; }
std::vector<ScaledView> outputs_of(const FusedProduct& a) {
  return std::visit([](const auto& op) { return outputs_of(op); }, a);
}

// The bytes of all that is left, each output's codes before its scales.
std::vector<std::vector<uint8_t>> left_by(Device& device, const FusedProduct& a, bool as_one) {
  std::vector<TensorView> tensors;
  for (const ScaledView& x : outputs_of(a)) {
    if (!x.data.empty()) tensors.push_back(x.data);
    if (!x.scale.empty()) tensors.push_back(x.scale);
  }
  for (const TensorView& t : tensors) device.fill_zero(t.data, t.bytes());
  run(device, a, as_one);
  std::vector<std::vector<uint8_t>> left;
  for (const TensorView& t : tensors) {
    left.emplace_back(static_cast<size_t>(t.bytes()));
    device.copy_to_host(left.back().data(), t.data, t.bytes());
  }
  return left;
}

std::vector<float> decoded(const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales, int64_t group) {
  std::vector<float> numbers(codes.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    BFloat16 scale;
    std::memcpy(&scale, &scales[i / static_cast<size_t>(group) * sizeof(scale)], sizeof(scale));
    numbers[i] = decode_e4m3(Float8E4M3{codes[i]}) * decode_bf16(scale);
  }
  return numbers;
}

}  // namespace

std::vector<GemmChoice> tune_products(Device& device, const std::vector<RecordedProduct>& products,
                                      const std::vector<FusedProduct>& fused, const GemmTuneOptions& options) {
  constexpr double kShare = 0.04;  // of the seconds, for each of `fused` that has one kernel
  const double budget_of_each = kShare * options.budget_seconds;
  GemmTuneOptions of_gemms = options;
  for (const FusedProduct& a : fused) {
    if (has_one_kernel(device, a)) of_gemms.budget_seconds -= budget_of_each;
  }
  for (const RecordedProduct& product : products) of_gemms.counts[key_of(product.gemm)] = product.count;
  const std::vector<Gemm> gemms = gemms_of(products);
  std::vector<GemmChoice> choices;
  {
    const ProductScratch scratch(device, gemms);
    for (const Gemm& a : gemms) gemm(device, scratch.place(a));
    choices = tune_gemms(device, of_gemms);
  }
  if (!choices.empty()) replace_gemm_algorithms(device, choices);
  for (GemmChoice& choice : tune_fused_products(device, fused, budget_of_each)) {
    choices.push_back(std::move(choice));
  }
  return choices;
}

std::vector<GemmChoice> tune_fused_products(Device& device, const std::vector<FusedProduct>& products,
                                            double budget_of_each) {
  std::vector<GemmChoice> choices;
  for (const FusedProduct& a : products) {
    if (has_one_kernel(device, a)) choices.push_back(KernelContest(device, a).choose(budget_of_each));
  }
  return choices;
}

bool one_kernel_agrees(Device& device, const FusedProduct& placed) {
  constexpr double kTolerance = 0x1p-5;  // of the mean magnitude; neighbours differ by 2^-3 of theirs
  const int64_t group = outputs_of(placed).front().group;
  const auto one = left_by(device, placed, /*as_one=*/true);
  if (left_by(device, placed, /*as_one=*/true) != one) return false;
  const auto two = left_by(device, placed, /*as_one=*/false);
  const std::vector<float> got = decoded(one[0], one[1], group), want = decoded(two[0], two[1], group);
  double difference = 0, magnitude = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::abs(got[i] - want[i]);
    magnitude += std::abs(want[i]);
  }
  return difference <= kTolerance * magnitude;
}

GemmChoice choose_kernels(const std::string& key, double seconds_of_two, double ratio) {
  constexpr double kTie = 0.997;  // what is not below it may be noise
  const double two = 1e6 * seconds_of_two;
  if (ratio < kTie) return {key, std::string(GemmChoice::kOneKernel), ratio * two, two};
  return {key, std::string(GemmChoice::kTwoKernels), two, two};
}

}  // namespace parka
