#include "kernels/ops/quantize/quantization_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kPieceRows = 16;

// Sums over some rows.
struct Totals {
  double squares = 0, error_squares = 0;
  int64_t saturated = 0, underflowed = 0, not_finite = 0;
  float amax = 0;

  void add(const Totals& other) {
    squares += other.squares;
    error_squares += other.error_squares;
    saturated += other.saturated;
    underflowed += other.underflowed;
    not_finite += other.not_finite;
    amax = std::max(amax, other.amax);
  }
};

// Adds one row: the numbers before, the values of their codes, and the codes without their scales.
void add_row(const float* x, const float* values, const float* codes, int64_t cols, DType format, Totals& totals) {
  const float largest = float8_traits(format).max;
  const double threshold = saturation_threshold(format);
  for (int64_t c = 0; c < cols; ++c) {
    if (!std::isfinite(x[c]) || !std::isfinite(values[c])) {
      ++totals.not_finite;
      continue;
    }
    const float magnitude = std::abs(x[c]);
    const double error = double{x[c]} - values[c];
    totals.squares += double{x[c]} * x[c];
    totals.error_squares += error * error;
    totals.underflowed += codes[c] == 0.0f && magnitude > 0.0f;
    // Both products are exact.
    const bool beyond = double{magnitude} * largest > threshold * std::abs(values[c]);
    totals.saturated += std::abs(codes[c]) == largest && beyond;
    totals.amax = std::max(totals.amax, magnitude);
  }
}

}  // namespace

void quantization_statistics(Device&, const QuantizationStatistics& a) {
  const int64_t rows = a.q.num_rows(), cols = a.q.num_cols(), x_cols = a.x.dim[1];
  std::vector<Totals> pieces(static_cast<size_t>(ceil_div(rows, kPieceRows)));
  parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(cols)), values(x), codes(x);
    for (int64_t r = begin * kPieceRows; r < std::min(end * kPieceRows, rows); ++r) {
      decode_elements(a.x, r * x_cols, cols, x.data());
      decode_rows(a.q, r, 1, values.data());
      decode_elements(a.q.data, r * cols, cols, codes.data());
      add_row(x.data(), values.data(), codes.data(), cols, a.q.data.dtype, pieces[r / kPieceRows]);
    }
  });
  Totals totals;
  for (const Totals& piece : pieces) totals.add(piece);
  QuantizationTotals before = {};
  if (a.accumulate) std::memcpy(&before, a.totals.as<float>(), sizeof(before));
  const float scale = rows * cols > 0 && a.q.scaling == Scaling::kTensor ? a.q.scale.as<float>()[0] : 0.0f;
  const auto joined = [](float norm, double squares) {
    return static_cast<float>(std::sqrt(double{norm} * norm + squares));
  };
  const QuantizationTotals result = {
      .elements = before.elements + static_cast<float>(rows * cols),
      .amax = std::max(before.amax, totals.amax),
      .scale = std::max(before.scale, scale),
      .saturated = before.saturated + static_cast<float>(totals.saturated),
      .underflowed = before.underflowed + static_cast<float>(totals.underflowed),
      .not_finite = before.not_finite + static_cast<float>(totals.not_finite),
      .norm = joined(before.norm, totals.squares),
      .error_norm = joined(before.error_norm, totals.error_squares),
  };
  std::memcpy(a.totals.as<float>(), &result, sizeof(result));
}

void moment_statistics(Device&, const MomentStatistics& a) {
  const uint8_t* const exponent = a.moment.exponent.as<uint8_t>();
  const float* const amax = a.moment.amax.as<float>();
  int32_t* const counts = a.counts.as<int32_t>();
  std::fill(counts, counts + kNumMomentExponents, 0);
  float smallest = std::numeric_limits<float>::infinity(), largest = 0.0f;
  for (int64_t g = 0; g < a.moment.amax.numel(); ++g) {
    if (amax[g] == 0.0f) continue;
    ++counts[exponent[g]];
    smallest = std::min(smallest, amax[g]);
    largest = std::max(largest, amax[g]);
  }
  a.amax.as<float>()[0] = smallest;
  a.amax.as<float>()[1] = largest;
}

}  // namespace parka::cpu
