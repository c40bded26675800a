#include "kernels/ops/elementwise/vision.h"

#include <algorithm>
#include <initializer_list>

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {
namespace {

constexpr int kThreads = 256;

// ---- Patches ----

struct Pixels {
  int height, width, patch, across, of_image;  // across, of_image: patches in a row of the grid, and in an image
  std::array<float, GatherPatches::kChannels> mean, deviation;

  explicit Pixels(const GatherPatches& a)
      : height(static_cast<int>(a.pixels.dim[2])),
        width(static_cast<int>(a.pixels.dim[3])),
        patch(static_cast<int>(a.patch_size)),
        across(width / patch),
        of_image(height / patch * across),
        mean(a.mean),
        deviation(a.deviation) {}

  __device__ float value(float pixel, int) const { return pixel; }
  __device__ float value(uint8_t pixel, int channel) const {
    return __fdiv_rn(__fsub_rn(__fdiv_rn(static_cast<float>(pixel), 255.0f), mean[channel]), deviation[channel]);
  }
};

// A block has a row.
template <typename X, typename Y>
__global__ void __launch_bounds__(kThreads)
    gather_patches_kernel(const X* pixels, Y* patches, const Pixels p, int cols) {
  const int image = static_cast<int>(blockIdx.x) / p.of_image, n = static_cast<int>(blockIdx.x) % p.of_image;
  const int first_y = n / p.across * p.patch, first_x = n % p.across * p.patch;
  const X* const of_image = pixels + int64_t{image} * GatherPatches::kChannels * p.height * p.width;
  Y* const row = patches + int64_t{blockIdx.x} * cols;
  for (int column = static_cast<int>(threadIdx.x); column < cols; column += kThreads) {
    const int j = column % p.patch, line = column / p.patch, i = line % p.patch, channel = line / p.patch;
    float value = 0.0f;
    if (channel < GatherPatches::kChannels) {
      const int64_t y = int64_t{channel} * p.height + first_y + i;
      value = p.value(of_image[y * p.width + first_x + j], channel);
    }
    row[column] = from_float<Y>(value);
  }
}

// ---- Positions ----

template <typename T>
struct PositionsTensors {
  const T* x;
  const T* positions_NC;
  const T* class_token_C;  // null: none
  T* out;
};

// A thread has kWidth adjacent columns of a row of `out`.
template <int kWidth, typename T>
__global__ void __launch_bounds__(kThreads)
    positions_forward_kernel(const PositionsTensors<T> a, int64_t count, int positions, int cols) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (at >= count) return;
  const int64_t row = at / cols, column = at % cols, b = row / positions, n = row % positions;
  const int first = a.class_token_C == nullptr ? 0 : 1;
  const T* const token =
      n < first ? a.class_token_C + column : a.x + (b * (positions - first) + n - first) * cols + column;
  float x[kWidth], position[kWidth];
  load(token, x);
  load(a.positions_NC + n * cols + column, position);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] += position[i];
  store(a.out + at, x);
}

template <typename G, typename D>
struct PositionsGradients {
  const G* d_out;
  G* d_x;              // null: not wanted
  D* d_positions_NC;   // null: not wanted
  D* d_class_token_C;  // null: not wanted
  int images, positions, patches, cols;
};

constexpr int kImagesAtOnce = 8;

// A thread has kWidth adjacent columns of one position of every image.
template <int kWidth, typename G, typename D>
__global__ void __launch_bounds__(kThreads) positions_backward_kernel(const PositionsGradients<G, D> a) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth,
                of_image = int64_t{a.positions} * a.cols;
  if (at >= of_image) return;
  const int64_t skipped = int64_t{a.positions - a.patches} * a.cols;  // the class token
  float sum[kWidth] = {};
  for (int b = 0; b < a.images; b += kImagesAtOnce) {
    Stored<G, kWidth> gradient[kImagesAtOnce];
#pragma unroll
    for (int i = 0; i < kImagesAtOnce; ++i) {
      gradient[i] = load_stored<kWidth>(a.d_out + (b + i) * of_image + at, b + i < a.images);
    }
#pragma unroll
    for (int i = 0; i < kImagesAtOnce; ++i) {
      if (b + i >= a.images) break;
      float values[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += values[k] = gradient[i][k];
      if (a.d_x != nullptr && at >= skipped) store(a.d_x + (b + i) * (of_image - skipped) + at - skipped, values);
    }
  }
  const auto add_to = [&](D* target) {
    float total[kWidth];
    load(target, total);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) total[i] += sum[i];
    store(target, total);
  };
  if (a.d_positions_NC != nullptr) add_to(a.d_positions_NC + at);
  if (a.d_class_token_C != nullptr && at < a.cols) add_to(a.d_class_token_C + at);
}

