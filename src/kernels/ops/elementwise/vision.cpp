#include "kernels/ops/elementwise/vision.h"

#include "kernels/op/define.h"

namespace parka {
namespace {

void check_merge(std::string_view op, const TokenMerge& m, std::string_view x_name, const TensorView& x,
                 std::string_view out_name, const TensorView& out) {
  if (m.rows < 1 || m.columns < 1 || m.factor < 1) {
    throw_internal("{}: a grid of {} x {} tokens and a factor of {}, wanted 1 or more of each", op, m.rows,
                   m.columns, m.factor);
  }
  const int64_t tokens = m.rows * m.columns, images = x.dim[0] / tokens, C = x.dim[1];
  check_tensor(op, x_name, x, {images * tokens, C}, {DType::kF32, DType::kBF16});
  check_tensor(op, out_name, out, {images * m.merged(), m.factor * m.factor * C}, {x.dtype});
}

}  // namespace

void gather_patches(Device& device, const GatherPatches& a) {
  constexpr std::string_view kOp = "gather_patches";
  const int64_t B = a.pixels.dim[0], H = a.pixels.dim[2], W = a.pixels.dim[3], P = a.patch_size;
  check_tensor(kOp, "pixels", a.pixels, {B, GatherPatches::kChannels, H, W}, {DType::kU8, DType::kF32});
  if (P < 1) throw_internal("{}: patch_size is {}, wanted 1 or more", kOp, P);
  const int64_t rows = B * (H / P) * (W / P), cols = a.patches.dim[1];
  check_tensor(kOp, "patches", a.patches, {rows, cols}, {DType::kF32, DType::kBF16});
  if (cols < GatherPatches::kChannels * P * P) {
    throw_internal("{}: patches is {}, wanted {} columns or more", kOp, describe(a.patches),
                   GatherPatches::kChannels * P * P);
  }
  if (rows == 0) return;
  PARKA_DISPATCH(gather_patches, device, a);
}

void positions_forward(Device& device, const PositionsForward& a) {
  constexpr std::string_view kOp = "positions_forward";
  const int64_t N = a.positions.dim[0], C = a.positions.dim[1];
  check_tensor(kOp, "positions", a.positions, {N, C}, {DType::kF32, DType::kBF16});
  if (!a.class_token.empty()) check_tensor(kOp, "class_token", a.class_token, {C}, {a.positions.dtype});
  const int64_t patches = N - (a.class_token.empty() ? 0 : 1);
  if (patches < 1)
    throw_internal("{}: positions is {}, which leaves no position to a patch", kOp, describe(a.positions));
  const int64_t images = a.x.dim[0] / patches;
  check_tensor(kOp, "x", a.x, {images * patches, C}, {a.positions.dtype});
  check_tensor(kOp, "out", a.out, {images * N, C}, {a.positions.dtype});
  if (a.out.numel() == 0) return;
  PARKA_DISPATCH(positions_forward, device, a);
}

void positions_backward(Device& device, const PositionsBackward& a) {
  constexpr std::string_view kOp = "positions_backward";
  const int64_t B = a.num_images, N = B < 1 ? 0 : a.d_out.dim[0] / B, C = a.d_out.dim[1];
  check_tensor(kOp, "d_out", a.d_out, {B * N, C}, {DType::kF32, DType::kBF16});
  if (a.d_out.numel() == 0) return;  // of no images the number of positions is unknown
  if (!a.d_x.empty()) {
    const bool has_class_token = a.d_x.dim[0] != B * N;
    check_tensor(kOp, "d_x", a.d_x, {B * (has_class_token ? N - 1 : N), C}, {a.d_out.dtype});
  }
  if (!a.d_positions.empty()) check_tensor(kOp, "d_positions", a.d_positions, {N, C}, {DType::kF32, DType::kBF16});
  if (!a.d_class_token.empty()) {
    check_tensor(kOp, "d_class_token", a.d_class_token, {C}, {DType::kF32, DType::kBF16});
    if (!a.d_positions.empty() && a.d_positions.dtype != a.d_class_token.dtype) {
      throw_internal("{}: d_class_token is {}, wanted the dtype of d_positions", kOp, describe(a.d_class_token));
    }
  }
  PARKA_DISPATCH(positions_backward, device, a);
}

void space_to_channel_forward(Device& device, const SpaceToChannelForward& a) {
  check_merge("space_to_channel_forward", a.merge, "x", a.x, "out", a.out);
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(space_to_channel_forward, device, a);
}

void space_to_channel_backward(Device& device, const SpaceToChannelBackward& a) {
  check_merge("space_to_channel_backward", a.merge, "d_x", a.d_x, "d_out", a.d_out);
  if (a.d_x.numel() == 0) return;
  PARKA_DISPATCH(space_to_channel_backward, device, a);
}

OpCost cost_of(const GatherPatches& a) { return moved(all_bytes(a.pixels, a.patches), a.patches); }

OpCost cost_of(const PositionsForward& a) {
  return moved(all_bytes(a.x, a.positions, a.class_token, a.out), a.out);
}

OpCost cost_of(const PositionsBackward& a) {
  return moved(all_bytes(a.d_out, a.d_x) + 2 * all_bytes(a.d_positions, a.d_class_token), a.d_out);
}

OpCost cost_of(const SpaceToChannelForward& a) { return moved(all_bytes(a.x, a.out), a.x); }

OpCost cost_of(const SpaceToChannelBackward& a) { return moved(2 * bytes_of(a.d_x), a.d_x); }

}  // namespace parka
