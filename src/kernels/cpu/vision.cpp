#include "kernels/ops/vision.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

void copy_row(const TensorView& from, int64_t from_row, const TensorView& to, int64_t to_row) {
  const int64_t bytes = from.dim[1] * size_of(from.dtype);
  std::memcpy(static_cast<std::byte*>(to.data) + to_row * bytes,
              static_cast<const std::byte*>(from.data) + from_row * bytes, static_cast<size_t>(bytes));
}

// target[at, at + C) += sum, rounded once
void add_to(const TensorView& target, int64_t at, const std::vector<float>& sum) {
  std::vector<float> values(sum.size());
  const auto C = static_cast<int64_t>(sum.size());
  decode_elements(target, at, C, values.data());
  for (size_t c = 0; c < sum.size(); ++c) values[c] += sum[c];
  encode_elements(values.data(), at, C, target);
}

}  // namespace

void gather_patches(Device&, const GatherPatches& a) {
  const int64_t H = a.pixels.dim[2], W = a.pixels.dim[3], P = a.patch_size, across = W / P,
                of_image = H / P * across;
  const int64_t rows = a.patches.dim[0], cols = a.patches.dim[1];
  const bool is_byte = a.pixels.dtype == DType::kU8;
  const auto value = [&](int64_t channel, int64_t at) {
    if (!is_byte) return a.pixels.as<float>()[at];
    return (static_cast<float>(a.pixels.as<uint8_t>()[at]) / 255.0f - a.mean[channel]) / a.deviation[channel];
  };
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = begin; r < end; ++r) {
      const int64_t image = r / of_image, y = r % of_image / across * P, x = r % across * P;
      for (int64_t c = 0; c < GatherPatches::kChannels; ++c) {
        for (int64_t i = 0; i < P; ++i) {
          const int64_t from = ((image * GatherPatches::kChannels + c) * H + y + i) * W + x;
          for (int64_t j = 0; j < P; ++j) row[(c * P + i) * P + j] = value(c, from + j);
        }
      }
      encode_elements(row.data(), r * cols, cols, a.patches);
    }
  });
}

void positions_forward(Device&, const PositionsForward& a) {
  const int64_t N = a.positions.dim[0], C = a.positions.dim[1], first = a.class_token.empty() ? 0 : 1;
  parallel_for(a.out.dim[0], kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(C)), position(row);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t b = t / N, n = t % N;
      decode_elements(a.positions, n * C, C, position.data());
      if (n < first) {
        decode_elements(a.class_token, 0, C, row.data());
      } else {
        decode_elements(a.x, (b * (N - first) + n - first) * C, C, row.data());
      }
      for (int64_t c = 0; c < C; ++c) row[c] += position[c];
      encode_elements(row.data(), t * C, C, a.out);
    }
  });
}

void positions_backward(Device&, const PositionsBackward& a) {
  const int64_t B = a.num_images, N = a.d_out.dim[0] / B, C = a.d_out.dim[1];
  const int64_t patches = a.d_x.empty() ? 0 : a.d_x.dim[0] / B;
  parallel_for(B * patches, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      copy_row(a.d_out, t / patches * N + N - patches + t % patches, a.d_x, t);
    }
  });
  parallel_for(N, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(C)), sum(row);
    for (int64_t n = begin; n < end; ++n) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t b = 0; b < B; ++b) {
        decode_elements(a.d_out, (b * N + n) * C, C, row.data());
        for (int64_t c = 0; c < C; ++c) sum[c] += row[c];
      }
      if (!a.d_positions.empty()) add_to(a.d_positions, n * C, sum);
      if (n == 0 && !a.d_class_token.empty()) add_to(a.d_class_token, 0, sum);
    }
  });
}

}  // namespace parka::cpu