// ---- Space to channel ----

struct Grid {
  int rows, columns, factor, merged_rows, merged_columns;
  bool column_major;

  explicit Grid(const TokenMerge& m)
      : rows(static_cast<int>(m.rows)),
        columns(static_cast<int>(m.columns)),
        factor(static_cast<int>(m.factor)),
        merged_rows(static_cast<int>(m.merged_rows())),
        merged_columns(static_cast<int>(m.merged_columns())),
        column_major(m.column_major) {}
};

// A block has a token of the merged grids, with all tokens of its square; a token has `units` units, of 16 bytes or
// the 2 that every token is a multiple of. kBackward: from the merged tokens to the others.
template <bool kBackward, typename Unit>
__global__ void __launch_bounds__(kThreads)
    space_to_channel_kernel(Unit* tokens, Unit* merged, const Grid g, int units) {
  const int of_image = g.merged_rows * g.merged_columns, squares = g.factor * g.factor;
  const int b = static_cast<int>(blockIdx.x) / of_image, n = static_cast<int>(blockIdx.x) % of_image;
  const int i = g.column_major ? n % g.merged_rows : n / g.merged_columns;
  const int j = g.column_major ? n / g.merged_rows : n % g.merged_columns;
  Unit* const row = merged + int64_t{blockIdx.x} * squares * units;
  for (int at = static_cast<int>(threadIdx.x); at < squares * units; at += kThreads) {
    const int square = at / units, y = i * g.factor + square / g.factor, x = j * g.factor + square % g.factor;
    const bool inside = y < g.rows && x < g.columns;
    const int64_t token = (int64_t{b} * g.rows + y) * g.columns + x;
    if constexpr (kBackward) {
      if (inside) tokens[token * units + at % units] = row[at];
    } else {
      row[at] = inside ? tokens[token * units + at % units] : Unit{};
    }
  }
}

template <bool kBackward>
void merge_tokens(Device& device, const TokenMerge& m, const TensorView& tokens, const TensorView& merged,
                  const char* op) {
  const int64_t rows = merged.dim[0], bytes = tokens.dim[1] * size_of(tokens.dtype);
  PARKA_REQUIRE(rows <= INT32_MAX && merged.dim[1] <= INT32_MAX / 8);
  const auto launch = [&](auto unit) {
    using Unit = decltype(unit);
    space_to_channel_kernel<kBackward><<<static_cast<unsigned>(rows), kThreads, 0, as_cuda(device).stream()>>>(
        static_cast<Unit*>(tokens.data), static_cast<Unit*>(merged.data), Grid(m),
        static_cast<int>(bytes / static_cast<int64_t>(sizeof(Unit))));
  };
  if (bytes % 16 == 0 && is_aligned(tokens.data, 16) && is_aligned(merged.data, 16)) {
    launch(uint4{});
  } else {
    launch(uint16_t{});
  }
  check_launch(op);
}

// Of tensors not given the pointer is null.
bool is_wide(int64_t cols, int64_t width, std::initializer_list<const void*> tensors) {
  return cols % width == 0 &&
         std::all_of(tensors.begin(), tensors.end(), [](const void* p) { return is_aligned(p, 16); });
}

unsigned blocks_of(int64_t elements, int64_t width) {
  const int64_t blocks = ceil_div(elements, kThreads * width);
  PARKA_REQUIRE(blocks <= INT32_MAX);
  return static_cast<unsigned>(blocks);
}

}  // namespace

