#include "kernels/ops/gemm/int8.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

// Multiplies each `width` numbers of a row by the Hadamard matrix of that order and 1 / sqrt(width).
void rotate(std::vector<float>& row, int64_t width) {
  const auto count = static_cast<int64_t>(row.size());
  for (int64_t distance = 1; distance < width; distance *= 2) {
    for (int64_t i = 0; i < count; ++i) {
      if ((i & distance) != 0) continue;
      float &x = row[static_cast<size_t>(i)], &y = row[static_cast<size_t>(i + distance)];
      const float sum = x + y, difference = x - y;
      x = sum;
      y = difference;
    }
  }
  const float factor = 1.0f / std::sqrt(static_cast<float>(width));
  for (float& x : row) x *= factor;
}

}  // namespace

void quantize_int8(Device&, const QuantizeInt8& a) {
  const int64_t R = a.x.dim[0], K = a.x.dim[1];
  parallel_for(R, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(K));
    for (int64_t r = begin; r < end; ++r) {
      decode_elements(a.x, r * K, K, row.data());
      rotate(row, rotation_width(K));
      float absmax = 0;
      bool finite = true;
      for (const float x : row) {
        absmax = std::max(absmax, std::abs(x));
        finite &= std::isfinite(x);
      }
      if (!finite) absmax = std::numeric_limits<float>::quiet_NaN();
      const float inverse = 127.0f / absmax;
      int8_t* const codes = a.out.data.as<int8_t>() + r * K;
      for (int64_t k = 0; k < K; ++k) {
        const float x = row[static_cast<size_t>(k)];
        codes[k] = std::isfinite(inverse) ? static_cast<int8_t>(std::nearbyint(x * inverse)) : int8_t{0};
      }
      a.out.scale.as<float>()[r] = absmax / 127.0f;
    }
  });
}

void gemm_int8(Device&, const GemmInt8& a) {
  const int64_t M = a.out.dim[0], N = a.out.dim[1], K = a.a.data.dim[1];
  const auto *x = a.a.data.as<int8_t>(), *w = a.b.data.as<int8_t>();
  const float *scale_x = a.a.scale.as<float>(), *scale_w = a.b.scale.as<float>();
  // A column at a time, so that a row of b is read once for all of a.
  parallel_for(N, 8, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t m = 0; m < M; ++m) {
        int32_t sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += int32_t{x[m * K + k]} * int32_t{w[n * K + k]};
        const float product = static_cast<float>(sum) * scale_x[m] * scale_w[n];
        if (a.out.dtype == DType::kF32) {
          float& out = a.out.as<float>()[m * N + n];
          out = a.accumulate ? out + product : product;
        } else {
          BFloat16& out = a.out.as<BFloat16>()[m * N + n];
          const BFloat16 rounded = encode_bf16(product);
          out = a.accumulate ? encode_bf16(decode_bf16(out) + decode_bf16(rounded)) : rounded;
        }
      }
    }
  });
}

}  // namespace parka::cpu
