#include "model/precision_recipe.h"

namespace parka {

PrecisionConfig precision_recipe(Recipe recipe) {
  PrecisionConfig p;  // as for bf16
  p.recipe = recipe;
  switch (recipe) {
    case Recipe::kFp32: p.compute = DType::kF32; break;
    case Recipe::kBf16:
    case Recipe::kCoatOptimizer: break;
    case Recipe::kFp8Linear: p.gemm = GemmPrecision::kFp8Tensor; break;
    case Recipe::kFp8Block:
      p.gemm = GemmPrecision::kFp8Block;
      // A scale per block follows the gradients' range closely enough to spend the exponent bit on the mantissa.
      p.backward_format = DType::kE4M3;
      break;
    case Recipe::kCoatActivation:
    case Recipe::kCoat:
      p.gemm = GemmPrecision::kFp8Tensor;
      p.norm_input = Storage::kFp8;
      p.up_gate = Storage::kFp8;
      p.save_silu = true;
      break;
    case Recipe::kParka:
      p.gemm = GemmPrecision::kFp8Tensor;
      p.norm_input = Storage::kFp8;
      p.up_gate = Storage::kFp8;
      p.qkv = Storage::kFp8;
      // Not the attention output: attention's gradient needs it as forward made it, see docs/precision.md.
      p.save_norm_output = false;
      p.save_product = false;
      p.head = Storage::kFp8;
      p.sampled_amax = true;
      break;
  }
  return p;
}

PrecisionConfig without_fp8(const PrecisionConfig& precision) {
  PrecisionConfig plain;
  plain.compute = precision.compute;
  plain.save_norm_output = precision.save_norm_output;
  plain.save_product = precision.save_product;
  plain.recompute = precision.recompute;
  return plain;
}

}  // namespace parka
