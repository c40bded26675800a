#include <set>

#include "bench/activation_error.h"
#include "bench/coat_rules.h"
#include "bench/moment_error.h"
#include "tests/kernels/moment_fixtures.h"
#include "tests/support/catch.h"

// The formulas behind the tables of docs/results/paper.md.
using namespace parka;
using namespace parka::bench;
using namespace parka::test;

namespace {

float rms_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return static_cast<float>(std::sqrt(squares / static_cast<double>(a.size())));
}

// Groups of a training run's range: about 2^10 for m, 2^4 for v.
std::vector<float> moments(bool is_second) {
  constexpr int64_t kCount = 40 * kMomentGroup + 5;
  return is_second ? log_uniform(kCount, 1e-9, 16, 31) : with_random_signs(log_uniform(kCount, 1e-8, 1000, 32), 33);
}

}  // namespace

TEST_CASE("DE8 has 256 different values, with the spacing of dynamic quantization", "[bench]") {
  const DynamicFloat8 with_sign(true), without(false);
  for (const DynamicFloat8* format : {&with_sign, &without}) {
    const std::vector<float>& values = format->values();
    CHECK(values.size() == 256);
    CHECK(std::set<float>(values.begin(), values.end()).size() == 256);
    CHECK(values.back() == 1.0f);
    CHECK(format->nearest(0.0f) == 0.0f);
    for (float value : values) CHECK(format->nearest(value) == value);
  }
  CHECK(with_sign.smallest() == 5.5e-7f);  // the middle of (1e-7, 1e-6]
  CHECK(without.smallest() == 3.25e-7f);   // of its lower half
  CHECK(with_sign.values().front() == -0.99296875f);
  CHECK(without.values().front() == 0.0f);
  CHECK(with_sign.nearest(-2.0f) == with_sign.values().front());
  // 64 intervals of 0.9 / 64 in the highest decade.
  CHECK(with_sign.nearest(0.5f) == static_cast<float>(0.1 + 0.9 * 28.5 / 64));
}

TEST_CASE("moments in DE8 keep zeros, signs, maxima and the v that are not 0", "[bench]") {
  for (bool is_second : {false, true}) {
    for (bool expanded : {false, true}) {
      const float sign = is_second ? 1.0f : -1.0f;
      const std::vector<float> x = {0.0f, 3e-5f, sign * 1e-5f, 1e-20f, sign * 2.9e-5f};
      std::vector<float> stored(x.size());
      store_dynamic_float8(x.data(), static_cast<int64_t>(x.size()), is_second, expanded, stored.data());
      CAPTURE(is_second, expanded);
      CHECK(stored[0] == 0.0f);
      CHECK(stored[1] == x[1]);
      CHECK(std::abs(stored[2] - x[2]) < 0.02f * std::abs(x[2]));
      CHECK((stored[3] > 0) == is_second);
      CHECK(std::abs(stored[4] - x[4]) < 0.02f * std::abs(x[4]));
    }
  }
  std::vector<float> zeros(kMomentGroup), stored(kMomentGroup, 1.0f);
  store_dynamic_float8(zeros.data(), kMomentGroup, true, true, stored.data());
  CHECK(stored == zeros);
}

