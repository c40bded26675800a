#include "kernels/ops/optimizer/grad_norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kPiece = 16384;

// Elements [begin, begin + count) of a part.
struct Piece {
  int64_t part, begin, count;
};

std::vector<Piece> pieces_of(const std::vector<TensorView>& parts) {
  std::vector<Piece> pieces;
  for (int64_t p = 0; p < static_cast<int64_t>(parts.size()); ++p) {
    const int64_t numel = parts[p].numel();
    for (int64_t begin = 0; begin < numel; begin += kPiece) {
      pieces.push_back({p, begin, std::min(kPiece, numel - begin)});
    }
  }
  return pieces;
}

// Element i goes to running sum i % kLanes: a fixed order that still lets the compiler use vectors.
double sum_of_squares(const float* x, int64_t count) {
  constexpr int64_t kLanes = 16;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += double{x[i + lane]} * x[i + lane];
  }
  for (int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += double{x[i + lane]} * x[i + lane];
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void sum_of_squares(Device&, const SumOfSquares& a) {
  const std::vector<Piece> pieces = pieces_of(a.parts);
  std::vector<double> piece_sums(pieces.size());
  parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(kPiece));
    for (int64_t n = begin; n < end; ++n) {
      decode_elements(a.parts[pieces[n].part], pieces[n].begin, pieces[n].count, values.data());
      piece_sums[n] = sum_of_squares(values.data(), pieces[n].count);
    }
  });
  std::vector<double> part_sums(a.parts.size());
  for (size_t n = 0; n < pieces.size(); ++n) part_sums[pieces[n].part] += piece_sums[n];
  double total = 0;
  for (size_t p = 0; p < part_sums.size(); ++p) {
    total += part_sums[p];
    a.partial.as<float>()[p] = static_cast<float>(part_sums[p]);
  }
  a.result.as<float>()[0] = static_cast<float>(total);
}

void clip_coefficient(Device&, const ClipCoefficient& a) {
  constexpr float kEpsilon = 1e-6f;
  const float squares = a.sum_of_squares.as<float>()[0], loss = a.loss.as<float>()[0];
  const float clipped = a.clipped_squares.empty() ? squares : a.clipped_squares.as<float>()[0];
  const bool finite = std::isfinite(squares) && std::isfinite(loss) && std::isfinite(clipped);
  const bool fits = finite && squares <= a.most_squares && loss <= a.most_loss;
  a.coefficient.as<float>()[0] =
      fits ? std::min(1.0f, a.max_norm / (std::sqrt(clipped) + kEpsilon)) : std::numeric_limits<float>::quiet_NaN();
}

void add_sum(Device&, const AddSum& a) {
  const float* x = a.x.as<float>();
  double sum = 0;
  for (int64_t i = 0; i < a.x.numel(); ++i) sum += x[i];
  float& total = a.total.as<float>()[0];
  total = static_cast<float>(total + sum);
}

}  // namespace parka::cpu
