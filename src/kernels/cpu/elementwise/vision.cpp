#include "kernels/ops/elementwise/vision.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

std::byte* bytes_at(const TensorView& t, int64_t element) {
  return static_cast<std::byte*>(t.data) + element * size_of(t.dtype);
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
      const int64_t from = t / patches * N + N - patches + t % patches;
      std::memcpy(bytes_at(a.d_x, t * C), bytes_at(a.d_out, from * C),
                  static_cast<size_t>(C * size_of(a.d_x.dtype)));
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

namespace {

// f(row of the grids' tokens, or -1 outside; row and square of it in the merged grids) for all squares.
template <typename F>
void for_each_merged(const TokenMerge& m, int64_t images, const F& f) {
  const int64_t k = m.factor;
  parallel_for(images * m.merged(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t b = t / m.merged(), n = t % m.merged();
      const int64_t i = m.column_major ? n % m.merged_rows() : n / m.merged_columns();
      const int64_t j = m.column_major ? n / m.merged_rows() : n % m.merged_columns();
      for (int64_t square = 0; square < k * k; ++square) {
        const int64_t y = i * k + square / k, x = j * k + square % k;
        f(y < m.rows && x < m.columns ? (b * m.rows + y) * m.columns + x : -1, t, square);
      }
    }
  });
}

}  // namespace

void space_to_channel_forward(Device&, const SpaceToChannelForward& a) {
  const int64_t C = a.x.dim[1], across = a.out.dim[1];
  const auto bytes = static_cast<size_t>(C * size_of(a.x.dtype));
  for_each_merged(a.merge, a.out.dim[0] / a.merge.merged(), [&](int64_t token, int64_t row, int64_t square) {
    std::byte* const to = bytes_at(a.out, row * across + square * C);
    if (token < 0) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, bytes_at(a.x, token * C), bytes);
    }
  });
}

void space_to_channel_backward(Device&, const SpaceToChannelBackward& a) {
  const int64_t C = a.d_x.dim[1], across = a.d_out.dim[1];
  const auto bytes = static_cast<size_t>(C * size_of(a.d_x.dtype));
  for_each_merged(a.merge, a.d_out.dim[0] / a.merge.merged(), [&](int64_t token, int64_t row, int64_t square) {
    if (token >= 0) std::memcpy(bytes_at(a.d_x, token * C), bytes_at(a.d_out, row * across + square * C), bytes);
  });
}

}  // namespace parka::cpu