TEST_CASE("errors of the update are those of a computation by hand", "[bench]") {
  Device& device = cpu_device();
  std::vector<float> m = moments(false), v = moments(true);
  constexpr size_t kUnused = 3 * kMomentGroup;  // parameters without a gradient, and a few more
  for (size_t n = 0; n < kUnused + 7; ++n) m[n] = v[n] = 0;
  constexpr double kEps = 1e-8;
  const UpdateErrors errors = update_errors(device, m, v, kEps);
  CHECK(errors.left_out == kUnused + 7);
  CHECK(errors.counted == static_cast<int64_t>(m.size() - kUnused - 7));
  for (size_t i = 0; i < UpdateErrors::kFormats; ++i) {
    for (size_t j = 0; j < UpdateErrors::kFormats; ++j) {
      const std::vector<float> first = stored_and_read(device, m, kStoredFormats[i], false);
      const std::vector<float> second = stored_and_read(device, v, kStoredFormats[j], true);
      double sum = 0;
      for (size_t n = kUnused + 7; n < m.size(); ++n) {
        const double error =
            first[n] / (std::sqrt(double{second[n]}) + kEps) - m[n] / (std::sqrt(double{v[n]}) + kEps);
        sum += error * error;
      }
      CHECK(std::abs(errors.mse(i, j) * static_cast<double>(errors.counted) - sum) <= 1e-9 * sum);
    }
  }
  CHECK(errors.gain() > 2);
  // A second moment in bf16 is off by 2^-9 at most: nearly all of the error is the first one's.
  const std::vector<float> plain = stored_and_read(device, m, kStoredFormats[kPlainE4M3], false);
  double of_first = 0;
  for (size_t n = kUnused + 7; n < m.size(); ++n) {
    const double error = (double{plain[n]} - m[n]) / (std::sqrt(double{v[n]}) + kEps);
    of_first += error * error / static_cast<double>(errors.counted);
  }
  CHECK(errors.mse(OtherPair::kFirstAlone) != of_first);
  CHECK(std::abs(errors.mse(OtherPair::kFirstAlone) - of_first) < 0.01 * of_first);
  CHECK(errors.mse(OtherPair::kFirstAlone) < errors.mse(kPlainE4M3, kPlainE4M3));
  UpdateErrors twice = errors;
  twice.add(errors);
  CHECK(twice.counted == 2 * errors.counted);
  CHECK(twice.mse(kDE8, kDE8) == errors.mse(kDE8, kDE8));
}

TEST_CASE("range expansion brings stored moments closer, in every format for m and in FP8 for v", "[bench]") {
  for (bool is_second : {false, true}) {
    std::vector<float> x = moments(is_second);
    const auto error = [&](size_t format) {
      return rms_difference(stored_and_read(cpu_device(), x, kStoredFormats[format], is_second), x);
    };
    CHECK(error(kExpandedE4M3) < 0.7f * error(kPlainE4M3));
    if (!is_second) CHECK(error(3) < error(kDE8));
  }
}

TEST_CASE("ranges of groups and their exponents are those of a computation by hand", "[bench]") {
  std::vector<float> values(2 * kMomentGroup + 3, 0.0f);
  values[0] = 1.0f, values[5] = -0x1p-10f;                           // zeros do not count
  values[kMomentGroup] = 1.0f, values[kMomentGroup + 7] = 0x1p-20f;  // wider than E4M3
  values[2 * kMomentGroup] = 3.0f;                                   // one magnitude
  MomentRanges ranges;
  ranges.add(values);
  CHECK(ranges.before == std::vector<double>{10, 20, 0});
  CHECK(ranges.exponents == std::vector<double>{26 / 16.0, 1, 1});  // floor(16 * 16.6147 / 10)
  CHECK(ranges.after == std::vector<double>{16.25, 20, 0});
  CHECK(MomentRanges::quantile({3, 1, 2}, 0.5) == 2);
  CHECK(MomentRanges::quantile({3, 1, 2}, 0.95) == 3);
}

TEST_CASE("COAT's expansion is Parka's where k is between 1 and its limit, and goes below 1 in wider groups",
          "[bench]") {
  for (bool is_second : {false, true}) {
    std::vector<float> x = moments(is_second);
    const std::vector<float> parka = stored_and_read(cpu_device(), x, kStoredFormats[kExpandedE4M3], is_second),
                             coat = stored_in_pair(OtherPair::kCoat, x, is_second);
    int64_t equal = 0;
    for (size_t n = 0; n < x.size(); ++n) equal += std::abs(coat[n] - parka[n]) <= 1e-4f * std::abs(parka[n]);
    CHECK(equal >=
          static_cast<int64_t>(0.995 * static_cast<double>(x.size())));  // the others lie between two codes
  }
  std::vector<float> wide(kMomentGroup, 1.0f);
  wide[3] = 0x1p-30f;
  CHECK(stored_and_read(cpu_device(), wide, kStoredFormats[kExpandedE4M3], false)[3] == 0.0f);
  const std::vector<float> coat = stored_in_pair(OtherPair::kCoat, wide, false);
  CHECK(coat[3] > 0x1p-31f);
  CHECK(coat[3] < 0x1p-29f);
}

