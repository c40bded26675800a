#include "kernels/ops/vision.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

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

OpCost cost_of(const GatherPatches& a) { return moved(all_bytes(a.pixels, a.patches), a.patches); }
TensorView output_of(const GatherPatches& a) { return a.patches; }

}  // namespace parka
