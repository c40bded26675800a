#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/quantize/quantize.h"

// How much an activation loses in FP8, by how many numbers share a scale. Used by the benchmark of the same name
// and by its test.
namespace parka::bench {

// Sums over the elements of one or several matrices.
struct CodeErrors {
  double relative_squares = 0;  // of (stored - x) / x, where x is not 0
  int64_t nonzero = 0;
  double error_squares = 0, squares = 0;  // of stored - x, and of x

  double rms_relative() const { return std::sqrt(relative_squares / static_cast<double>(nonzero)); }
  double normalised_rms() const { return std::sqrt(error_squares / squares); }

  void add(float value, float stored) {
    const double error = double{stored} - value;
    error_squares += error * error;
    squares += double{value} * value;
    if (value == 0) return;
    ++nonzero;
    relative_squares += error * error / (double{value} * value);
  }
};

// Adds what storing x [R, C], fp32 or bf16, as E4M3 makes of it: with a bf16 scale for each group of `group`
// columns or, if that is 0, an fp32 one for the matrix. The fp32 scale of a whole matrix is exact, a bf16 one
// rounded up.
inline void add_code_errors(Device& device, const TensorView& x, int64_t group, CodeErrors& errors) {
  const int64_t rows = x.dim[0], cols = x.dim[1];
  const Scaling scaling = group == 0 ? Scaling::kTensor : Scaling::kGroup;
  const auto scales = scale_shape(scaling, group, rows, cols);
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols));
  std::vector<float> scale(static_cast<size_t>(scales[0] * scales[1]));  // bf16 ones take half of it
  TensorView scale_view(scale.data(), DType::kBF16, {scales[0], scales[1]});
  if (group == 0) scale_view = {scale.data(), DType::kF32, {1}};
  const ScaledView coded({codes.data(), DType::kE4M3, {rows, cols}}, scale_view, scaling, group);
  std::vector<float> values(codes.size()), stored(codes.size());
  const TensorView plain(values.data(), DType::kF32, {rows, cols}), read(stored.data(), DType::kF32, {rows, cols});
  quantize(device, {.x = x, .out = plain});
  quantize(device, {.x = x, .out = coded});
  quantize(device, {.x = coded, .out = read});
  for (size_t i = 0; i < values.size(); ++i) errors.add(values[i], stored[i]);
}

struct ActivationContent {
  std::string name;
  int degrees;  // of freedom of Student's t distribution; 0: normal
};

inline const std::vector<ActivationContent> kActivationContents = {{"N(0, 1)", 0}, {"Student's t, 3 degrees", 3}};

// `count` independent numbers.
inline std::vector<float> activation_content(const ActivationContent& content, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (uint64_t i = 0; i < values.size(); ++i) {
    double x = philox_normal2(13, 0, i)[0], chi_square = 0;
    for (int n = 1; n <= content.degrees; ++n) {
      const double normal = philox_normal2(13, static_cast<uint64_t>(n), i)[0];
      chi_square += normal * normal;
    }
    if (content.degrees > 0) x /= std::sqrt(chi_square / content.degrees);
    values[i] = static_cast<float>(x);
  }
  return values;
}

}  // namespace parka::bench
