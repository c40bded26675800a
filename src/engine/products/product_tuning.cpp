#include "engine/products/product_tuning.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "core/log/log.h"
#include "core/median.h"
#include "core/number_formats.h"
#include "engine/products/product_scratch.h"
#include "engine/products/random_operands.h"

namespace parka {
namespace {

constexpr int kRounds = 5;

// A projection on memory of its own.
class ProjectionContest {
 public:
  ProjectionContest(Device& device, const SwigluProjection& a)
      : device_(device),
        scratch_(device, a, RandomOperands::workspace_of(a.projection)),
        projection_(scratch_.place(a)) {
    const RandomOperands operands(device, RandomOperands::elements_of(projection_.projection));
    operands.fill(projection_.projection);
    for (const bool as_one : {false, true}) run(as_one);  // libraries set themselves up
    once_ = time(false, 1);
  }

  GemmChoice choose(double seconds) const {
    const double of_turn = seconds / (2 * kRounds);
    std::vector<double> of_two, ratios;
    for (int round = 0; round < kRounds; ++round) {
      double seconds_of[2] = {};
      for (const bool as_one : {round % 2 == 0, round % 2 != 0}) {
        time(as_one, runs_in(of_turn / 2));
        seconds_of[as_one ? 1 : 0] = time(as_one, runs_in(of_turn / 2));
      }
      of_two.push_back(seconds_of[0]);
      ratios.push_back(seconds_of[1] / seconds_of[0]);
    }
    GemmChoice choice = choose_kernels(key_of(projection_), median(of_two), median(ratios));
    choice.shape = cost_of(projection_).shape;
    if (choice.algorithm == GemmChoice::kTwoKernels || agrees()) return choice;
    log_warning("{}: one kernel is faster, but does not leave what two leave, the same each time: two are used",
                choice.gemm);
    return choose_kernels(key_of(projection_), median(of_two), 1);
  }

 private:
  void run(bool as_one) const {
    if (as_one) {
      swiglu_projection(device_, projection_);
    } else {
      gemm(device_, projection_.projection);
      swiglu_forward(device_, projection_.swiglu);
    }
  }

  int64_t runs_in(double seconds) const {
    return std::max<int64_t>(1, std::llround(seconds / std::max(once_, 1e-6)));
  }

  // Seconds of a run, of `count` in a row.
  double time(bool as_one, int64_t count) const {
    const std::unique_ptr<Mark> begin = device_.mark();
    for (int64_t i = 0; i < count; ++i) run(as_one);
    return device_.mark()->seconds_since(*begin) / static_cast<double>(count);
  }

  // The bytes of all that a run leaves; up and gate's codes and scales are the first.
  std::vector<std::vector<uint8_t>> left_by(bool as_one) const {
    const SwigluForward& swiglu = projection_.swiglu;
    std::vector<TensorView> outputs;
    for (const ScaledView* x : {&swiglu.up_gate, &swiglu.product, &swiglu.product_t, &swiglu.silu}) {
      if (x->empty()) continue;
      outputs.push_back(x->data);
      outputs.push_back(x->scale);
    }
    for (const TensorView& output : outputs) device_.fill_zero(output.data, output.bytes());
    run(as_one);
    std::vector<std::vector<uint8_t>> left;
    for (const TensorView& output : outputs) {
      left.emplace_back(static_cast<size_t>(output.bytes()));
      device_.copy_to_host(left.back().data(), output.data, output.bytes());
    }
    return left;
  }

  // What up and gate decode to.
  std::vector<float> decoded(const std::vector<std::vector<uint8_t>>& left) const {
    const std::vector<uint8_t>&codes = left[0], &scales = left[1];
    const auto group = static_cast<size_t>(projection_.swiglu.up_gate.group);
    std::vector<float> numbers(codes.size());
    for (size_t i = 0; i < codes.size(); ++i) {
      BFloat16 scale;
      std::memcpy(&scale, &scales[i / group * sizeof(scale)], sizeof(scale));
      numbers[i] = decode_e4m3(Float8E4M3{codes[i]}) * decode_bf16(scale);
    }
    return numbers;
  }

  // Whether one kernel leaves the same bits each time, and about what two leave: their sums may be rounded
  // otherwise, so that a few codes are neighbours.
  bool agrees() const {
    constexpr double kTolerance = 0x1p-5;  // of the mean magnitude; neighbours differ by 2^-3 of theirs
    const auto one = left_by(true);
    if (left_by(true) != one) return false;
    const std::vector<float> got = decoded(one), want = decoded(left_by(false));
    double difference = 0, magnitude = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += std::abs(got[i] - want[i]);
      magnitude += std::abs(want[i]);
    }
    return difference <= kTolerance * magnitude;
  }

  Device& device_;
  ProductScratch scratch_;
  SwigluProjection projection_;
  double once_ = 0;  // seconds of a run, as two kernels
};

}  // namespace

std::vector<GemmChoice> tune_products(Device& device, const std::vector<RecordedProduct>& products,
                                      const std::vector<SwigluProjection>& projections,
                                      const GemmTuneOptions& options) {
  constexpr double kShare = 0.04;  // of the seconds, for each projection
  const double seconds_of_each = kShare * options.budget_seconds;
  GemmTuneOptions of_gemms = options;
  of_gemms.budget_seconds -= seconds_of_each * static_cast<double>(projections.size());
  const std::vector<Gemm> gemms = gemms_of(products);
  std::vector<GemmChoice> choices;
  {
    const ProductScratch scratch(device, gemms);
    for (const Gemm& a : gemms) gemm(device, scratch.place(a));
    choices = tune_gemms(device, of_gemms);
  }
  if (!choices.empty()) replace_gemm_algorithms(device, choices);
  for (GemmChoice& choice : tune_projections(device, projections, seconds_of_each)) {
    choices.push_back(std::move(choice));
  }
  return choices;
}

std::vector<GemmChoice> tune_projections(Device& device, const std::vector<SwigluProjection>& projections,
                                         double seconds_of_each) {
  std::vector<GemmChoice> choices;
  for (const SwigluProjection& a : projections) {
    if (has_one_kernel(device, a)) choices.push_back(ProjectionContest(device, a).choose(seconds_of_each));
  }
  return choices;
}

GemmChoice choose_kernels(const std::string& key, double seconds_of_two, double ratio) {
  constexpr double kTie = 0.997;  // what is not below it may be noise
  const double two = 1e6 * seconds_of_two;
  if (ratio < kTie) return {key, std::string(GemmChoice::kOneKernel), ratio * two, two};
  return {key, std::string(GemmChoice::kTwoKernels), two, two};
}

}  // namespace parka
