#pragma once
#include <array>

#include "core/tensor.h"
#include "kernels/op/op.h"

// Ops of vision towers and projectors. Tokens of an image are the rows of its grid of patches, row by row.
namespace parka {

// patches[b * N + n, (c * P + i) * P + j] = pixel c, y * P + i, x * P + j of image b, n being the patch of row y
// and column x of the grid. So the convolution that embeds patches is a GEMM with its weight [v, 3, P, P]. Rows and
// columns of pixels beyond the last whole patch are left out. A byte stands for (byte / 255 - mean) / deviation of
// its channel, each operation rounded to fp32, as image processors compute it.
struct GatherPatches {
  static constexpr int64_t kChannels = 3;

  TensorView pixels;  // [B, 3, H, W] uint8, or fp32 that is normalized already, in
  TensorView
      patches;  // [B * N, K] fp32 or bf16, out; N = (H / P) (W / P), K >= 3 P P; columns from 3 P P on: zeros
  int64_t patch_size;                                             // P
  std::array<float, kChannels> mean = {}, deviation = {1, 1, 1};  // of bytes only
};
PARKA_OP(gather_patches, GatherPatches);

}  // namespace parka
