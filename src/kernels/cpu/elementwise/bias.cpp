#include "kernels/ops/elementwise/bias.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

std::vector<float> decoded_vector(const TensorView& x) {
  std::vector<float> values(static_cast<size_t>(x.numel()));
  decode_elements(x, 0, x.numel(), values.data());
  return values;
}

}  // namespace

void bias_forward(Device&, const BiasForward& a) {
  const int64_t T = a.x.dim[0], N = a.x.dim[1];
  const std::vector<float> bias = decoded_vector(a.bias);
  constexpr int64_t kRows = 16;
  parallel_for(T, kRows, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(N));
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.x, t * N, N, row.data());
      for (int64_t c = 0; c < N; ++c) row[c] += bias[c];
      encode_elements(row.data(), t * N, N, a.x);
    }
  });
}

void bias_backward(Device&, const BiasBackward& a) {
  const int64_t T = a.d_y.dim[0], N = a.d_y.dim[1];
  constexpr int64_t kTile = 64;  // rows that are summed together
  Matrix parts(ceil_div(T, kTile), N);
  parallel_for(T, kTile, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(N)), sum(row);
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.d_y, t * N, N, row.data());
      for (int64_t c = 0; c < N; ++c) sum[c] += row[c];
    }
    std::copy(sum.begin(), sum.end(), parts.row(begin / kTile));
  });
  std::vector<float> total(static_cast<size_t>(N)), d_bias = decoded_vector(a.d_bias);
  for (int64_t i = 0; i < parts.rows(); ++i) {
    for (int64_t c = 0; c < N; ++c) total[c] += parts.row(i)[c];
  }
  for (int64_t c = 0; c < N; ++c) d_bias[c] += total[c];
  encode_elements(d_bias.data(), 0, N, a.d_bias);
}

}  // namespace parka::cpu