TEST_CASE("moments with one scale per parameter keep the largest, and lose what is far below it", "[bench]") {
  const std::vector<float> x = {-4.0f, 1.0f, 0x1p-18f, 0.0f};
  CHECK(stored_in_pair(OtherPair::kTensorScales, x, false) == std::vector<float>{-4.0f, 1.0f, 0.0f, 0.0f});
  const std::vector<float> second = stored_in_pair(OtherPair::kTensorScales, {4.0f, 0x1p-18f, 0x1p-40f}, true);
  CHECK(second[0] == 4.0f);
  CHECK(std::abs(second[1] - 0x1p-18f) <= 0x1p-29f);
  CHECK(second[2] == 0.0f);
}

TEST_CASE("Parka's rule in plain loops is that of its ops, and COAT's differs in the scale alone", "[bench]") {
  for (const ActivationContent& content : kActivationContents) {
    constexpr int64_t kRows = 32, kCols = 256;
    std::vector<float> values = activation_content(content, kRows * kCols);
    for (int64_t group : {16, 0}) {
      CodeErrors of_op, of_rule, of_coat;
      add_code_errors(cpu_device(), {values.data(), DType::kF32, {kRows, kCols}}, group, of_op);
      add_stored(values, stored_by<kE4M3Traits>(ScaleRule::kParka, values, group), of_rule);
      add_stored(values, stored_by<kE4M3Traits>(ScaleRule::kCoat, values, group), of_coat);
      CHECK(of_rule.error_squares == of_op.error_squares);
      CHECK(of_rule.relative_squares == of_op.relative_squares);
      CHECK(of_coat.error_squares != of_rule.error_squares);
      CHECK(std::abs(of_coat.normalised_rms() / of_rule.normalised_rms() - 1) < 0.02);
    }
  }
  // A scale of 1 + 2^-8 is halfway between two of bf16: to nearest is below, so that the largest number saturates.
  const std::vector<float> x = {448.0f * (1 + 0x1p-8f), 1.0f};
  CHECK(stored_by<kE4M3Traits>(ScaleRule::kCoat, x, 0)[0] == 448.0f);
  CHECK(stored_by<kE4M3Traits>(ScaleRule::kParka, x, 0)[0] == x[0]);
  CHECK(stored_by<kE4M3Traits>(ScaleRule::kParka, x, 16)[0] == 448.0f * (1 + 0x1p-7f));
  CHECK(stored_by<kE4M3Traits>(ScaleRule::kParka, {0.0f, 0x1p-101f}, 16) == std::vector<float>(2));
}

TEST_CASE("activations lose more in larger groups", "[bench]") {
  for (const ActivationContent& content : kActivationContents) {
    constexpr int64_t kRows = 64, kCols = 256;
    std::vector<float> values = activation_content(content, kRows * kCols);
    values[17] = 0;
    double of_smaller = 0.015;
    for (int64_t group : {16, 32, 64, 128, 0}) {
      CodeErrors errors;
      add_code_errors(cpu_device(), {values.data(), DType::kF32, {kRows, kCols}}, group, errors);
      CAPTURE(content.name, group);
      CHECK(errors.nonzero == kRows * kCols - 1);
      CHECK(errors.normalised_rms() > of_smaller);
      CHECK(errors.normalised_rms() < 0.0361);  // half a unit in the last place of every number: 2^-4 / sqrt(3)
      CHECK(errors.rms_relative() < 0.05);
      of_smaller = errors.normalised_rms();
    }
  }
}
