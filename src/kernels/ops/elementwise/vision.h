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

// Adds learned positions, one to each token of an image, after an optional class token:
//   out[b * N + s + p] = x[b * P + p] + positions[s + p],   P = N - s
//   out[b * N]         = class_token + positions[0]         with a class token: s = 1; else s = 0
// Sums are fp32, rounded once.
struct PositionsForward {
  TensorView x;                 // [B * P, C] fp32 or bf16, in
  TensorView positions;         // [N, C] as x, in
  TensorView class_token = {};  // [C] as x, in; empty: none
  TensorView out;               // [B * N, C] as x, out; without a class token it may be the memory of x
};
PARKA_OP(positions_forward, PositionsForward);

// d_positions[n] += sum_b d_out[b * N + n],   d_class_token += sum_b d_out[b * N],   d_x: the rows of patches
// Sums are fp32, in the order of images, and added once.
struct PositionsBackward {
  TensorView d_out;     // [B * N, C] fp32 or bf16, in
  TensorView d_x = {};  // [B * P, C] as d_out, out, in memory of its own; empty: not wanted. Without a class
                        // token it would be a copy of d_out
  TensorView d_positions = {};    // [N, C] fp32 or bf16, in/out; empty: not wanted
  TensorView d_class_token = {};  // [C] fp32 or bf16, as d_positions where that is given, in/out; empty: not wanted
  int64_t num_images;             // B
};
PARKA_OP(positions_backward, PositionsBackward);

// How squares of `factor` x `factor` tokens of a grid become one token with all of their channels. The grid is as
// if padded with zeros at the right and the bottom to multiples of `factor`.
struct TokenMerge {
  int64_t rows, columns;      // of the grid
  int64_t factor;             // k
  bool column_major = false;  // tokens come out column by column, as in VILA 1.5, and not row by row, as in NVILA

  int64_t merged_rows() const { return ceil_div(rows, factor); }
  int64_t merged_columns() const { return ceil_div(columns, factor); }
  int64_t merged() const { return merged_rows() * merged_columns(); }  // tokens that come out of an image
};

// out[b * M + m, (di * k + dj) * C + c] = x[b * N + (i * k + di) * columns + j * k + dj, c], m being the token of
// row i and column j of the merged grid, N = rows * columns, M = merged(); zeros for tokens outside of the grid.
struct SpaceToChannelForward {
  TensorView x;    // [B * N, C] fp32 or bf16, in
  TensorView out;  // [B * M, k * k * C] as x, out
  TokenMerge merge;
};
PARKA_OP(space_to_channel_forward, SpaceToChannelForward);

// d_x has d_out where forward has put x.
struct SpaceToChannelBackward {
  TensorView d_out;  // [B * M, k * k * C] fp32 or bf16, in
  TensorView d_x;    // [B * N, C] as d_out, out
  TokenMerge merge;
};
PARKA_OP(space_to_channel_backward, SpaceToChannelBackward);

}  // namespace parka
