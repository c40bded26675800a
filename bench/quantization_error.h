#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/optimizer/adamw.h"

// How much a moment loses when it is stored in FP8, for groups of known content. Used by the benchmark of the same
// name and, with fewer groups, by the tests. The widest content exceeds E4M3's range: such groups keep k = 1, so
// both columns are the same there.
namespace parka::bench {

struct GroupContent {
  enum class Kind {
    kLogUniform,  // 1e-6 e^u with u uniform over [0, parameter]; signs alternate
    kNormal,      // N(0, parameter^2): like a first moment
    kChiSquare,   // chi-square with `parameter` degrees of freedom: like a second moment
  };
  std::string name;
  Kind kind;
  double parameter;
};

inline std::vector<GroupContent> all_group_contents() {
  using Kind = GroupContent::Kind;
  return {{"log-uniform, max/min = e^0.5", Kind::kLogUniform, 0.5},
          {"log-uniform, max/min = e^2", Kind::kLogUniform, 2.0},
          {"log-uniform, max/min = 30", Kind::kLogUniform, std::log(30.0)},
          {"log-uniform, max/min = 1e3", Kind::kLogUniform, std::log(1e3)},
          {"log-uniform, max/min = e^10", Kind::kLogUniform, 10.0},
          {"log-uniform, max/min = e^15", Kind::kLogUniform, 15.0},
          {"N(0,1) x 1e-5, like m", Kind::kNormal, 1e-5},
          {"chi-square of 20, like v", Kind::kChiSquare, 20.0}};
}

// Element i of group `group`.
inline float group_element(const GroupContent& content, uint64_t group, int64_t i) {
  const uint64_t index = group * kMomentGroup + static_cast<uint64_t>(i);
  switch (content.kind) {
    case GroupContent::Kind::kLogUniform: {
      const double magnitude = 1e-6 * std::exp(content.parameter * uniform_open(philox4x32(11, 0, index)[0]));
      return static_cast<float>(i % 2 == 0 ? magnitude : -magnitude);
    }
    case GroupContent::Kind::kNormal:
      return static_cast<float>(content.parameter * philox_normal2(11, 1, index)[0]);
    case GroupContent::Kind::kChiSquare: {
      double sum = 0;
      for (uint64_t n = 0; n < static_cast<uint64_t>(content.parameter); ++n) {
        const double normal = philox_normal2(11, 2 + n, index)[0];
        sum += normal * normal;
      }
      return static_cast<float>(sum);
    }
  }
  return 0;
}

struct QuantizationError {
  double rms_relative;  // root mean square over all elements of (stored - x) / x
  double max_relative;
  double normalised_mse;  // sum of (stored - x)^2 over sum of x^2
};

// Stores `num_groups` groups as a first moment, with or without range expansion, and reads them back.
inline QuantizationError quantization_error(Device& device, const GroupContent& content, bool expanded,
                                            int64_t num_groups) {
  const int64_t N = num_groups * kMomentGroup;
  std::vector<float> values(static_cast<size_t>(N)), stored(static_cast<size_t>(N)),
      amax(static_cast<size_t>(num_groups));
  std::vector<uint8_t> codes(static_cast<size_t>(N)), exponent(static_cast<size_t>(num_groups));
  for (int64_t i = 0; i < N; ++i) {
    values[i] = group_element(content, static_cast<uint64_t>(i / kMomentGroup), i % kMomentGroup);
  }
  MomentView moment{{codes.data(), DType::kE4M3, {N}}, {amax.data(), DType::kF32, {num_groups}}, {}};
  if (expanded) moment.exponent = {exponent.data(), DType::kU8, {num_groups}};
  moment_encode(device, {.values = {values.data(), DType::kF32, {N}}, .moment = moment, .is_second = false});
  moment_decode(device, {.moment = moment, .values = {stored.data(), DType::kF32, {N}}});

  double relative_squares = 0, max_relative = 0, squares = 0, error_squares = 0;
  for (int64_t i = 0; i < N; ++i) {
    const double error = double{stored[i]} - values[i];
    const double relative = std::abs(error / values[i]);
    relative_squares += relative * relative;
    max_relative = std::max(max_relative, relative);
    squares += double{values[i]} * values[i];
    error_squares += error * error;
  }
  return {std::sqrt(relative_squares / static_cast<double>(N)), max_relative, error_squares / squares};
}

}  // namespace parka::bench