void gather_patches(Device& device, const GatherPatches& a) {
  const int64_t rows = a.patches.dim[0], cols = a.patches.dim[1];
  PARKA_REQUIRE(rows <= INT32_MAX && cols <= INT32_MAX - kThreads &&
                a.pixels.numel() / a.pixels.dim[0] <= INT32_MAX);
  const auto launch = [&](const auto* pixels) {
    with_plain_type(a.patches.dtype, [&](auto type) {
      gather_patches_kernel<<<static_cast<unsigned>(rows), kThreads, 0, as_cuda(device).stream()>>>(
          pixels, a.patches.as<decltype(type)>(), Pixels(a), static_cast<int>(cols));
    });
  };
  if (a.pixels.dtype == DType::kU8) {
    launch(a.pixels.as<uint8_t>());
  } else {
    launch(a.pixels.as<float>());
  }
  check_launch("gather_patches");
}

void positions_forward(Device& device, const PositionsForward& a) {
  const int64_t N = a.positions.dim[0], C = a.positions.dim[1];
  PARKA_REQUIRE(N * C <= INT32_MAX);
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = is_wide(C, kWide, {a.x.data, a.positions.data, a.class_token.data, a.out.data});
    const auto kernel = wide ? positions_forward_kernel<kWide, T> : positions_forward_kernel<1, T>;
    const PositionsTensors<T> tensors{a.x.as<T>(), a.positions.as<T>(),
                                      a.class_token.empty() ? nullptr : a.class_token.as<T>(), a.out.as<T>()};
    kernel<<<blocks_of(a.out.numel(), wide ? kWide : 1), kThreads, 0, as_cuda(device).stream()>>>(
        tensors, a.out.numel(), static_cast<int>(N), static_cast<int>(C));
  });
  check_launch("positions_forward");
}

void positions_backward(Device& device, const PositionsBackward& a) {
  const int64_t B = a.num_images, N = a.d_out.dim[0] / B, C = a.d_out.dim[1];
  PARKA_REQUIRE(B <= INT32_MAX - kImagesAtOnce && N * C <= INT32_MAX);
  const TensorView& target = a.d_positions.empty() ? a.d_class_token : a.d_positions;
  with_plain_type(a.d_out.dtype, [&](auto g) {
    with_plain_type(target.empty() ? a.d_out.dtype : target.dtype, [&](auto d) {
      using G = decltype(g);
      using D = decltype(d);
      constexpr int kWide = 16 / sizeof(G);
      const bool wide = is_wide(C, kWide, {a.d_out.data, a.d_x.data, a.d_positions.data, a.d_class_token.data});
      const PositionsGradients<G, D> gradients{
          .d_out = a.d_out.as<G>(),
          .d_x = a.d_x.empty() ? nullptr : a.d_x.as<G>(),
          .d_positions_NC = a.d_positions.empty() ? nullptr : a.d_positions.as<D>(),
          .d_class_token_C = a.d_class_token.empty() ? nullptr : a.d_class_token.as<D>(),
          .images = static_cast<int>(B),
          .positions = static_cast<int>(N),
          .patches = static_cast<int>(a.d_x.empty() ? N : a.d_x.dim[0] / B),
          .cols = static_cast<int>(C)};
      const auto kernel = wide ? positions_backward_kernel<kWide, G, D> : positions_backward_kernel<1, G, D>;
      kernel<<<blocks_of(N * C, wide ? kWide : 1), kThreads, 0, as_cuda(device).stream()>>>(gradients);
    });
  });
  check_launch("positions_backward");
}

void space_to_channel_forward(Device& device, const SpaceToChannelForward& a) {
  merge_tokens<false>(device, a.merge, a.x, a.out, "space_to_channel_forward");
}

void space_to_channel_backward(Device& device, const SpaceToChannelBackward& a) {
  merge_tokens<true>(device, a.merge, a.d_x, a.d_out, "space_to_channel_backward");
}

}  // namespace parka::cuda
