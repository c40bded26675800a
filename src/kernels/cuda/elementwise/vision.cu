#include "kernels/ops/elementwise/vision.h"

#include "kernels/cuda/launch.cuh"

// What towers need: patches of images [images, channels, height, width] as rows, positions, and space to channel.
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

struct PatchGrid {
  int rows, columns, factor, merged_rows, merged_columns;
  bool column_major;

  explicit PatchGrid(const TokenMerge& m)
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
    space_to_channel_kernel(Unit* tokens, Unit* merged, const PatchGrid g, int units) {
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
  PARKA_REQUIRE(merged.dim[1] <= INT32_MAX / 8);
  const auto merge = [&](auto unit) {
    using Unit = decltype(unit);
    launch(as_cuda(device), op, space_to_channel_kernel<kBackward, Unit>, {rows, kThreads},
           static_cast<Unit*>(tokens.data), static_cast<Unit*>(merged.data), PatchGrid(m),
           static_cast<int>(bytes / static_cast<int64_t>(sizeof(Unit))));
  };
  bytes % 16 == 0 && are_aligned({tokens.data, merged.data}) ? merge(uint4{}) : merge(uint16_t{});
}

}  // namespace

void gather_patches(Device& device, const GatherPatches& a) {
  const int64_t rows = a.patches.dim[0], cols = a.patches.dim[1];
  PARKA_REQUIRE(cols <= INT32_MAX - kThreads && a.pixels.numel() / a.pixels.dim[0] <= INT32_MAX);
  const auto gather = [&](auto pixel) {
    using X = decltype(pixel);
    with_plain_type(a.patches.dtype, [&](auto type) {
      using Y = decltype(type);
      launch(as_cuda(device), "gather_patches", gather_patches_kernel<X, Y>, {rows, kThreads}, a.pixels.as<X>(),
             a.patches.as<Y>(), Pixels(a), static_cast<int>(cols));
    });
  };
  a.pixels.dtype == DType::kU8 ? gather(uint8_t{}) : gather(float{});
}

void positions_forward(Device& device, const PositionsForward& a) {
  const int64_t N = a.positions.dim[0], C = a.positions.dim[1];
  PARKA_REQUIRE(N * C <= INT32_MAX);
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = C % kWide == 0 && are_aligned({a.x.data, a.positions.data, a.class_token.data, a.out.data});
    const PositionsTensors<T> tensors{a.x.as<T>(), a.positions.as<T>(), optional<T>(a.class_token), a.out.as<T>()};
    launch(as_cuda(device), "positions_forward",
           wide ? positions_forward_kernel<kWide, T> : positions_forward_kernel<1, T>,
           {ceil_div(a.out.numel(), kThreads * (wide ? kWide : 1)), kThreads}, tensors, a.out.numel(),
           static_cast<int>(N), static_cast<int>(C));
  });
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
      const bool wide =
          C % kWide == 0 && are_aligned({a.d_out.data, a.d_x.data, a.d_positions.data, a.d_class_token.data});
      const PositionsGradients<G, D> gradients{.d_out = a.d_out.as<G>(),
                                               .d_x = optional<G>(a.d_x),
                                               .d_positions_NC = optional<D>(a.d_positions),
                                               .d_class_token_C = optional<D>(a.d_class_token),
                                               .images = static_cast<int>(B),
                                               .positions = static_cast<int>(N),
                                               .patches = static_cast<int>(a.d_x.empty() ? N : a.d_x.dim[0] / B),
                                               .cols = static_cast<int>(C)};
      launch(as_cuda(device), "positions_backward",
             wide ? positions_backward_kernel<kWide, G, D> : positions_backward_kernel<1, G, D>,
             {ceil_div(N * C, kThreads * (wide ? kWide : 1)), kThreads}, gradients);
    });
  });
}

void space_to_channel_forward(Device& device, const SpaceToChannelForward& a) {
  merge_tokens<false>(device, a.merge, a.x, a.out, "space_to_channel_forward");
}

void space_to_channel_backward(Device& device, const SpaceToChannelBackward& a) {
  merge_tokens<true>(device, a.merge, a.d_x, a.d_out, "space_to_channel_backward");
}

}  // namespace parka::cuda
