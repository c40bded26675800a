#include "bench/kernel_bench.h"

// The ops that vision towers and projectors have beside a decoder's, at the sizes of SigLIP so400m with 384 pixels.
namespace parka::bench {
namespace {

constexpr int64_t kImages = 16, kGrid = 27, kPatches = kGrid * kGrid, kRows = kImages * kPatches;
constexpr int64_t kWidth = 1152, kMlpWidth = 4304;

void bench_affine_norm(Bench& bench) {
  bench.time(
      kVisionModel, "norm_forward.affine",
      [&](Tensors& t) {
        return NormForward{.kind = NormKind::kAffineLayerNorm,
                           .eps = 1e-6f,
                           .residual = t.bf16({kRows, kWidth}),
                           .branch = t.bf16({kRows, kWidth}),
                           .weight = t.bf16({kWidth}),
                           .bias = t.bf16({kWidth}),
                           .residual_out = t.bf16({kRows, kWidth}),
                           .y = t.bf16({kRows, kWidth}),
                           .mean = t.fp32({kRows}),
                           .rstd = t.fp32({kRows})};
      },
      norm_forward);
  bench.time(
      kVisionModel, "norm_backward.affine",
      [&](Tensors& t) {
        const TensorView d_residual = t.bf16({kRows, kWidth});
        return NormBackward{.kind = NormKind::kAffineLayerNorm,
                            .x = t.bf16({kRows, kWidth}),
                            .weight = t.bf16({kWidth}),
                            .mean = t.fp32({kRows}),
                            .rstd = t.fp32({kRows}),
                            .d_y = t.bf16({kRows, kWidth}),
                            .d_residual = d_residual,
                            .d_residual_out = d_residual,
                            .d_weight = t.fp32({kWidth}),
                            .d_bias = t.fp32({kWidth})};
      },
      norm_backward);
}

void bench_activation(Bench& bench) {
  for (const auto& [kind, suffix] : {std::pair{Activation::kGelu, ".gelu"},
                                     {Activation::kGeluTanh, ".gelu_tanh"},
                                     {Activation::kQuickGelu, ".quick_gelu"}}) {
    bench.time(
        kVisionModel, (std::string("activation_forward") + suffix).c_str(),
        [&](Tensors& t) {
          return ActivationForward{.kind = kind, .x = t.bf16({kRows, kMlpWidth}), .y = t.bf16({kRows, kMlpWidth})};
        },
        activation_forward);
    bench.time(
        kVisionModel, (std::string("activation_backward") + suffix).c_str(),
        [&](Tensors& t) {
          const TensorView gradient = t.bf16({kRows, kMlpWidth});
          return ActivationBackward{
              .kind = kind, .x = t.bf16({kRows, kMlpWidth}), .d_y = gradient, .d_x = gradient};
        },
        activation_backward);
  }
}

void bench_patches(Bench& bench) {
  constexpr int64_t kPatchSize = 14, kPixels = 384, kColumns = 592;
  bench.time(
      kVisionModel, "gather_patches",
      [&](Tensors& t) {
        const TensorView pixels = t.make(DType::kU8, {kImages, GatherPatches::kChannels, kPixels, kPixels});
        t.fill_zero(pixels);
        return GatherPatches{.pixels = pixels,
                             .patches = t.bf16({kRows, kColumns}),
                             .patch_size = kPatchSize,
                             .mean = {0.5f, 0.5f, 0.5f},
                             .deviation = {0.5f, 0.5f, 0.5f}};
      },
      gather_patches);
}

void bench_positions(Bench& bench) {
  bench.time(
      kVisionModel, "positions_forward",
      [&](Tensors& t) {
        const TensorView x = t.bf16({kRows, kWidth});
        return PositionsForward{.x = x, .positions = t.bf16({kPatches, kWidth}), .out = x};
      },
      positions_forward);
  bench.time(
      kVisionModel, "positions_backward",
      [&](Tensors& t) {
        return PositionsBackward{
            .d_out = t.bf16({kRows, kWidth}), .d_positions = t.fp32({kPatches, kWidth}), .num_images = kImages};
      },
      positions_backward);
}

void bench_space_to_channel(Bench& bench) {
  constexpr TokenMerge kMerge{.rows = kGrid, .columns = kGrid, .factor = 2};
  const int64_t merged = kImages * kMerge.merged(), across = kMerge.factor * kMerge.factor * kWidth;
  bench.time(
      kVisionModel, "space_to_channel_forward",
      [&](Tensors& t) {
        return SpaceToChannelForward{
            .x = t.bf16({kRows, kWidth}), .out = t.bf16({merged, across}), .merge = kMerge};
      },
      space_to_channel_forward);
  bench.time(
      kVisionModel, "space_to_channel_backward",
      [&](Tensors& t) {
        return SpaceToChannelBackward{
            .d_out = t.bf16({merged, across}), .d_x = t.bf16({kRows, kWidth}), .merge = kMerge};
      },
      space_to_channel_backward);
}

// The features of an image at the beginning of each sequence, which is four times as long.
void bench_rows(Bench& bench) {
  constexpr int64_t kFeatures = 196, kSequence = 4 * kFeatures, kEmbedding = 4096;
  const auto positions = [](Tensors& t) {
    std::vector<int32_t> rows;
    for (int64_t n = 0; n < kImages * kFeatures; ++n) {
      rows.push_back(static_cast<int32_t>(n / kFeatures * kSequence + n % kFeatures));
    }
    return t.upload(rows);
  };
  bench.time(
      kVisionModel, "scatter_rows",
      [&](Tensors& t) {
        return ScatterRows{.positions = positions(t),
                           .x = t.bf16({kImages * kFeatures, kEmbedding}),
                           .out = t.bf16({kImages * kSequence, kEmbedding})};
      },
      scatter_rows);
  bench.time(
      kVisionModel, "gather_rows",
      [&](Tensors& t) {
        return GatherRows{.positions = positions(t),
                          .x = t.bf16({kImages * kSequence, kEmbedding}),
                          .out = t.bf16({kImages * kFeatures, kEmbedding})};
      },
      gather_rows);
}

}  // namespace

void bench_vision(Bench& bench) {
  bench_patches(bench);
  bench_positions(bench);
  bench_space_to_channel(bench);
  bench_rows(bench);
  bench_affine_norm(bench);
  bench_activation(bench);
}

}  // namespace parka::bench
